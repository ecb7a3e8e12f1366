"""The working parts of one node, without its sockets. Each module is one part; ``Broker`` bundles them.

| part | what it does |
| --- | --- |
| ``finding`` | topics and partitions by name, id and number, with Kafka's errors |
| ``catalogue`` | topics come and go: created, auto-created, internal ones, deleted; tables dropped |
| ``removal`` | files of what was deleted are removed in a thread |
| ``housekeeping`` | what is done from time to time, as one list |
| ``log_cleanup`` | retention and compaction of the logs that this node holds |
| ``producer_ids`` | producer ids that were never given before |
| ``gated_writes`` | writes whose batches are being looked at, and their end at a stop |
"""

from tidemill.server.broker.bundle import Broker

__all__ = ("Broker",)
