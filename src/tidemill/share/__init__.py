"""Share groups at the nodes that lead partitions: delivery state of records, and where it is kept."""
