"""Replication between nodes: followers fetch, their leader answers them."""
