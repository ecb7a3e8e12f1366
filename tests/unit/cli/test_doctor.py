"""What ``tidemill doctor`` makes of what a node says about itself."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.cli.doctor import _ADVICE, Verdict, _health
from tidemill.server.problems import ProblemKind

URL = "http://127.0.0.1:9080/readyz"


def body(*problems: tuple[str, str]) -> dict[str, Any]:
    return {"problems": [text for _, text in problems], "problem_kinds": [kind for kind, _ in problems]}


def test_a_node_without_problems_is_well() -> None:
    found = _health(200, body(), URL)
    assert (found.verdict, found.detail, found.advice) == (Verdict.OK, f"ready, says {URL}", "")


def test_a_node_that_is_not_ready_fails_even_if_it_does_not_say_why() -> None:
    found = _health(503, {}, URL)
    assert (found.verdict, found.detail) == (Verdict.FAIL, f"not ready, says {URL}")


def test_every_kind_of_problem_has_advice() -> None:
    assert _ADVICE.keys() == set(ProblemKind)


def test_files_are_repaired_only_if_they_may_be_damaged() -> None:
    repaired = {kind for kind in ProblemKind if "log repair" in _health(200, body((kind, "so")), URL).advice}
    assert repaired == {ProblemKind.STOPPED, ProblemKind.DAMAGE}


def test_problems_of_the_cluster_are_a_warning() -> None:
    found = _health(200, body(("cluster", "2 moves do not come closer to their end")), URL)
    assert found.verdict is Verdict.WARN
    assert found.advice == "'tidemill cluster status' shows the whole cluster"


def test_each_kind_is_advised_once() -> None:
    found = _health(200, body(("damage", "a"), ("cluster", "b"), ("damage", "c")), URL)
    assert found.verdict is Verdict.FAIL
    assert found.detail == "a; b; c"
    assert found.advice == f"{_ADVICE['damage']}; {_ADVICE['cluster']}"


@pytest.mark.parametrize(
    "said", [{"problems": ["from an older release"]}, body(("from-a-newer-release", "unheard of"))]
)
def test_what_is_not_known_fails_and_gets_no_advice_but_to_look(said: dict[str, Any]) -> None:
    found = _health(200, said, URL)
    assert (found.verdict, found.advice) == (Verdict.FAIL, "the node's log says more")
