"""Writing records: one sender of batches, and front ends for single records, columns and jobs."""
