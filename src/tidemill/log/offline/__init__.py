"""The files of a partition without a node: dump, verify, repair."""
