"""Compaction of a partition's log: the latest record of every key is kept."""
