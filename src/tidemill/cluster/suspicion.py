"""Suspicion of nodes, after SWIM: who could not be reached, directly or through others. Pure.

A suspicion decides nothing: only the end of a session does. It shortens how long a leader waits for a silent
follower, and keeps new leaderships away from nodes that may be gone.

- Each node asks one other at a time, in a shuffled round. If there is no answer, it has others ask for it, so
  that one bad connection does not make a suspect.
- What a node has found out itself it tells with every question and answer. What it was only told it does not
  tell on, so that a rumour ends when its source changes its mind.
- An answer of the node itself outweighs what others say, for a while. A suspicion that nobody renews ends.
- A suspicion is of a registration (a node epoch): a node that has registered again starts without one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Final

__all__ = ("PROBE_INTERVAL_MS", "Suspicions")

PROBE_INTERVAL_MS: Final = 1_000
#: A suspicion lives this long without news.
_LIFE_MS: Final = 10_000
#: An answer of the node itself outweighs what others say for this long.
_FRESH_MS: Final = 3_000


class Suspicions:
    """The suspicions of one node. ``node_id`` is its own; times are of any clock that never goes back."""

    def __init__(self, node_id: int, rng: random.Random) -> None:
        self._node_id = node_id
        self._rng = rng
        self._round: list[int] = []
        self._reached_ms: dict[int, int] = {}
        #: By node: the suspected registration, since when, and whether this node has found it out itself.
        self._suspects: dict[int, tuple[int, int, bool]] = {}

    def next_target(self, nodes: Collection[int]) -> int | None:
        """The node to ask next: each of ``nodes`` once in a round, in random order; None if there is none."""
        others = set(nodes) - {self._node_id}
        self._round = [node_id for node_id in self._round if node_id in others]
        if not self._round:
            self._round = sorted(others)
            self._rng.shuffle(self._round)
        return self._round.pop() if self._round else None

    def helpers(self, target: int, nodes: Collection[int], count: int) -> list[int]:
        """Up to ``count`` other nodes that may ask ``target`` for this one."""
        others = sorted(set(nodes) - {self._node_id, target} - self._suspects.keys())
        return self._rng.sample(others, min(count, len(others)))

    def reached(self, node_id: int, now_ms: int) -> None:
        """Note that the node has answered: it is no suspect any more."""
        self._reached_ms[node_id] = now_ms
        self._suspects.pop(node_id, None)

    def not_reached(self, node_id: int, node_epoch: int, now_ms: int) -> None:
        """Neither this node nor those that it asked for help could reach the node."""
        self._suspects[node_id] = node_epoch, now_ms, True

    def told(self, suspects: Mapping[int, int], now_ms: int) -> None:
        """Another node has told whom it suspects: numbers of nodes and their registrations."""
        for node_id, node_epoch in suspects.items():
            known = self._suspects.get(node_id)
            is_fresh = now_ms - self._reached_ms.get(node_id, -_FRESH_MS) < _FRESH_MS
            if node_id != self._node_id and not is_fresh and (known is None or not known[2]):
                self._suspects[node_id] = node_epoch, now_ms, False

    def to_tell(self, now_ms: int) -> dict[int, int]:
        """The suspicions that this node has come to itself, as ``told`` takes them."""
        self._forget_old(now_ms)
        return {node_id: epoch for node_id, (epoch, _, own) in self._suspects.items() if own}

    def current(self, epochs: Mapping[int, int], now_ms: int) -> frozenset[int]:
        """The suspected nodes. ``epochs`` has the present registration of each node."""
        self._forget_old(now_ms)
        return frozenset(
            node_id for node_id, (epoch, _, _) in self._suspects.items() if epochs.get(node_id) == epoch
        )

    def _forget_old(self, now_ms: int) -> None:
        for node_id, (_, since_ms, _) in list(self._suspects.items()):
            if now_ms - since_ms >= _LIFE_MS:
                del self._suspects[node_id]
