"""Where the positions of cursors are kept: in memory, the cluster, a file, a database, or a transaction."""
