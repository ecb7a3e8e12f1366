"""The control plane: cluster metadata as typed commands, an immutable image and a store behind a protocol.

``stores/`` has the protocol and the stores that keep it, ``commands`` what can be asked, ``planning`` what is
refused or written, ``image`` what was agreed on, and ``controller`` validates and commits, on every node.

In a cluster of several nodes, ``session`` says which nodes live, and ``cluster_controller`` makes one of them
do what ``duties`` finds to do: elections, in-sync sets, moves. ``insync`` has the rules of in-sync sets.

``tables/`` has the same for databases, tables and leases of snapshots; ``tables/steps.py`` makes changes of
tables that do not fit into one transaction.
"""
