"""Tables as a client sees them: definitions, writes, look-ups, scans, changes. Async;
``tidemill.client.sync`` wraps it.
"""
