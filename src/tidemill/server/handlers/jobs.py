"""Jobs: attempts of a batch, and their publication as one."""

from __future__ import annotations

from typing import Any

from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.tables import table_handler
from tidemill.server.handlers.transactions import has_transactions, prepare_transactions
from tidemill.transactions.attempts import AttemptId, check_job

__all__ = ("abort_attempts", "keep_job", "list_jobs", "open_attempt", "publish_attempts")

_NO_ATTEMPT = {"transactional_id": "", "producer_id": -1, "producer_epoch": -1}


@table_handler
async def open_attempt(broker: Broker, call: Call) -> dict[str, Any]:
    """A transaction for an attempt of a batch, unless the batch was published before."""
    request = call.request
    await _prepare(broker, request.job)
    opened = await broker.transactions.jobs.open_attempt(request.job, request.batch, request.timeout_ms)
    if opened is None:
        return {"already_published": True, **_NO_ATTEMPT}
    return {"already_published": False, **opened._asdict()}


@table_handler
async def publish_attempts(broker: Broker, call: Call) -> dict[str, Any]:
    """Make what a batch's attempts wrote visible, all at once and only once."""
    request = call.request
    await _prepare(broker, request.job)
    published = await broker.transactions.jobs.publish(request.job, request.batch, _attempts(request))
    return {"already_published": not published}


@table_handler
async def abort_attempts(broker: Broker, call: Call) -> dict[str, Any]:
    """Give up attempts, by name or all of a job up to a batch."""
    request = call.request
    check_job(request.job)
    if not has_transactions(broker):
        return {"aborted_count": 0}
    aborted = await broker.transactions.jobs.abort(request.job, request.batch, _attempts(request))
    return {"aborted_count": aborted}


@table_handler
async def keep_job(broker: Broker, call: Call) -> dict[str, Any]:
    """A sign of life of a job."""
    check_job(call.request.job)
    if has_transactions(broker):
        await broker.transactions.jobs.keep(call.request.job)
    return {}


@table_handler
async def list_jobs(broker: Broker, call: Call) -> dict[str, Any]:
    """The jobs that this node coordinates."""
    if not has_transactions(broker):
        return {"jobs": ()}
    listed = await broker.transactions.jobs.listing()
    if listed.failure is not None:
        raise listed.failure
    return {"jobs": [each._asdict() for each in listed.jobs]}


def _attempts(request: Any) -> list[AttemptId]:
    return [
        AttemptId(each.transactional_id, each.producer_id, each.producer_epoch) for each in request.attempts
    ]


async def _prepare(broker: Broker, job: str) -> None:
    """See to it that jobs can be written; a name that none can have creates nothing."""
    check_job(job)
    code = await prepare_transactions(broker)
    if code is not ErrorCode.none:
        raise ApiError(code, "the topic of transactions cannot be created now; try again in a moment")
