"""The coordinators of a node: a registry, and a row for each."""
