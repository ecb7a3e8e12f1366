"""A request: its row in the table of APIs, its permissions, and its way to the handler and back."""
