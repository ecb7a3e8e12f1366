"""The segments of a log: their files, how they are found, walked, read and checked."""
