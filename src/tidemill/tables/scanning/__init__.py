"""Reading a table's state: look-ups, pins, scan sessions, and splits for parallel readers."""
