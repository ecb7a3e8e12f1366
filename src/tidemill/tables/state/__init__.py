"""A table's state on its leader: the fold of its log, its snapshots, and the leases that keep them."""
