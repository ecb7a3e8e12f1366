"""Load on a share group with order per key, and the laws that must hold whatever happens to the nodes.

Writers number the records of each key. Members take records, release some, reject some if the group has a
dead-letter topic, and accept the others; dead letters are sent back all the time. All of it in this process,
so that what happened before what is known. The laws:

- what was accepted or rejected, and confirmed, is never delivered again;
- a record of a key comes for the first time only after all before it were accepted or rejected;
- in the end every record whose write was acknowledged has been accepted or rejected;
- every rejected record has one dead letter, no other has any, and each letter was sent back once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

from tidemill.client.admin.topics import LATEST, list_offsets
from tidemill.client.async_client import AsyncTidemill, connect_async
from tidemill.client.cluster import Cluster
from tidemill.client.consuming.record_reader import Message, RecordReader
from tidemill.client.share.lag import group_lag
from tidemill.client.share.record import ShareRecord
from tidemill.client.share.redrive import Choice, redrive
from tidemill.errors import TidemillError
from tidemill.share.letters import REDRIVE_PREFIX, REDRIVEN_FOR, read_letter

__all__ = ("ShareLoad",)

_KEYS = 40
_RELEASED_SHARE = 0.03
#: Of each key every record with such a number is rejected, whenever it comes.
_REJECTED_EVERY = 7
_BATCH = 25
#: Writers wait for the members when they are so far ahead: a slow machine must come to an end, too.
_BACKLOG_MAX = 500
_STUCK_SECONDS = 120.0


class ShareLoad:
    """Writers and members over one topic. ``problems`` has every law that was broken.

    ``dead_letters`` is a topic that exists: some records are rejected then, and sent back.
    """

    def __init__(
        self, servers: str, topic: str, *, members: int, seed: int, dead_letters: str | None = None
    ) -> None:
        self._servers = servers
        self._topic = topic
        self._members = members
        self._dead_letters = dead_letters
        self._random = random.Random(seed)
        self.problems: list[str] = []
        #: Keys to how many of their records were written and acknowledged.
        self.written: dict[str, int] = defaultdict(int)
        self.deliveries = 0
        #: How many letters were sent back, in the end.
        self.redriven = 0
        self._seen: dict[str, set[int]] = defaultdict(set)
        self._accepted: dict[str, set[int]] = defaultdict(set)
        self._confirmed: set[tuple[str, int]] = set()
        self._stopping = asyncio.Event()

    @property
    def accepted(self) -> int:
        """How many records were accepted or rejected, and confirmed."""
        return len(self._confirmed)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ShareLoad]:
        """Write and work until the block ends; then everything that was written is worked off."""
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(await connect_async(self._servers, timeout_ms=120_000))
                for _ in range(1 + self._members // 4)
            ]
            await clients[0].configure_share(
                self._topic,
                start="earliest",
                order="key",
                max_deliveries=10,
                lock=15,
                dead_letter=self._dead_letters,
                # What a transaction that was aborted has sent back does not count.
                read_committed=self._dead_letters is not None,
            )
            writing = asyncio.create_task(self._write(clients[0]))
            redriving = asyncio.create_task(self._redrive(clients[0].cluster))
            members = [
                asyncio.create_task(self._work(clients[1 + number % (len(clients) - 1)]))
                for number in range(self._members)
            ]
            try:
                yield self
                self._stopping.set()
                await asyncio.gather(writing, redriving)
                await self._drain(clients[0])
                if self._dead_letters is not None:
                    await self._redrive_rest(clients[0].cluster)
                    await self._drain(clients[0])
                    await self._check_letters(clients[0].cluster)
            finally:
                tasks = (writing, redriving, *members)
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    raise error

    async def until_accepted(self, more: int) -> None:
        """Wait until so many more records are accepted."""
        goal = self.accepted + more
        async with asyncio.timeout(2 * _STUCK_SECONDS):
            while self.accepted < goal:  # noqa: ASYNC110 - members do not know who waits
                await asyncio.sleep(0.02)

    async def _write(self, db: AsyncTidemill) -> None:
        keys = [f"key-{number}" for number in range(_KEYS)]
        while not self._stopping.is_set():
            if sum(self.written.values()) > self.accepted + _BACKLOG_MAX:
                await asyncio.sleep(0.05)
                continue
            chosen = [self._random.choice(keys) for _ in range(_BATCH)]
            following = dict(self.written)
            batch = []
            for key in chosen:
                following[key] = following.get(key, 0) + 1
                batch.append((key, f"{key}:{following[key]}"))
            # A retry of the same batch after an error that passed cannot be told from the first; the producer
            # is idempotent, and gives up only after two minutes.
            await db.produce_many(self._topic, batch)
            self.written = defaultdict(int, following)
            await asyncio.sleep(0.02)

    async def _work(self, db: AsyncTidemill) -> None:
        while True:
            async with db.share(self._topic, self._topic) as share:
                try:
                    while True:
                        ended = [each for each in await share.poll(20) if await self._handle(each)]
                        with contextlib.suppress(TidemillError):
                            # If some were not taken it is not known here which: none counts as confirmed.
                            await share.flush()
                            self._confirmed.update(map(_position, ended))
                except TidemillError:
                    # The nodes were away for longer than a client waits.
                    await asyncio.sleep(0.1)

    async def _handle(self, record: ShareRecord) -> bool:
        self.deliveries += 1
        key, _, text = record.text().partition(":")
        number = int(text)
        if _position(record) in self._confirmed:
            self.problems.append(f"{record!r} ({record.text()}) was accepted or rejected before")
        if record.header(REDRIVEN_FOR) is not None:
            record.accept()
            return True
        missing = set(range(1, number)) - self._accepted[key]
        if missing:
            self.problems.append(f"{record!r} ({record.text()}) came before {sorted(missing)[:5]}")
        self._seen[key].add(number)
        if self._random.random() < 0.2:
            await asyncio.sleep(self._random.random() * 0.01)
        if self._random.random() < _RELEASED_SHARE and record.delivery_count < 4:
            record.release(delay=self._random.choice([None, 0, 0.05]))
            return False
        self._accepted[key].add(number)
        if self._is_rejected(number):
            record.reject(f"every {_REJECTED_EVERY}th")
        else:
            record.accept()
        return True

    def _is_rejected(self, number: int) -> bool:
        return self._dead_letters is not None and number % _REJECTED_EVERY == 0

    async def _drain(self, db: AsyncTidemill) -> None:
        loop = asyncio.get_running_loop()
        before, since = -1, loop.time()
        while lag := await group_lag(db.cluster, self._topic, [self._topic]):
            if self.deliveries != before:
                before, since = self.deliveries, loop.time()
            if loop.time() - since > _STUCK_SECONDS:
                self.problems.append(f"{lag} records are left, and none comes: {await self._left(db)}")
                return
            await asyncio.sleep(0.1)
        for key, count in self.written.items():
            missing = set(range(1, count + 1)) - self._accepted[key]
            if missing:
                self.problems.append(
                    f"{key}: {len(missing)} records were never accepted: {sorted(missing)[:5]}"
                )

    async def _redrive(self, cluster: Cluster) -> None:
        """Send letters back as they come."""
        while self._dead_letters is not None and not self._stopping.is_set():
            await self._redrive_once(cluster)
            await asyncio.sleep(0.1)

    async def _redrive_once(self, cluster: Cluster) -> None:
        # The nodes may be away for longer than a client waits.
        with contextlib.suppress(TidemillError):
            await redrive(cluster, Choice(self._topic))

    async def _redrive_rest(self, cluster: Cluster) -> None:
        """Send back what is left, also what an aborted transaction had."""
        assert self._dead_letters is not None
        async with asyncio.timeout(2 * _STUCK_SECONDS):
            while await group_lag(cluster, REDRIVE_PREFIX + self._topic, [self._dead_letters]):
                await self._redrive_once(cluster)

    async def _check_letters(self, cluster: Cluster) -> None:
        """Compare the dead letters, and what was sent back, with what was rejected."""
        assert self._dead_letters is not None
        letters: Counter[tuple[str, int]] = Counter()
        for message in await _committed(cluster, self._dead_letters):
            letter = read_letter(message.record.headers)
            assert letter is not None, message
            letters[f"{letter.topic}-{letter.partition}", letter.offset] += 1
        sources: dict[str, tuple[str, int]] = {}
        redriven: Counter[str] = Counter()
        for topic, partition, record in await _committed(cluster, self._topic):
            text = (record.value or b"").decode()
            if any(name == REDRIVEN_FOR for name, _ in record.headers):
                redriven[text] += 1
            else:
                sources[text] = f"{topic}-{partition}", record.offset
        for text, source in sources.items():
            wanted = int(self._is_rejected(int(text.rpartition(":")[2])))
            if (letters[source], redriven[text]) != (wanted, wanted):
                self.problems.append(
                    f"{text} at {source}: {letters[source]} letters, sent back {redriven[text]} times; "
                    f"both should be {wanted}"
                )
        self.redriven = redriven.total()

    async def _left(self, db: AsyncTidemill) -> list[str]:
        """What the leaders say of the records that are left."""
        found = []
        for index in range(len((await db.cluster.topic(self._topic)).partitions)):
            body = {
                "group_id": self._topic,
                "topic": self._topic,
                "partition": index,
                "states": [],
                "limit": 5,
            }
            (leader,) = await db.cluster.leaders([(self._topic, index)])
            answer = await (await db.cluster.connection(leader)).request("DescribeShareRecords", body)
            found.append(f"{self._topic}-{index} at node {leader}: {answer}")
        return found


async def _committed(cluster: Cluster, topic: str) -> list[Message]:
    """All committed records of a topic."""
    partitions = [(topic, index) for index in range(len((await cluster.topic(topic)).partitions))]
    ends = await list_offsets(cluster, dict.fromkeys(partitions, LATEST), committed=True)
    reader = RecordReader(cluster, dict.fromkeys(partitions, 0), committed=True)
    found: list[Message] = []
    while any(reader.positions[each] < ends[each].offset for each in partitions):
        found += await reader.poll()
    await reader.close()
    return found


def _position(record: ShareRecord) -> tuple[str, int]:
    return f"{record.topic}-{record.partition}", record.offset
