"""The services of tables in a node, loaded when it meets its first table."""
