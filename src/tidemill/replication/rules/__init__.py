"""What is committed, who is in sync, who may lead, and who waits: the pure rules of replicas."""
