"""The control plane: cluster metadata as typed commands, an immutable image and a store behind a protocol.

``store`` (the protocol), ``memory`` and ``sqlite`` (its implementations), ``commands`` (what can be asked),
``planning`` (what is refused, what is written), ``image`` (what was agreed on) and ``controller`` (the door).

Databases, tables and leases of snapshots have modules of their own for these: ``table_records``,
``table_commands``, ``table_rules``, ``table_planning``, ``lease_planning`` and ``table_images``.
``table_steps`` is for changes of tables that do not fit into one transaction.
"""
