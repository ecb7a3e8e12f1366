"""The links of the system tests: what is cut is held, one way or both, and arrives when it is healed."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from support.links import Links


@pytest.fixture
def links() -> Iterator[Links]:
    with Links() as running:
        yield running


def connected(links: Links) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = links.listen("a", "b", server.getsockname)
        ours = socket.create_connection(("127.0.0.1", port))
        theirs, _ = server.accept()
    for each in (ours, theirs):
        each.settimeout(30)
    return ours, theirs


def says_nothing(end: socket.socket) -> bool:
    end.settimeout(0.1)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(30)
    return False


def test_a_way_that_is_cut_holds_what_is_sent_and_the_other_does_not(links: Links) -> None:
    ours, theirs = connected(links)
    ours.sendall(b"1")
    assert theirs.recv(10) == b"1"
    links.cut(("a", "b"))
    ours.sendall(b"2")
    theirs.sendall(b"3")
    assert ours.recv(10) == b"3"
    assert says_nothing(theirs)
    links.heal()
    assert theirs.recv(10) == b"2"
    ours.close()
    theirs.close()


def test_the_end_of_a_connection_is_not_heard_over_a_cut(links: Links) -> None:
    ours, theirs = connected(links)
    links.cut(("a", "b"), ("b", "a"))
    ours.close()
    assert says_nothing(theirs)
    links.heal()
    assert theirs.recv(10) == b""
    theirs.close()


def test_a_connection_that_is_opened_over_a_cut_hangs_until_it_is_healed(links: Links) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        links.cut(("b", "a"))
        port = links.listen("a", "b", server.getsockname)
        ours = socket.create_connection(("127.0.0.1", port))
        ours.sendall(b"1")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
        links.heal()
        server.settimeout(30)
        theirs, _ = server.accept()
        assert theirs.recv(10) == b"1"
    ours.close()
    theirs.close()
