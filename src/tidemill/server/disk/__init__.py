"""The data directory and its disk: the lock, the space that is left, and the reserve for a full disk."""
