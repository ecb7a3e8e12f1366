"""A node inside this process: ``tidemill.open``."""
