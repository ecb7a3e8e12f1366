"""The share partition: what a share group has done with the records of one partition. No clock, no I/O."""
