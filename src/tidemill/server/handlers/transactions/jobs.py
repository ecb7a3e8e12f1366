"""The APIs of jobs: opening attempts of a batch, and publishing them as one."""

from __future__ import annotations

from typing import Any

from tidemill.coordination.turns import in_slices
from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.handlers.tables.definitions import table_handler
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DESCRIBE, TRANSACTIONAL_ID, WRITE, for_each
from tidemill.server.requests.call import Call
from tidemill.transactions.attempts import check_job
from tidemill.wire.jobs import JOB_PREFIX, AttemptId

__all__ = ("abort_attempts", "keep_job", "list_jobs", "open_attempt", "publish_attempts")

_NO_ATTEMPT = {"transactional_id": "", "producer_id": -1, "producer_epoch": -1}


@serves("OpenAttempt", for_each(WRITE, TRANSACTIONAL_ID))
@table_handler
async def open_attempt(broker: Broker, call: Call) -> dict[str, Any]:
    """Open an attempt of a batch, which is a transaction, unless the batch was published before."""
    request = call.request
    await _prepare(broker, call)
    opened = await broker.transactions.jobs.open_attempt(request.job, request.batch, request.timeout_ms)
    if opened is None:
        return {"already_published": True, **_NO_ATTEMPT}
    return {"already_published": False, **opened._asdict()}


@serves("PublishAttempts", for_each(WRITE, TRANSACTIONAL_ID))
@table_handler
async def publish_attempts(broker: Broker, call: Call) -> dict[str, Any]:
    """Make what a batch's attempts wrote visible, all at once and only once."""
    request = call.request
    await _prepare(broker, call)
    broker.transactions.jobs.check_count(len(request.attempts))
    published = await broker.transactions.jobs.publish(request.job, request.batch, _attempts(request))
    return {"already_published": not published}


@serves("AbortAttempts", for_each(WRITE, TRANSACTIONAL_ID))
@table_handler
async def abort_attempts(broker: Broker, call: Call) -> dict[str, Any]:
    """Abort attempts, by name or all of a job up to a batch."""
    request = call.request
    _authorize(call)
    check_job(request.job)
    if not broker.coordinators.has_topic(TRANSACTIONS):
        return {"aborted_count": 0}
    broker.transactions.jobs.check_count(len(request.attempts))
    aborted = await broker.transactions.jobs.abort(request.job, request.batch, _attempts(request))
    return {"aborted_count": aborted}


@serves("KeepJob", for_each(WRITE, TRANSACTIONAL_ID))
@table_handler
async def keep_job(broker: Broker, call: Call) -> dict[str, Any]:
    """Keep a job alive."""
    _authorize(call)
    check_job(call.request.job)
    if broker.coordinators.has_topic(TRANSACTIONS):
        await broker.transactions.jobs.keep(call.request.job)
    return {}


@serves("ListJobs", for_each(DESCRIBE, TRANSACTIONAL_ID))
@table_handler
async def list_jobs(broker: Broker, call: Call) -> dict[str, Any]:
    """List the jobs that this node coordinates."""
    if not broker.coordinators.has_topic(TRANSACTIONS):
        return {"jobs": ()}
    listed = await broker.transactions.jobs.listing()
    if listed.failure is not None:
        raise listed.failure
    shown = await in_slices(
        each._asdict() if call.may(DESCRIBE, TRANSACTIONAL_ID, JOB_PREFIX + each.job) else None
        for each in listed.jobs
    )
    return {"jobs": await in_slices(each for each in shown if each is not None)}


def _attempts(request: Any) -> list[AttemptId]:
    return [
        AttemptId(each.transactional_id, each.producer_id, each.producer_epoch) for each in request.attempts
    ]


def _authorize(call: Call) -> None:
    """Raise unless the caller may use the job's transactional ids: that permits everything with the job."""
    call.authorize(WRITE, TRANSACTIONAL_ID, JOB_PREFIX + call.request.job)


async def _prepare(broker: Broker, call: Call) -> None:
    """Create the topic in which jobs are kept, unless the name is one that no job can have."""
    _authorize(call)
    check_job(call.request.job)
    code = await broker.coordinators.prepare(TRANSACTIONS)
    if code is not ErrorCode.none:
        raise ApiError(code, "the topic of transactions cannot be created now; try again in a moment")
