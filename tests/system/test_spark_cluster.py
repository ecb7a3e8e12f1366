"""A standalone Spark cluster: master, worker, driver and node share nothing but the network.

The worker runs in a mount namespace of its own in which the driver's folder is empty: whatever the connector
would look for on the driver's disk is not there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import tidemill
from support.processes import NodeProcess

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
DRIVER = Path(__file__).parents[1] / "support" / "spark_jobs" / "cluster_job.py"
RECORDS = 2_000


def environment(directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    return kept | {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(SPARK_CLASS.parents[1]),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(directory / "work"),
        "SPARK_LOCAL_DIRS": str(directory / "local"),
    }


@contextmanager
def daemon(directory: Path, pattern: str, *command: str) -> Iterator[str]:
    """A process of Spark, and what its log says where ``pattern`` is found."""
    directory.mkdir()
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if found := re.search(pattern, line):
                    break
            else:
                raise AssertionError("".join(seen))
            with _draining(process):
                yield found[0]
        finally:
            os.killpg(process.pid, 9)


@contextmanager
def _draining(process: subprocess.Popen[str]) -> Iterator[None]:
    """Read what it says: a full pipe would stop it."""
    import threading

    threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True).start()
    yield


def hidden(folder: Path) -> list[str]:
    """What to run a command with so that it sees nothing in ``folder``; nothing if that is not allowed."""
    probe = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none '{folder}' && ls -A '{folder}'"]
    try:
        allowed = subprocess.run(probe, capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        return []
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none \'{folder}\' && exec "$0" "$@"']


@pytest.mark.timeout(300)
def test_a_stream_and_a_batch_run_on_a_cluster_that_shares_nothing(tmp_path: Path) -> None:
    own = tmp_path / "driver"
    (own / "mine").mkdir(parents=True)
    master_command = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with (
        NodeProcess(tmp_path / "data") as node,
        daemon(
            tmp_path / "master",
            r"spark://\S+:\d+",
            str(SPARK_CLASS),
            "org.apache.spark.deploy.master.Master",
            *master_command,
        ) as master,
        daemon(
            tmp_path / "worker",
            "Successfully registered",
            *hidden(own),
            str(SPARK_CLASS),
            "org.apache.spark.deploy.worker.Worker",
            *("--cores", "2", "--memory", "1g", "--webui-port", "0", "--host", "127.0.0.1", master),
        ),
    ):
        admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
        for done in admin.create_topics([NewTopic("numbers", 3)]).values():
            done.result()
        producer = Producer({"bootstrap.servers": node.bootstrap_servers})
        for number in range(RECORDS):
            producer.produce("numbers", value=str(number))
        assert producer.flush(30) == 0
        with tidemill.connect(node.bootstrap_servers) as client:
            table = client.create_table(
                "cluster.numbers", "id bigint, offset bigint, partition int", primary_key="id", buckets=2
            )
            result = subprocess.run(
                [
                    sys.executable,
                    str(DRIVER),
                    master,
                    node.bootstrap_servers,
                    "numbers",
                    table.name,
                    str(own),
                ],
                cwd=own,
                env=environment(own),
                capture_output=True,
                text=True,
            )
            assert result.returncode == 0, result.stderr[-3_000:]
            found = json.loads(result.stdout.splitlines()[-1])
            assert found["count"] == RECORDS - 100
            assert found["sum"] == sum(range(100, RECORDS))
            assert sorted(row["id"] for row in table.scan(["id"]).to_arrow().to_pylist()) == list(
                range(RECORDS)
            )
        assert "checkpoint" in found["folder"]
        assert found["workers"]
        for parent, seen in found["workers"]:
            assert parent != found["driver"]
            if hidden(own):
                assert seen == []
