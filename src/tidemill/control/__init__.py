"""The control plane: cluster metadata as typed commands, an immutable image and a store behind a protocol.

``stores/`` has the protocol and the stores that keep it, ``commands`` what can be asked, ``planning`` what is
refused or written, ``image`` what was agreed on, and ``controller`` validates and commits.

``tables/`` has the same for databases, tables and leases of snapshots; ``tables/steps.py`` makes changes of
tables that do not fit into one transaction.
"""
