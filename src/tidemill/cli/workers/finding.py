"""The workers that a command line names as ``module:app``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import typer

from tidemill.client.async_client import AsyncTidemill
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_worker import Worker
from tidemill.client.workers.worker import AsyncWorker

__all__ = ("find_workers",)


def find_workers(target: str) -> list[Worker]:
    """The workers of ``module:app``, or all of ``module``; ``typer.BadParameter`` if there are none."""
    module_name, _, path = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there and imports another one that is not has its own traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise typer.BadParameter(
            f"there is no module {module_name!r} here or among the installed ones; name it as in an import, "
            "without .py"
        ) from None
    if not path:
        workers = [each for each in vars(module).values() if isinstance(each, Worker)]
        return _some(list(dict.fromkeys(workers)), target, "defines no worker")
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            there = [each for each, value in vars(module).items() if isinstance(value, Worker | Tidemill)]
            hint = f"; it has {', '.join(there)}" if there else ""
            raise typer.BadParameter(f"{module_name!r} has no {path!r}{hint}")
        found = getattr(found, name)
    if isinstance(found, Worker):
        return [found]
    if isinstance(found, Tidemill):
        return _some(found.workers, target, "is a connection without workers")
    if isinstance(found, list | tuple) and all(isinstance(each, Worker) for each in found):
        return _some(list(found), target, "is empty")
    if isinstance(found, AsyncTidemill | AsyncWorker) or inspect.iscoroutinefunction(found):
        raise typer.BadParameter(
            f"{target} needs an event loop of its own, which this command does not have: use "
            "tidemill.connect(…) in the module, whose handlers may be async def as well; or run "
            "asyncio.run(…) with 'await worker.run()' in a program of your own"
        )
    raise typer.BadParameter(
        f"{target} is of type {type(found).__name__}; name a worker (what @db.worker makes) or a connection"
    )


def _some(workers: list[Worker], target: str, otherwise: str) -> list[Worker]:
    if not workers:
        raise typer.BadParameter(f"{target} {otherwise}: put @db.worker(…) above a function")
    return workers
