"""A seed gives one trace: all messages, blocking work and calls of the disk, at their virtual times."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from sim import test_cluster_faults
from sim.test_compaction_faults import CompactedStory
from sim.test_log_faults import Story as LogStory
from sim.test_node_faults import Story, run_story

TESTS = Path(__file__).parent.parent
SEEDS = 3
CLUSTER_SEEDS = (0, 1, 2, 4)


def trace_of(kind: type[Story], seed: int) -> list[tuple[float, str]]:
    story, violations = run_story(kind, seed)
    assert not violations
    assert len(story.loop.trace) > 500, "a trace of so little shows nothing"
    return story.loop.trace


def digest_of(kind: type[Story], seed: int) -> str:
    return sha256(repr(trace_of(kind, seed)).encode()).hexdigest()


def cluster_trace_of(seed: int) -> list[tuple[float, str]]:
    trace = test_cluster_faults.run_story(seed).loop.trace
    assert len(trace) > 500, "a trace of so little shows nothing"
    return trace


def assert_equal(first: list[tuple[float, str]], second: list[tuple[float, str]]) -> None:
    for number, (before, now) in enumerate(zip(first, second, strict=False)):
        assert before == now, f"event {number} behind {first[number - 3 : number]}"
    assert len(first) == len(second)


@pytest.mark.parametrize("kind", [Story, CompactedStory])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_same_seed_gives_the_same_trace(kind: type[Story], seed: int) -> None:
    assert_equal(trace_of(kind, seed), trace_of(kind, seed))


@pytest.mark.parametrize("seed", CLUSTER_SEEDS)
def test_the_same_seed_gives_the_same_trace_of_a_whole_cluster(seed: int) -> None:
    """The seeds have one story of each kind, and one of five nodes."""
    assert_equal(cluster_trace_of(seed), cluster_trace_of(seed))


@pytest.mark.parametrize("kind", [Story, CompactedStory])
def test_different_seeds_give_different_traces(kind: type[Story]) -> None:
    assert len({digest_of(kind, seed) for seed in range(SEEDS)}) == SEEDS


def test_the_story_of_a_log_alone_has_one_trace_for_each_seed() -> None:
    def calls(seed: int) -> list[tuple[str, str]]:
        story, made = LogStory(seed), list[tuple[str, str]]()
        story.storage.on_call = lambda call, path: made.append((call, path))
        assert not story.run()
        return made

    traces = [calls(seed) for seed in range(SEEDS)]
    assert traces == [calls(seed) for seed in range(SEEDS)]
    assert len({tuple(trace) for trace in traces}) == SEEDS


def test_another_process_with_other_hashes_gives_the_same_trace() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-m", "sim.test_same_trace"],
            cwd=TESTS,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(told[0].split()) == SEEDS + len(CLUSTER_SEEDS)


if __name__ == "__main__":
    for each in range(SEEDS):
        print(digest_of(CompactedStory, each))  # noqa: T201
    for each in CLUSTER_SEEDS:
        print(sha256(repr(cluster_trace_of(each)).encode()).hexdigest())  # noqa: T201
