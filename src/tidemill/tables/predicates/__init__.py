"""Filters of table scans: trees of comparisons, from SQL or Arrow, bound to a schema and run on columns."""
