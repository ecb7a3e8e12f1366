"""Cursors: regions, positions and checkpoints, and the coordinator that keeps those of a cluster."""
