"""A node as a process of its own: ``python run_node.py '{"data_dir": "…", …}' [point to die at]``.

The settings are those of ``tidemill settings``. When it is ready, one line of JSON says where it listens. It
stops in an orderly way on SIGTERM, or when its standard input ends, so that it never outlives the tests. The
line ``modules`` is answered with the names of the Python modules that it has loaded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from typing import Any

import uvloop

from tidemill.config.loading import load_settings
from tidemill.errors import TidemillError
from tidemill.server.node import Node
from tidemill.server.running import run_until, tame_collector


async def run(flags: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def parent_spoke() -> None:
        said = os.read(0, 1024)
        if not said:
            loop.remove_reader(0)
            stop.set()
        elif said == b"modules\n":
            say(sorted(sys.modules))

    loop.add_reader(0, parent_spoke)
    node = Node(load_settings(flags, {}))
    await run_until(node, stop, lambda: announce(node))


def announce(node: Node) -> None:
    tame_collector()
    say({"listen": str(node.address), "http": str(node.http_address)})


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if sys.argv[2:]:
        from support.dying import die_at

        die_at(sys.argv[2])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(json.loads(sys.argv[1])))
    except TidemillError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
