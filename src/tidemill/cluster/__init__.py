"""The protocol that nodes speak with each other: messages, connections, the listener."""
