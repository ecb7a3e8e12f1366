"""``tidemill worker``: running workers that are defined in a module."""
