"""The key-value engine under a table's state: its contract, RocksDB behind it, snapshots and recovery."""
