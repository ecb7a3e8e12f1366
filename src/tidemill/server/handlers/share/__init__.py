"""Handlers of share groups."""
