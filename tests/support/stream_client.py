"""A Kafka client on asyncio streams, for tests that run a node on their own event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.config.values import Address
from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_response

__all__ = ("StreamClient",)


class StreamClient:
    """One connection; answers are read in the order of the requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._correlation_id = 0

    @classmethod
    async def connect(cls, address: Address) -> StreamClient:
        return cls(*await asyncio.open_connection(address.host, address.port))

    def send(self, api: str, version: int, /, **body: Any) -> None:
        self._correlation_id += 1
        self._writer.write(
            encode_request(APIS_BY_NAME[api].key, version, self._correlation_id, "stream", body)
        )

    async def receive(self, api: str, version: int) -> Any:
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        return decode_response(APIS_BY_NAME[api].key, version, await self._reader.readexactly(size))[1]

    async def ask(self, api: str, version: int, /, **body: Any) -> Any:
        self.send(api, version, **body)
        return await self.receive(api, version)

    async def read_to_end(self) -> bytes:
        """What is left until the node closes the connection."""
        return await self._reader.read()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
