"""APIs about groups: the classic and the consumer protocol, committed offsets."""
