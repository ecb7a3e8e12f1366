"""The options of reading: what they mean, and how a wrong one is refused."""

from __future__ import annotations

import pytest

from tidemill.spark.errors import InvalidOption
from tidemill.spark.reading.options import Edge, ReadOptions

BASE = {"servers": "a:1", "path": "shop.orders"}


def parse(**options: str) -> ReadOptions:
    return ReadOptions.parse(BASE | options)


def test_what_is_not_given_has_a_default() -> None:
    read = parse()
    assert (read.servers, read.path, read.min_partitions, read.fail_on_data_loss) == (
        "a:1",
        "shop.orders",
        1,
        True,
    )
    assert (read.max_rows, read.max_bytes, read.start, read.end, read.columns) == (None, None, None, None, ())
    assert read.lease_ms == 24 * 3_600_000


def test_names_are_those_of_kafkas_source_too_and_without_regard_to_case() -> None:
    read = ReadOptions.parse(
        {"kafka.bootstrap.servers": "b:2", "SUBSCRIBE": "x, y", "maxOffsetsPerTrigger": "5"}
    )
    assert (read.servers, read.topics, read.max_rows) == ("b:2", ("x", "y"), 5)


@pytest.mark.parametrize(
    ("text", "edge"),
    [
        ("-10 minutes", Edge("relative", -600_000)),
        ("-1 hour 30 minutes", Edge("relative", -5_400_000)),
        ("-500ms", Edge("relative", -500)),
        ("-2d", Edge("relative", -2 * 86_400_000)),
        ("1700000000000", Edge("time", 1_700_000_000_000)),
        ("2023-11-14T22:13:20Z", Edge("time", 1_700_000_000_000)),
        ("2023-11-14 22:13:20", Edge("time", 1_700_000_000_000)),
        ("2023-11-14T23:13:20+01:00", Edge("time", 1_700_000_000_000)),
    ],
)
def test_times_are_absolute_or_relative(text: str, edge: Edge) -> None:
    assert parse(startingTime=text).start == edge
    assert parse(endingTime=text).end == edge


def test_a_relative_time_counts_from_the_moment_the_query_begins() -> None:
    edge = parse(startingTime="-10 minutes").start
    assert edge is not None
    assert edge.at_ms(1_000_000) == 400_000


def test_offsets_are_words_or_json() -> None:
    assert parse(startingOffsets="Earliest").start == Edge("earliest")
    assert parse(startingOffsets='{"t": {"0": 5, "1": -2}}').start == Edge(
        "offsets", by_partition={"t": {0: 5, 1: -2}}
    )
    assert parse(startingOffsetsByTimestamp='{"t": {"0": 5}}').start == Edge(
        "times", by_partition={"t": {0: 5}}
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"servers": ""}, "say where the nodes are"),
        ({"table": "a.b"}, "say what to read"),
        ({"startingOffsets": '{"t": {"0": -3}}'}, "cannot be -3"),
        ({"startingOffsets": '{"t": {"0": true}}'}, "not a whole number"),
        ({"startingOffsets": '{"t": 5}'}, "JSON of the form"),
        ({"startingOffsets": "{"}, "JSON of the form"),
        ({"endingOffsets": "snapshot"}, "cannot be snapshot"),
        ({"startingTime": "-10 lightyears"}, "relative to now"),
        ({"startingTime": ""}, "relative to now"),
        ({"maxRowsPerTrigger": "0"}, "above zero"),
        ({"maxRowsPerTrigger": "٣"}, "above zero"),
        ({"maxBytesPerTrigger": "1e6"}, "above zero"),
        ({"minPartitions": "99999999"}, "at most"),
        ({"snapshotLease": "long"}, "10 minutes"),
        ({"timeout": "0 s"}, "10 minutes"),
        ({"columns": "a,,b"}, "list of different names"),
        ({"columns": "a,a"}, "list of different names"),
        ({"changes": "yes"}, "true or false"),
        ({"maxRowPerTrigger": "5"}, "did you mean 'maxRowsPerTrigger'"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_right(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        parse(**options)


def test_a_pattern_must_be_one() -> None:
    with pytest.raises(InvalidOption, match="regular expression"):
        ReadOptions.parse({"servers": "a:1", "topicPattern": "("})


def test_options_that_are_sparks_own_are_left_alone() -> None:
    assert parse(checkpointLocation="/x", queryName="q", mergeSchema="true").path == "shop.orders"


def test_one_thing_is_not_said_twice() -> None:
    with pytest.raises(InvalidOption, match="mean the same"):
        ReadOptions.parse({"servers": "a:1", "topic": "x", "subscribe": "y"})
