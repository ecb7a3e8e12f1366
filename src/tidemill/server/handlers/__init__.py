"""One handler per API, grouped by what they are about."""
