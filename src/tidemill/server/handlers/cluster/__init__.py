"""APIs about the cluster: versions, metadata, coordinators, features."""
