"""The key-value engine under a table's state: RocksDB, and the snapshots taken of it."""
