"""Connections of clients: bytes in and out, what memory they may use, and where the node may listen."""
