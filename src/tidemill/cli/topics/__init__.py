"""``tidemill topic``: topics, and the records in them."""
