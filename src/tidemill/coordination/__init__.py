"""What every coordinator over an internal topic is made of: shards, their logs, clocks and records.

| module | what |
| --- | --- |
| shell | the shell around one shard: durability, stopping, timers |
| shards | which shards this node serves, loading them, Kafka's error codes |
| log | the log behind a shard, as the shell sees it |
| clock | time that a test can replace |
| binary | the few wire types that stored records are made of |

The state inside a shard is the business of the packages above: groups and transactions.
"""
