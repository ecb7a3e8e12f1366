"""The driver of ``test_spark_cluster``: a stream into a table, then a batch read of it, on a cluster.

``cluster_job.py MASTER SERVERS TOPIC TABLE FOLDER`` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import tidemill.spark


def main(master: str, servers: str, topic: str, table: str, folder: str) -> None:
    spark = tidemill.spark.session(
        "cluster",
        master=master,
        conf={
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.local.dir": str(Path(folder) / "local"),
            "spark.sql.warehouse.dir": str(Path(folder) / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
        },
    )
    source = spark.readStream.format("tidemill").option("servers", servers)
    rows = source.option("startingOffsets", "earliest").option("minPartitions", 4).load(topic)
    query = (
        rows.selectExpr("cast(cast(value as string) as bigint) as id", "offset", "partition")
        .writeStream.format("tidemill")
        .option("servers", servers)
        .option("checkpointLocation", str(Path(folder) / "checkpoint"))
        .trigger(availableNow=True)
        .start(table)
    )
    query.awaitTermination()
    reader = spark.read.format("tidemill").option("servers", servers).option("where", "id >= 100")
    found = reader.load(table)
    workers = found.rdd.mapPartitions(lambda _: [(os.getppid(), sorted(os.listdir(folder)))]).collect()
    result = {
        "count": found.count(),
        "sum": found.agg({"id": "sum"}).collect()[0][0],
        "driver": os.getpid(),
        "host": socket.gethostname(),
        "workers": workers,
        "folder": sorted(os.listdir(folder)),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
