"""The HTTP side of a node: health, readiness and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.config.values import Address
from tidemill.net.errors import cannot_listen
from tidemill.server.node import Node

__all__ = ("HttpServer", "make_app")

_PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Streamed(StreamingResponse):
    """An answer in parts, without Starlette's watch for clients that leave, which loads a large library."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all parts; those for a client that is gone go nowhere."""
        await self.stream_response(send)


def make_app(node: Node) -> Starlette:
    """The application; ``/healthz`` says "the process lives", ``/readyz`` "send me requests"."""

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        # The node stays ready while a partition is stopped: the others serve requests.
        ready, problems = node.takes_requests, node.kinds_of_problems()
        body = {
            "ready": ready,
            "problems": [problem.text for problem in problems],
            "problem_kinds": [problem.kind for problem in problems],
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    async def metrics(request: Request) -> Response:
        return _Streamed(node.metrics_page(), media_type=_PROMETHEUS_TYPE)

    return Starlette(
        routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Leave signals alone: the node handles them."""
        yield


class HttpServer:
    """The HTTP server of a node, on the node's event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, address: Address) -> Address:
        """Listen; returns the address with its real port."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.host, address.port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise cannot_listen("serve HTTP", address, error, "--http") from error
        config = uvicorn.Config(
            make_app(self._node), log_config=None, access_log=False, lifespan="off", ws="none"
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        self._node.http_address = Address(host, port)
        return self._node.http_address

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = self._task = None
