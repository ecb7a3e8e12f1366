"""Clients of a cluster: Kafka's protocol and tables, with and without await."""
