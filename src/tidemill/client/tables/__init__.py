"""Tables for clients that await: definitions, writes, look-ups, scans, changes.

``tidemill.client.sync_client`` wraps it for programs that do not.
"""
