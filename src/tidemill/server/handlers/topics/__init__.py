"""APIs about topics: created and deleted, configs, log directories."""
