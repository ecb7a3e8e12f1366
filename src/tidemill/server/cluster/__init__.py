"""A node as one of several: how it joins, what it answers other nodes, and how it leaves."""
