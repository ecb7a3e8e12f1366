"""What runs beside reads and appends, in threads: flushes, compaction, and the search for damage."""
