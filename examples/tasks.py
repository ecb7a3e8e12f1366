"""A work queue that loses nothing: three worker processes, tasks that fail, a worker and a node that die.

    python examples/tasks.py

Tasks are bookings on accounts. The order of an account's bookings matters, so the group has ``order="key"``.
Each worker writes what it has done into a file of its own. In the middle one worker and then the node die by
kill -9. At the end every booking must have been done, in the order of its account. One whose worker, or whose
node, died between doing it and saying so is done twice: that is what "at least once" means.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import tidemill

TASKS, ACCOUNTS, WORKERS = 1_500, 30, 3
GROUP, TOPIC = "bookings", "to-book"


def work(server: str, output: Path) -> None:
    """The program of a worker process."""
    db = tidemill.connect(server)

    @db.worker(GROUP, topic=TOPIC, concurrency=8, order="key", retry_backoff=0.05, max_deliveries=10)
    def book(record: tidemill.ShareRecord) -> None:
        time.sleep(random.random() / 100)  # The work.
        if record.delivery_count == 1 and record.json()["number"] % 50 == 0:
            raise tidemill.Retry("the bank is busy", delay=0.1)
        with output.open("a") as done:
            done.write(f"{time.time_ns()} {record.text()}\n")

    with db:
        book.run()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        demo = Demo(Path(directory))
        try:
            demo.run()
        finally:
            demo.end()


class Demo:
    """The processes of the demonstration, and what they have done."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.node: subprocess.Popen[str] | None = None
        self.server = "127.0.0.1:0"
        self.workers: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        self.start_node()
        db = tidemill.connect(self.server, timeout_ms=60_000)
        accounts = [f"account {number}" for number in range(ACCOUNTS)]
        numbers: dict[str, int] = defaultdict(int)
        tasks = []
        for _ in range(TASKS):
            account = random.choice(accounts)
            numbers[account] += 1
            tasks.append((account, {"account": account, "number": numbers[account]}))
        db.produce_many(TOPIC, tasks)
        self.say(f"{TASKS} bookings on {ACCOUNTS} accounts are written")
        for _ in range(WORKERS):
            self.start_worker()
        self.wait(TASKS // 4)
        self.workers[0].kill()
        self.say("a worker is killed (kill -9), another one is started")
        self.start_worker()
        self.wait(TASKS // 2)
        while not self.output(WORKERS).exists():
            time.sleep(0.05)  # A worker that has never reached its node does not wait for it.
        assert self.node is not None
        self.node.kill()
        self.node.wait()
        self.say("the node is killed (kill -9) and started again")
        self.start_node()
        with db, db.share(GROUP, TOPIC) as share:
            while share.lag():
                time.sleep(0.1)
        for worker in self.workers[1:]:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait() == 0, "a worker did not stop in an orderly way"
        self.compare(numbers)

    def compare(self, numbers: dict[str, int]) -> None:
        lines = sorted(self.done())  # Each begins with the time.
        booked: dict[str, list[int]] = defaultdict(list)
        for line in lines:
            booking = json.loads(line.split(" ", 1)[1])
            booked[booking["account"]].append(booking["number"])
        # Of a booking that was done twice the first counts.
        first = {account: list(dict.fromkeys(done)) for account, done in booked.items()}
        wrong = [account for account, count in numbers.items() if first[account] != [*range(1, count + 1)]]
        assert not wrong, f"not done, or not in order: {wrong}"
        self.say(f"{len(lines)} bookings were done, {len(lines) - TASKS} of them a second time")
        print("Every booking was done.")

    # --- processes

    def start_node(self) -> None:
        command = [sys.executable, "-m", "tidemill", "up", "--format", "json", "--listen", self.server]
        command += ["--data", str(self.directory / "data"), "--http", "", "--log-level", "error"]
        self.node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.node.stdout is not None
        self.server = json.loads(self.node.stdout.readline())["server"]

    def start_worker(self) -> None:
        command = [sys.executable, __file__, "worker", self.server, str(self.output(len(self.workers)))]
        # The log says what fails meanwhile; here it would be noise.
        self.workers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def output(self, worker: int) -> Path:
        return self.directory / f"done-{worker}"

    def done(self) -> list[str]:
        return [line for path in self.directory.glob("done-*") for line in path.read_text().splitlines()]

    def wait(self, tasks: int) -> None:
        while len(self.done()) < tasks:
            time.sleep(0.05)

    def say(self, text: str) -> None:
        print(f"{len(self.done()):6} done   {text}", flush=True)

    def end(self) -> None:
        for process in (*self.workers, self.node):
            if process is not None and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
