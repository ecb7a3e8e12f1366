"""Replicas: a partition's offsets, who may see what, and the flushes behind it."""
