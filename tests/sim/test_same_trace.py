"""A seed gives one trace: all messages, blocking work and calls of the disk, at their virtual times."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from sim.test_compaction_faults import CompactedStory
from sim.test_log_faults import Story as LogStory
from sim.test_node_faults import Story, run_story

TESTS = Path(__file__).parent.parent
SEEDS = 3


def trace_of(kind: type[Story], seed: int) -> list[tuple[float, str]]:
    story, violations = run_story(kind, seed)
    assert not violations
    assert len(story.loop.trace) > 500, "a trace of so little shows nothing"
    return story.loop.trace


def digest_of(kind: type[Story], seed: int) -> str:
    return sha256(repr(trace_of(kind, seed)).encode()).hexdigest()


@pytest.mark.parametrize("kind", [Story, CompactedStory])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_same_seed_gives_the_same_trace(kind: type[Story], seed: int) -> None:
    first, second = trace_of(kind, seed), trace_of(kind, seed)
    for number, (before, now) in enumerate(zip(first, second, strict=False)):
        assert before == now, f"event {number} behind {first[number - 3 : number]}"
    assert len(first) == len(second)


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
    assert len(told[0].split()) == SEEDS


if __name__ == "__main__":
    for each in range(SEEDS):
        print(digest_of(CompactedStory, each))  # noqa: T201
