"""The transaction coordinator over a log and partitions whose durability is a test's choice."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from support.coordination import settle
from support.transaction_world import World, Write
from tidemill.errors import ApiError, DiskFull, ErrorCode
from tidemill.transactions.messages import Producer, TransactionEnd
from tidemill.transactions.transaction import TransactionState
from tidemill.wire.jobs import AttemptId

NONE = ErrorCode.none
T0, T1 = ("t", 0), ("t", 1)
HOUR_MS = 3_600_000


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World(T0, T1, end_wait_ms=500)
    await world.coordinator.start()
    yield world
    await world.coordinator.close()


async def begin(
    world: World, *places: tuple[str, int], name: str = "x", timeout_ms: int = 10_000
) -> Producer:
    result = await world.coordinator.init_producer_id(name, timeout_ms)
    assert result.error is NONE
    assert await world.coordinator.add_partitions(name, result.producer, places) is NONE
    return result.producer


def markers(world: World, place: tuple[str, int]) -> list[TransactionEnd]:
    return [entry for entry in world.partitions[place].entries if isinstance(entry, TransactionEnd)]


def state(world: World, name: str = "x") -> str:
    return world.stored()[name].state.label


class TestDurability:
    async def test_no_answer_before_the_log_is_durable(self, world: World) -> None:
        world.log.syncs_at_once = False
        request = asyncio.create_task(world.coordinator.init_producer_id("x", 1_000))
        await settle()
        assert not request.done()
        world.log.sync()
        assert (await request).error is NONE

    async def test_no_write_before_the_start_is_durable(self, world: World) -> None:
        producer = (await world.coordinator.init_producer_id("x", 1_000)).producer
        world.log.syncs_at_once = False
        adding = asyncio.create_task(world.coordinator.add_partitions("x", producer, [T0]))
        looking = asyncio.create_task(world.verify("x", *producer, *T0))
        await settle()
        assert not world.partitions[T0].may_write(producer)
        assert not adding.done()
        assert not looking.done()
        world.log.sync()
        assert (await adding, await looking) == (NONE, NONE)
        assert world.partitions[T0].may_write(producer)

    async def test_no_marker_before_the_decision_is_durable(self, world: World) -> None:
        producer = await begin(world, T0, T1)
        world.log.syncs_at_once = False
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=True, new_epoch=False))
        await settle()
        assert markers(world, T0) == []
        world.log.sync()
        await settle()
        world.log.sync()
        assert (await ending).error is NONE
        assert markers(world, T0) == markers(world, T1) == [TransactionEnd(producer, True, 0)]

    async def test_not_complete_before_all_markers_are_durable(self, world: World) -> None:
        producer = await begin(world, T0, T1)
        world.partitions[T1].syncs_at_once = False
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=True, new_epoch=False))
        await settle()
        assert state(world) == "PrepareCommit"
        assert (
            await world.coordinator.add_partitions("x", producer, [T0]) is ErrorCode.concurrent_transactions
        )
        world.partitions[T1].sync()
        assert (await ending).error is NONE
        assert state(world) == "CompleteCommit"

    async def test_the_answer_to_an_end_does_not_wait_for_ever(self, world: World) -> None:
        producer = await begin(world, T0)
        world.partitions[T0].syncs_at_once = False
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=True, new_epoch=False))
        await settle()
        assert not ending.done()
        await world.clock.advance(500)
        assert (await ending).error is NONE
        assert state(world) == "PrepareCommit"


class TestLeaders:
    async def test_the_markers_of_one_leader_are_written_in_one_call(self, world: World) -> None:
        world.partitions[T0].leader = world.partitions[T1].leader = 2
        producer = await begin(world, T0, T1)
        assert (await world.coordinator.end("x", producer, commit=True, new_epoch=False)).error is NONE
        assert world.writes == [[T0, T1]]

    async def test_a_partition_that_changes_its_leader_is_written_there(self, world: World) -> None:
        world.partitions[T0].leader = world.partitions[T1].leader = 2
        world.partitions[T0].failures_left = world.partitions[T1].failures_left = 1
        producer = await begin(world, T0, T1)
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=True, new_epoch=False))
        await settle()
        world.partitions[T1].leader = None
        await world.clock.advance(500)
        assert (await ending).error is NONE
        assert world.writes == [[T0, T1], [T1], [T0]]
        assert state(world) == "CompleteCommit"

    async def test_a_leader_that_does_not_answer_holds_up_no_other(self, world: World) -> None:
        world.partitions[T0].leader = 2
        world.partitions[T0].syncs_at_once = False
        world.partitions[T1].failures_left = 1
        producer = await begin(world, T0, T1)
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=True, new_epoch=False))
        await settle()
        await world.clock.advance(100)
        assert len(markers(world, T1)) == 1
        assert not ending.done()
        world.partitions[T0].sync()
        assert (await ending).error is NONE


class TestCrashes:
    @pytest.mark.parametrize("commit", [True, False])
    async def test_a_decision_is_carried_out_after_a_crash(self, world: World, *, commit: bool) -> None:
        producer = await begin(world, T0, T1)
        world.partitions[T1].syncs_at_once = False
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=commit, new_epoch=False))
        await settle()
        ending.cancel()
        world.partitions[T1].syncs_at_once = True
        await world.crash()
        assert state(world) == ("CompleteCommit" if commit else "CompleteAbort")
        assert [marker.commit for marker in markers(world, T1)] == [commit]
        assert [marker.coordinator_epoch for marker in markers(world, T0)] == [0, 1]

    async def test_an_ongoing_transaction_still_times_out(self, world: World) -> None:
        producer = await begin(world, T0, timeout_ms=5_000)
        world.partitions[T0].write(Write(producer, "w"))
        await world.crash()
        assert state(world) == "Ongoing"
        await world.clock.advance(5_000)
        assert state(world) == "CompleteAbort"
        assert world.partitions[T0].decisions() == {"w": [False]}

    async def test_an_ongoing_transaction_still_times_out_if_the_clock_was_set_back_meanwhile(
        self, world: World
    ) -> None:
        await begin(world, T0, timeout_ms=5_000)
        world.clock.ms -= HOUR_MS
        await world.crash()
        await world.clock.advance(5_000)
        assert state(world) == "CompleteAbort"

    async def test_a_coordinator_whose_clock_is_ahead_lets_a_transaction_go_on(self, world: World) -> None:
        producer = await begin(world, T0, timeout_ms=5_000)
        world.clock.ms += HOUR_MS
        await world.crash()
        await world.clock.advance(4_000)
        assert (await world.coordinator.end("x", producer, commit=True, new_epoch=False)).error is NONE
        assert state(world) == "CompleteCommit"

    async def test_after_a_crash_a_write_is_let_in_by_asking(self, world: World) -> None:
        producer = await begin(world, T0)
        await world.crash()
        assert not world.partitions[T0].may_write(producer)
        assert await world.verify("x", *producer, *T0) is NONE
        assert world.partitions[T0].may_write(producer)
        assert await world.verify("x", *producer, *T1) is ErrorCode.transaction_abortable

    async def test_an_interrupted_init_can_be_asked_again(self, world: World) -> None:
        producer = (await world.coordinator.init_producer_id("x", 1_000)).producer
        bumped = (await world.coordinator.init_producer_id("x", 1_000, producer)).producer
        await world.crash()
        assert (await world.coordinator.init_producer_id("x", 1_000, producer)).producer == bumped

    async def test_a_failed_fsync_stops_the_shard_and_the_next_request_loads_it(self, world: World) -> None:
        producer = await begin(world, T0)
        world.log.syncs_at_once = False
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=True, new_epoch=False))
        await settle()
        world.log.fail_sync()
        assert (await ending).error is ErrorCode.not_coordinator
        world.log.syncs_at_once = True
        assert (await world.coordinator.end("x", producer, commit=False, new_epoch=False)).error is NONE
        assert [marker.commit for marker in markers(world, T0)] == [False]


class TestMarkers:
    async def test_a_partition_that_fails_is_tried_again(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.ERROR)
        producer = await begin(world, T0)
        world.partitions[T0].failures_left = 3
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=True, new_epoch=False))
        await settle()
        await world.clock.advance(10_000)
        assert (await ending).error is NONE
        assert state(world) == "CompleteCommit"

    async def test_a_deleted_partition_is_given_up(self, world: World) -> None:
        producer = await begin(world, T0, T1)
        world.partitions[T0].deleted = True
        await world.coordinator.end("x", producer, commit=True, new_epoch=False)
        assert state(world) == "CompleteCommit"
        assert len(markers(world, T1)) == 1

    async def test_a_fenced_coordinator_stops(self, world: World) -> None:
        producer = await begin(world, T0)
        world.partitions[T0].entries.append(TransactionEnd(producer, False, 9))
        ending = await world.coordinator.end("x", producer, commit=True, new_epoch=False)
        await settle()
        assert ending.error in (NONE, ErrorCode.not_coordinator)
        assert state(world) == "PrepareCommit"
        assert [marker.coordinator_epoch for marker in markers(world, T0)] == [9]

    async def test_a_full_disk_delays_the_completion(self, world: World) -> None:
        producer = await begin(world, T0)
        world.partitions[T0].syncs_at_once = False
        ending = asyncio.create_task(world.coordinator.end("x", producer, commit=True, new_epoch=False))
        await settle()
        world.log.refuse_with = DiskFull("no room")
        world.partitions[T0].sync()
        await world.clock.advance(1_000)
        assert (await ending).error is NONE
        assert state(world) == "PrepareCommit"
        world.log.refuse_with = None
        await world.clock.advance(10_000)
        assert state(world) == "CompleteCommit"

    async def test_the_new_epoch_is_in_the_marker_of_v2(self, world: World) -> None:
        producer = await begin(world, T0)
        result = await world.coordinator.end("x", producer, commit=True, new_epoch=True)
        assert result.producer == producer._replace(epoch=1)
        assert markers(world, T0) == [TransactionEnd(result.producer, True, 0)]


class TestFencing:
    async def test_a_second_producer_ends_the_first_ones_transaction(self, world: World) -> None:
        first = await begin(world, T0)
        world.partitions[T0].write(Write(first, "first"))
        again = await world.coordinator.init_producer_id("x", 1_000)
        assert again.error is ErrorCode.concurrent_transactions
        await settle()
        second = (await world.coordinator.init_producer_id("x", 1_000)).producer
        assert second.epoch == first.epoch + 2
        assert not world.partitions[T0].may_write(first)
        assert (await world.coordinator.end("x", first, commit=True, new_epoch=False)).error is (
            ErrorCode.producer_fenced
        )
        assert world.partitions[T0].decisions() == {"first": [False]}

    async def test_a_timeout_takes_an_epoch(self, world: World) -> None:
        producer = await begin(world, T0, timeout_ms=700)
        await world.clock.advance(699)
        assert state(world) == "Ongoing"
        await world.clock.advance(1)
        assert state(world) == "CompleteAbort"
        assert markers(world, T0)[0].producer.epoch == producer.epoch + 1
        assert await world.coordinator.add_partitions("x", producer, [T0]) is ErrorCode.producer_fenced

    async def test_more_partitions_do_not_prolong_it(self, world: World) -> None:
        producer = await begin(world, T0, timeout_ms=700)
        await world.clock.advance(500)
        await world.coordinator.add_partitions("x", producer, [T1])
        await world.clock.advance(200)
        assert state(world) == "CompleteAbort"

    async def test_a_timeout_waits_for_a_full_disk(self, world: World) -> None:
        await begin(world, T0, timeout_ms=700)
        world.log.refuse_with = DiskFull("no room")
        await world.clock.advance(700)
        assert state(world) == "Ongoing"
        world.log.refuse_with = None
        await world.clock.advance(1_000)
        assert state(world) == "CompleteAbort"


class TestHousekeeping:
    async def test_ids_that_nobody_uses_are_forgotten(self, world: World) -> None:
        world.settings = world.settings.__class__(expiration_ms=HOUR_MS)
        await world.crash()
        producer = await begin(world, T0, name="ended")
        await world.coordinator.end("ended", producer, commit=True, new_epoch=False)
        await world.clock.advance(HOUR_MS - 1)
        await begin(world, T0, name="ongoing", timeout_ms=800_000)
        await world.coordinator.expire()
        assert set(world.stored()) == {"ended", "ongoing"}
        await world.clock.advance(1)
        await world.coordinator.expire()
        assert set(world.stored()) == {"ongoing"}
        assert await world.coordinator.add_partitions("ended", producer, [T0]) is (
            ErrorCode.invalid_producer_id_mapping
        )

    async def test_open_transactions_are_counted(self, world: World) -> None:
        assert world.coordinator.open_count() == 0
        producer = await begin(world, T0)
        assert world.coordinator.open_count() == 1
        await world.coordinator.end("x", producer, commit=True, new_epoch=False)
        assert world.coordinator.open_count() == 0


class TestRefusals:
    async def test_a_full_disk_is_told_and_changes_nothing(self, world: World) -> None:
        world.log.refuse_with = DiskFull("no room")
        assert (await world.coordinator.init_producer_id("x", 1_000)).error is (
            ErrorCode.coordinator_not_available
        )
        world.log.refuse_with = None
        assert (await world.coordinator.init_producer_id("x", 1_000)).producer.epoch == 0

    async def test_an_id_too_long_to_store_is_refused(self, world: World) -> None:
        assert (await world.coordinator.init_producer_id("x" * 40_000, 1_000)).error is (
            ErrorCode.invalid_request
        )

    async def test_a_closed_coordinator_sends_clients_away(self, world: World) -> None:
        producer = await begin(world, T0)
        await world.coordinator.close()
        result = await world.coordinator.end("x", producer, commit=True, new_epoch=False)
        assert result.error is ErrorCode.coordinator_not_available

    async def test_a_partition_led_elsewhere_is_not_coordinated_here(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await world.coordinator.close()

        def elsewhere(_: int) -> None:
            raise ApiError(ErrorCode.not_coordinator, "another node leads it")

        monkeypatch.setattr(world, "open_log", elsewhere)
        world.coordinator = world._start()
        assert (await world.coordinator.init_producer_id("x", 1)).error is ErrorCode.not_coordinator
        assert (await world.coordinator.list_transactions()).error is NONE

    async def test_a_state_that_does_not_exist_matches_nothing(self, world: World) -> None:
        await begin(world, T0)
        found = await world.coordinator.list_transactions(["Lost"])
        assert (found.unknown_states, found.transactions) == (("Lost",), ())
        assert TransactionState.ONGOING.label == "Ongoing"


class TestLargePublications:
    """Publications that are worked out in a thread, while requests about the same job go on."""

    JOB = "j"

    async def _open(self, world: World, count: int, writing: int = 2) -> list[AttemptId]:
        """Open attempts, the first few of which write."""
        opened = []
        for number in range(count):
            attempt = await world.coordinator.jobs.open_attempt(self.JOB, 0, 60_000)
            assert attempt is not None
            if number < writing:
                producer = Producer(attempt.producer_id, attempt.producer_epoch)
                added = await world.coordinator.add_partitions(attempt.transactional_id, producer, [T0])
                assert added is NONE
            opened.append(attempt)
        return opened

    async def _while_prepared(
        self, world: World, listed: Sequence[AttemptId], change: Callable[[], Awaitable[object]]
    ) -> bool:
        """Publish, and make a change when the thread has built the batch and nothing is appended yet."""
        loop, build = asyncio.get_running_loop(), world.log.build
        changed: list[concurrent.futures.Future[object]] = []

        async def run() -> object:
            return await change()

        def build_late(records: Sequence[tuple[bytes, bytes | None]]) -> bytes:
            if not changed:
                changed.append(asyncio.run_coroutine_threadsafe(run(), loop))
                changed[0].result(60)
            return build(records)

        world.log.build = build_late  # type: ignore[method-assign]
        published = await world.coordinator.jobs.publish(self.JOB, 0, listed)
        assert changed, "it was not worked out in a thread"
        return published

    async def test_it_is_one_append(self, world: World) -> None:
        listed = await self._open(world, 150)
        await self._open(world, 3)
        before = len(world.log.append_sizes)
        assert await world.coordinator.jobs.publish(self.JOB, 0, listed)
        assert world.log.append_sizes[before] == 154
        await world.heal()
        assert [end.commit for end in markers(world, T0)].count(True) == 2
        assert not await world.coordinator.jobs.publish(self.JOB, 0, listed)

    async def test_what_an_attempt_adds_meanwhile_is_published_with_it(self, world: World) -> None:
        listed = await self._open(world, 150)
        last = listed[0]
        producer = Producer(last.producer_id, last.producer_epoch)
        assert await self._while_prepared(
            world,
            listed,
            lambda: world.coordinator.add_partitions(last.transactional_id, producer, [T1]),
        )
        await world.heal()
        assert [end.commit for end in markers(world, T1)] == [True]

    async def test_an_attempt_that_is_aborted_meanwhile_is_not_published(self, world: World) -> None:
        listed = await self._open(world, 150)
        with pytest.raises(ApiError, match="1 of 150 attempts are gone") as caught:
            await self._while_prepared(
                world, listed, lambda: world.coordinator.jobs.abort(self.JOB, 0, listed[:1])
            )
        assert caught.value.code is ErrorCode.transaction_abortable
        await settle()
        assert [end.commit for end in markers(world, T0)] == [False]

    async def test_an_attempt_that_is_opened_meanwhile_is_aborted_with_it(self, world: World) -> None:
        listed = await self._open(world, 150)
        assert await self._while_prepared(world, listed, lambda: self._open(world, 1))
        await world.heal()
        assert [end.commit for end in markers(world, T0)].count(False) == 1

    async def test_two_that_are_the_same_publish_once(self, world: World) -> None:
        listed = await self._open(world, 150)
        publish = world.coordinator.jobs.publish
        both = await asyncio.gather(publish(self.JOB, 0, listed), publish(self.JOB, 0, listed))
        assert sorted(both) == [False, True]
        await world.heal()
        assert [end.commit for end in markers(world, T0)] == [True, True]

    async def test_aborts_of_many_are_several_appends(self, world: World) -> None:
        listed = [*await self._open(world, 210), *await self._open(world, 210)]
        before = len(world.log.append_sizes)
        assert await world.coordinator.jobs.abort(self.JOB, 0, [*listed[:210], *listed[:210]]) == 210
        assert await world.coordinator.jobs.abort(self.JOB, 0, ()) == 210
        await world.heal()
        assert max(world.log.append_sizes[before:]) == 200
        assert [end.commit for end in markers(world, T0)] == [False] * 4
