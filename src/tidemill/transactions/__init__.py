"""Transactions: a fold over ``__transaction_state``, and the markers that carry a decision to the partitions.

| module | what |
| --- | --- |
| transaction | one transactional id as a value, and every step that it can take |
| state | one shard's transactional ids: handlers check, append records, replay them |
| shard | the shell around a shard's state: carries decisions to the partitions |
| coordinator | which shard an id lives in, producer ids, Kafka's error codes |
| attempts | transactions that belong to a batch of a job, as values |
| jobs | what a shard knows of each job |
| publications | a job's batches become visible, each once |
| job_coordinator | the same for clients: which shard, waiting for what is decided |
| records | what is in the log |
| messages, settings | values that go in and out |
"""
