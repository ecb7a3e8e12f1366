"""APIs about records: Produce and Fetch, offsets, and the gates in front of a log."""
