"""Reading records: batches of partitions, records, and both as a member of a group."""
