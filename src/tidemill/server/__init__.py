"""The server: one port, one handler per API, one node around it."""
