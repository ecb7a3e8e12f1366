"""Rows of tables: column types, and the row formats in which a table's log holds them."""
