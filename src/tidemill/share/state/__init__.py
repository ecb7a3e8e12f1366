"""The share coordinator: keeps the state of share partitions in the records of ``__share_group_state``.

| module | what is in it |
| --- | --- |
| batches | ranges of records with one state, and what a change makes of them |
| records | the stored records: snapshots and updates, in Kafka's layout |
| states | the state of one shard, and what requests do to it: pure |
| shard, coordinator | the shell |
"""
