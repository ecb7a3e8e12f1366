"""Share groups (KIP-932): membership, assignment, and which share partitions have state."""
