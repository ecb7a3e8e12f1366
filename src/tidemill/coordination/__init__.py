"""What every coordinator over an internal topic is made of: shards, their logs, clocks and records.

| module | what |
| --- | --- |
| coordinator | a coordinator as its node sees it: started, expired, closed |
| shell | the shell around one shard: durability, stopping, timers |
| shards | which shards this node serves, loading them, Kafka's error codes |
| log | the log behind a shard, as the shell sees it |
| stored | records of internal topics: declared once, read and written by that |
| clock, ids, pools | time, random numbers and threads that a simulation replaces |
| turns | long work of the event loop in short turns |
| shares, moments | limits per client; consistent reads of several partitions |
| metrics, log_summary | what a node tells of itself |

The state inside a shard is the business of the packages above: groups and transactions.
"""
