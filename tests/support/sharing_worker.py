"""One of several processes that share the partitions of an ordered worker's name.

``python -m support.sharing_worker SERVERS NAME TOPIC KIND WHERE PARTITIONS…``: PARTITIONS are ``0,1 2,3``,
one worker for each, which stands by while another process has its partitions. KIND says where the position is
and what an effect is:

- ``cluster``: a line of the file WHERE, ``pid partition offset``; the cluster keeps the position;
- ``sqlite``, ``postgres``: a row of the table ``effects`` in the database WHERE, which also keeps it.

SIGUSR1 hands the partitions of the last worker over to whoever stands by for them, SIGTERM ends the process.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
from typing import Any

import tidemill
from tidemill import Ordered

BATCH = 16


def main(servers: str, name: str, topic: str, kind: str, where: str, *shares: str) -> None:
    # Taken by ``sigwait`` below; threads inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

    def connect() -> Any:
        if kind == "sqlite":
            return sqlite3.connect(where, timeout=60)
        import psycopg

        return psycopg.connect(where)

    mark = "?" if kind == "sqlite" else "%s"

    def write_row(record: Any, connection: Any) -> None:
        values = (os.getpid(), record.partition, record.offset)
        connection.execute(
            f"INSERT INTO effects (pid, part, record) VALUES ({mark}, {mark}, {mark})",
            values,
        )

    file = os.open(where, os.O_WRONLY | os.O_APPEND) if kind == "cluster" else -1

    def write_line(record: Any) -> None:
        os.write(file, b"%d %d %d\n" % (os.getpid(), record.partition, record.offset))

    with tidemill.connect(servers) as db:
        workers = [
            db.worker(
                name,
                topic,
                write_line if kind == "cluster" else write_row,
                ordered=Ordered(
                    batch_size=BATCH,
                    own=[int(each) for each in share.split(",")],
                    checkpoint=None if kind == "cluster" else connect,
                    standby=True,
                ),
            )
            for share in shares
        ]
        for worker in workers:
            threading.Thread(target=worker.start, daemon=True).start()
        while signal.sigwait({signal.SIGUSR1, signal.SIGTERM}) == signal.SIGUSR1:
            workers.pop().stop_and_join()
        for worker in workers:
            worker.stop_and_join()


if __name__ == "__main__":
    main(*sys.argv[1:])
