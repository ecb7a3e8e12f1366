"""Plans: durations and sizes of a full run, and of a quick one that only shows that everything works."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("FULL", "QUICK", "Plan")

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Durations and sizes of everything that a run does."""

    rounds: int
    record_bytes: tuple[int, ...]
    produce_seconds: float
    touched_bytes: int
    latency_rounds: int
    latency_seconds: float
    latency_rate: int
    starts: int
    partition_counts: tuple[int, ...]
    partitions_per_topic: int
    idle_topics: int
    connections: int
    idle_seconds: float
    log_bytes: tuple[int, ...]
    segment_bytes: int
    fetches: int
    compacted_bytes: tuple[int, ...]
    transaction_records: tuple[int, ...]
    transactional_records: int
    group_members: tuple[int, ...]
    share_members: tuple[int, ...]
    share_records: int
    share_warm_up_seconds: float
    share_backlogs: tuple[int, ...]
    share_fetches: int
    share_acknowledgements: int
    share_held_partitions: int
    table_rows: int
    table_lookups: int
    table_growth_rows: tuple[int, ...]
    table_memory_rows: tuple[int, ...]
    spark_rows: tuple[int, ...]
    spark_tasks: tuple[int, ...]
    spark_warm_up: bool
    cluster_produce_seconds: float
    cluster_rate: int
    restart_seconds: float
    catch_up_bytes: int
    cluster_partitions: tuple[int, ...]
    cursor_records: int
    worker_tasks: int


FULL = Plan(
    rounds=3,
    record_bytes=(100, 1_000, 10_000),
    produce_seconds=1.0,
    touched_bytes=800 * MB,
    latency_rounds=3,
    latency_seconds=3.0,
    latency_rate=1_000,
    starts=5,
    partition_counts=(1_000, 10_000),
    partitions_per_topic=100,
    idle_topics=100,
    connections=1_000,
    idle_seconds=5.0,
    log_bytes=(10 * MB, 100 * MB, 1_000 * MB),
    segment_bytes=32 * MB,
    fetches=400,
    compacted_bytes=(20 * MB, 200 * MB),
    transaction_records=(100, 1_000, 10_000),
    transactional_records=100_000,
    group_members=(2, 20, 200),
    share_members=(1, 4, 16),
    share_records=300_000,
    share_warm_up_seconds=8.0,
    share_backlogs=(20_000, 200_000, 2_000_000),
    share_fetches=100,
    share_acknowledgements=1_000,
    share_held_partitions=8,
    table_rows=500_000,
    table_lookups=100_000,
    table_growth_rows=(20_000, 200_000, 2_000_000),
    table_memory_rows=(400_000, 4_000_000),
    spark_rows=(300_000, 3_000_000),
    spark_tasks=(1, 2, 4),
    spark_warm_up=True,
    cluster_produce_seconds=3.0,
    cluster_rate=200,
    restart_seconds=20.0,
    catch_up_bytes=200 * MB,
    cluster_partitions=(1_000, 10_000),
    cursor_records=500_000,
    worker_tasks=100_000,
)

QUICK = Plan(
    rounds=1,
    record_bytes=(1_000,),
    produce_seconds=0.05,
    touched_bytes=1 * MB,
    latency_rounds=1,
    latency_seconds=0.3,
    latency_rate=500,
    starts=1,
    partition_counts=(20,),
    partitions_per_topic=10,
    idle_topics=10,
    connections=50,
    idle_seconds=0.2,
    log_bytes=(1 * MB, 5 * MB),
    segment_bytes=2 * MB,
    fetches=20,
    compacted_bytes=(5 * MB,),
    transaction_records=(100,),
    transactional_records=1_000,
    group_members=(2,),
    share_members=(1,),
    share_records=2_000,
    share_warm_up_seconds=0.0,
    share_backlogs=(1_000,),
    share_fetches=2,
    share_acknowledgements=20,
    share_held_partitions=1,
    table_rows=2_000,
    table_lookups=1_000,
    table_growth_rows=(1_000,),
    table_memory_rows=(2_000,),
    spark_rows=(1_000,),
    spark_tasks=(1,),
    spark_warm_up=False,
    cluster_produce_seconds=0.05,
    cluster_rate=50,
    restart_seconds=0.5,
    catch_up_bytes=2 * MB,
    cluster_partitions=(100,),
    cursor_records=50_000,
    worker_tasks=2_000,
)
