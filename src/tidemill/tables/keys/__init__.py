"""Keys of tables: their spelling in bytes, their order in the state, and the bucket that a key belongs to."""
