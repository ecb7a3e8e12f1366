"""Primary-key tables and typed logs: schemas, keys, rows, and the state that is folded from the log."""
