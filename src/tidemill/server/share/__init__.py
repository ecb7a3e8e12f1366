"""Share groups on the nodes that lead their partitions: the shells of share partitions, and sessions."""
