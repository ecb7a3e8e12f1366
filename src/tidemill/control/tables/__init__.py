"""Metadata of databases, tables and leases of snapshots."""
