"""``tidemill bench``: a load test against a node."""
