"""RocksDB behind the contract of ``tidemill.kv.contract``."""
