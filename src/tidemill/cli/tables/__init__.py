"""``tidemill table``: tables, and the rows in them."""
