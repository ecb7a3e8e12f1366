"""Cursors: reading a region from a durable position, and committing how far one came."""
