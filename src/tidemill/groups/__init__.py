"""Consumer groups, share groups and committed offsets: folds over ``__consumer_offsets``.

| module | what |
| --- | --- |
| coordinator, shard | the shell around a shard's state, on top of ``tidemill.coordination`` |
| state | one shard's groups and offsets: handlers return replies, append records, replay them |
| offsets | committed offsets, and those of open transactions |
| classic.group, classic.roster | the classic group as a state machine; its member list |
| consumer.group, consumer.member | the consumer group (KIP-848) and its members: state and views |
| consumer.handlers | what requests and time do to consumer groups |
| consumer.heartbeats, consumer.classic_members | what a request of the new, of the classic protocol does |
| consumer.migration | a classic group becomes a consumer group, and back |
| consumer.target_assignment, consumer.assignors | which member gets which partition |
| share.coordinator | share groups (KIP-932): the shell, which calls the persister |
| share.group, share.member, share.handlers | the share group; what requests and time do to it |
| share.heartbeats, share.assignor | what a heartbeat does; who reads which partition |
| share.state_topics | which share partitions have state, and what is to be done about it |
| topics, patterns | which topics exist, subscriptions by pattern |
| records, consumer.records, share.records | what is in the log |
| messages, consumer.messages, share.messages, settings | values that go in and out |
"""
