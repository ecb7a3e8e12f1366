"""Workers: handlers that are run for every record of a topic."""
