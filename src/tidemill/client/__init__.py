"""Clients of a node, and a node inside the process."""
