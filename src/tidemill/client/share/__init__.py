"""Share groups for Python: consumers that take a topic's records one by one, and settle each of them."""
