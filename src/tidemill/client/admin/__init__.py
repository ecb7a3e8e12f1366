"""Administration over the Kafka protocol: typed async functions."""
