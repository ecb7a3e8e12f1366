"""``tidemill doctor``: checks the machine, the data directory and the node, and says what to do."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import ExitCode, Session, command
from tidemill.server.problems import ProblemKind

if TYPE_CHECKING:
    from tidemill.client.admin.topics import LogDirectory
    from tidemill.client.cluster import Cluster
    from tidemill.config.settings import Settings

__all__ = ("Finding", "Verdict", "register")

_FREE_BYTES_MIN = 1024**3
#: Less than a node tries to write before it takes writes again.
_FULL_BYTES = 1024**2
_OPEN_FILES_MIN = 4096
_CLOCK_SKEW_SECONDS_MAX = 2.0
_HTTP_TIMEOUT_SECONDS = 3.0
_LIBRARIES = ("kio", "uvloop", "msgspec", "cramjam", "starlette", "uvicorn", "typer", "rich")
_HTTP_OK = 200
_LOOK = "the node's log says more"
#: What to do about a problem of each kind.
_ADVICE: dict[str, str] = {
    ProblemKind.STARTING: "wait until it is ready; the node's log says what it does",
    ProblemKind.DISK_FULL: "free some space; the node goes on by itself",
    ProblemKind.OPEN_FILES: "raise the limit of open files ('ulimit -n', or LimitNOFILE= of the service)",
    ProblemKind.STOPPED: (
        "if the disk failed, restart the node when it works again; if files are damaged or missing, stop the "
        "node, then 'tidemill log verify' and 'tidemill log repair'"
    ),
    ProblemKind.DAMAGE: "stop the node, then 'tidemill log verify' and 'tidemill log repair'",
    ProblemKind.UNKNOWN_DIRECTORIES: "leave them alone until you are sure that nobody needs them",
    ProblemKind.TABLE_STATE: f"the node builds it again if it can; {_LOOK}",
    ProblemKind.METADATA: f"restart the node; {_LOOK}",
    ProblemKind.CLUSTER: "'tidemill cluster status' shows the whole cluster",
}


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result, and what to do about it."""

    check: str
    verdict: Verdict
    detail: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    command(app, "doctor")(doctor)


def doctor(
    session: Session,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="The data directory. Default: that of the node running on this machine, else the setting.",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http", metavar="HOST:PORT", help="The HTTP address of the node. Default: the setting."
        ),
    ] = None,
) -> None:
    """Check the machine, the data directory and the node. Exits with 1 if a check fails."""
    from tidemill.cli.output import write_json, write_line

    findings: list[Finding] = []
    for finding in _examine(session, {"data_dir": data, "http": http}):
        findings.append(finding)
        if not session.as_json:
            write_line(f"{finding.verdict.value:<4}  {finding.check}: {finding.detail}")
            if finding.advice:
                write_line(f"      {finding.advice}")
    if session.as_json:
        write_json([asdict(finding) for finding in findings])
    if any(each.verdict is Verdict.FAIL for each in findings):
        raise typer.Exit(ExitCode.ERROR)


def _examine(session: Session, flags: dict[str, str | None]) -> Iterator[Finding]:
    from tidemill.config.loading import find_config_file, load_settings
    from tidemill.errors import ConfigError, TidemillError

    yield _versions()
    yield _open_files()
    try:
        file = find_config_file(None, os.environ, Path.cwd())
        settings = load_settings(flags, os.environ, file)
    except ConfigError as error:
        yield Finding("settings", Verdict.FAIL, error.message, "correct the setting")
        return
    yield Finding("settings", Verdict.OK, f"from {file or 'environment and defaults'}")
    # Without --http, which says where the node serves now, not what the settings ask for.
    yield from _exposure(load_settings({**flags, "http": None}, os.environ, file))
    given = None if flags["data_dir"] is None else settings.data_dir
    try:
        data_dir, of_node = session.run(lambda cluster: _node(cluster, given))
    except TidemillError as error:
        yield from _data_directory(settings.data_dir)
        yield Finding(
            "node", Verdict.FAIL, error.message, "start one with 'tidemill up', or name it with --server"
        )
        return
    yield from _data_directory(data_dir or settings.data_dir)
    yield from of_node
    yield from _etcd(settings)
    yield from _http(settings)


# -- the machine -----------------------------------------------------------------------------------------


def _versions() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    from tidemill import __version__

    found = [f"tidemill {__version__}", f"python {platform.python_version()}"]
    missing = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        advice = "install tidemill anew: pip install --force-reinstall tidemill"
        return Finding("versions", Verdict.FAIL, f"missing: {', '.join(missing)}", advice)
    return Finding("versions", Verdict.OK, ", ".join(found))


def _open_files() -> Finding:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES_MIN:
        advice = f"raise it to {_OPEN_FILES_MIN} or more: 'ulimit -n', or LimitNOFILE= of the service"
        return Finding("open files", Verdict.WARN, f"at most {hard} per process", advice)
    return Finding("open files", Verdict.OK, f"up to {hard} per process")


def _exposure(settings: Settings) -> Iterator[Finding]:
    """Whether 'tidemill up' would let other machines connect, where nobody is authenticated."""
    from tidemill.errors import ConfigError
    from tidemill.server.connections.exposure import exposed_listeners

    check = "settings"
    try:
        exposed = exposed_listeners(settings)
    except ConfigError as error:
        yield Finding(check, Verdict.FAIL, error.message, "correct the setting")
        return
    if exposed and not settings.allow_unauthenticated:
        shown = ", ".join(f"{name} = {address}" for name, address in exposed)
        detail = f"'tidemill up' refuses {shown}: other machines could connect"
        advice = "listen on 127.0.0.1; or, on a trusted network, set allow_unauthenticated"
        yield Finding(check, Verdict.FAIL, detail, advice)


# -- the data directory ----------------------------------------------------------------------------------


def _data_directory(path: Path) -> Iterator[Finding]:
    from tidemill.cli.output import human_bytes

    check = "data directory"
    if not path.exists():
        yield Finding(check, Verdict.OK, f"{path} does not exist yet; 'tidemill up' creates it")
        return
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        advice = "give this user the right to write there, or choose another with --data"
        yield Finding(check, Verdict.FAIL, f"{path} is not a directory that can be written", advice)
        return
    yield Finding(check, Verdict.OK, f"{path} can be written; {_owner(path)}")
    yield from _missing_partitions(path)
    usage = shutil.disk_usage(path)
    detail = f"{human_bytes(usage.free)} of {human_bytes(usage.total)} are free{_reserve(path)}"
    if usage.free < _FULL_BYTES:
        detail = f"disk full: {detail} at {path}; a node there refuses writes until there is room"
        yield Finding("disk space", Verdict.FAIL, detail, "free some space; the node goes on by itself")
    elif usage.free < _FREE_BYTES_MIN:
        yield Finding("disk space", Verdict.WARN, detail, "free some space, or lower retention.bytes")
    else:
        yield Finding("disk space", Verdict.OK, detail)
    ahead = max((entry.stat().st_mtime for entry in path.iterdir()), default=0.0) - time.time()
    if ahead > _CLOCK_SKEW_SECONDS_MAX:
        advice = "set the clock right: retention and record times depend on it"
        yield Finding("clock", Verdict.WARN, f"files in {path} are {ahead:.0f} s ahead of this clock", advice)


def _reserve(path: Path) -> str:
    """The words about the space that is kept for reads and deletions."""
    from tidemill.cli.output import human_bytes
    from tidemill.server.disk.reserve import RESERVE_NAME

    reserve = path / RESERVE_NAME
    return f", {human_bytes(reserve.stat().st_size)} more are kept as a reserve" if reserve.exists() else ""


def _missing_partitions(path: Path) -> Iterator[Finding]:
    from tidemill.cli.data_files import find_missing

    missing = find_missing(path)
    if missing:
        shown = ", ".join(each.directory for each in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        advice = (
            "restore them from a backup while the node is stopped, or give up what was in them with "
            f"'tidemill log repair {missing[0].topic}:{missing[0].index} --accept-loss'"
        )
        yield Finding("missing partitions", Verdict.FAIL, f"had data, have no files: {shown}{more}", advice)


def _owner(path: Path) -> str:
    from tidemill.cli.data_files import owner_of

    owner = owner_of(path)
    return "no node is running on it" if owner is None else f"in use by {owner}"


# -- the node --------------------------------------------------------------------------------------------


async def _node(cluster: Cluster, given: Path | None) -> tuple[Path | None, list[Finding]]:
    """The data directory to look at, ``given`` or a node's on this machine, and what the nodes say."""
    from tidemill.cli.output import plural
    from tidemill.client.admin.topics import describe_log_directories

    connection = await cluster.bootstrap_connection()
    findings = [
        Finding("node", Verdict.OK, f"answers at {connection.address}"),
        _api_versions(connection.served),
        *(await _listeners(cluster)),
    ]
    of_cluster = await _cluster(cluster)
    findings += of_cluster
    topics = await cluster.all_topics()
    partitions = [(topic.name, partition) for topic in topics for partition in topic.partitions]
    stopped = [
        f"{name}-{partition.index}"
        for name, partition in partitions
        # In a cluster, the findings above say why a partition has no leader.
        if (partition.leader < 0 and not of_cluster) or partition.leader in partition.offline
    ]
    if stopped:
        findings.append(_stopped(stopped))
    elif all(partition.leader >= 0 for _, partition in partitions):
        detail = f"{plural(len(topics), 'topic')}, {plural(len(partitions), 'partition')}, all with a leader"
        findings.append(Finding("partitions", Verdict.OK, detail))
    known = {topic.topic_id.hex for topic in topics if topic.topic_id is not None}
    directories = await describe_log_directories(cluster)
    # That of the node that was named first: several may run here.
    named_first = sorted(directories, key=lambda each: cluster.nodes.get(each.node_id) != connection.address)
    data_dir = given or next((path for each in named_first if _is_used_here(path := Path(each.path))), None)
    return data_dir, findings + _directories(directories, data_dir, known)


def _is_used_here(path: Path) -> bool:
    """Whether a process of this machine runs on the directory: a node elsewhere may have the same path."""
    from tidemill.cli.data_files import owner_of

    try:
        return owner_of(path) is not None
    except OSError:
        return False


def _api_versions(served: dict[int, tuple[int, int]]) -> Finding:
    from tidemill.wire.apis import APIS, NODES_ONLY

    lacking = [
        api.name
        for api in APIS.values()
        if api.key not in NODES_ONLY
        and (
            api.key not in served
            or served[api.key][0] > api.max_version
            or served[api.key][1] < api.min_version
        )
    ]
    if lacking:
        advice = "use a node and a client of the same release"
        return Finding("API versions", Verdict.WARN, f"it does not serve {', '.join(lacking)}", advice)
    return Finding("API versions", Verdict.OK, f"{len(served)} APIs are served")


async def _listeners(cluster: Cluster) -> list[Finding]:
    """The clients that can connect to each node as it runs, whatever the settings here say."""
    from tidemill.client.admin.topics import describe_cluster, describe_node_configs
    from tidemill.config.loading import load_settings
    from tidemill.server.connections.exposure import exposed_listeners

    findings = []
    for node_id in (await describe_cluster(cluster)).nodes:
        entries = await describe_node_configs(cluster, node_id, ("listen", "http", "allow_unauthenticated"))
        running = load_settings({entry.name: entry.value for entry in entries}, {})
        exposed = exposed_listeners(running)
        if exposed:
            shown = ", ".join(f"{name} {address}" for name, address in exposed)
            detail = f"other machines can connect to node {node_id} ({shown}), and nobody is authenticated"
            advice = "there is no TLS, SASL or ACL yet: keep it on a trusted network"
            findings.append(Finding("listeners", Verdict.WARN, detail, advice))
        else:
            findings.append(Finding("listeners", Verdict.OK, f"node {node_id} listens on loopback only"))
    return findings


def _stopped(names: list[str]) -> Finding:
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    advice = "the node's log says why; stop it, then 'tidemill log verify' and 'tidemill log repair'"
    return Finding("partitions", Verdict.FAIL, f"stopped: {shown}", advice)


def _directories(directories: list[LogDirectory], data_dir: Path | None, known: set[str]) -> list[Finding]:
    """The findings about the nodes' directories, and what is in ours if one of the nodes uses it."""
    findings: list[Finding] = []
    for directory in directories:
        if directory.error is not None:
            detail = f"{directory.path} on node {directory.node_id}: {directory.error}"
            findings.append(Finding("data directory", Verdict.FAIL, detail, "see the node's log"))
        if data_dir is not None and os.path.realpath(directory.path) == os.path.realpath(data_dir):
            findings.append(_unknown_directories(data_dir, known))
    return findings


def _unknown_directories(data_dir: Path, known: set[str]) -> Finding:
    unknown = sorted(
        str(entry.relative_to(data_dir))
        for entry in data_dir.glob("logs/*/*")
        if entry.is_dir() and entry.name.partition("-")[0] not in known
    )
    if not unknown:
        return Finding("unknown directories", Verdict.OK, "none")
    advice = "they are left alone; remove them when you are sure that nobody needs them"
    return Finding("unknown directories", Verdict.WARN, ", ".join(unknown[:10]), advice)


# -- the cluster -----------------------------------------------------------------------------------------


async def _cluster(cluster: Cluster) -> list[Finding]:
    """The findings about other nodes and the replicas of all; none if the node is alone."""
    from tidemill.cli.cluster.health import Health, assess
    from tidemill.cli.cluster.inspect import overview

    found = await overview(cluster)
    if not found.view.replicated:
        return []
    states = [node.state for node in found.view.nodes.values()]
    controller = found.view.nodes.get(found.view.controller_id)
    named = "none" if controller is None else f"node {controller.node_id} ({controller.name})"
    detail = f"{states.count('live')} of {len(states)} nodes are live, the controller is {named}"
    findings = [Finding("cluster", Verdict.OK, detail)]
    for each in assess(found.view, found.topics, found.problems, found.unreachable):
        verdict = Verdict.FAIL if each.level is Health.RED else Verdict.WARN
        findings.append(Finding("cluster", verdict, each.reason))
    return findings


def _etcd(settings: Settings) -> Iterator[Finding]:
    """Whether the etcd that the settings name answers from here."""
    import asyncio

    from tidemill.errors import TidemillError
    from tidemill.server.cluster.etcd import open_etcd

    if settings.cluster is None:
        return

    async def read() -> int:
        store = open_etcd(settings)
        try:
            return len((await store.read("nodes/")).entries)
        finally:
            await store.close()

    try:
        count = asyncio.run(read())
    except TidemillError as error:
        advice = "without etcd no leader is elected and no topic is changed: start it, or correct the setting"
        yield Finding("etcd", Verdict.FAIL, error.message, advice)
        return
    detail = f"{settings.cluster} answers and knows {count} nodes of cluster {settings.cluster_name!r}"
    yield Finding("etcd", Verdict.OK if count else Verdict.WARN, detail)


# -- HTTP ------------------------------------------------------------------------------------------------


def _http(settings: Settings) -> Iterator[Finding]:
    if settings.http is None:
        return
    url = f"http://{settings.http}/readyz"
    try:
        status, server_time, body = _get(url)
    except OSError as error:
        detail = f"nothing answers at {url} ({_reason(error)})"
        yield Finding(
            "http", Verdict.WARN, detail, "if the node serves HTTP elsewhere, say where with --http"
        )
        return
    yield _health(status, body, url)
    yield from _scrub(f"http://{settings.http}/metrics")
    if server_time is not None:
        skew = abs(server_time - time.time())
        # The header counts whole seconds.
        bad = skew > _CLOCK_SKEW_SECONDS_MAX + 1
        yield Finding(
            "clock",
            Verdict.WARN if bad else Verdict.OK,
            f"the node's clock is {'' if bad else 'less than '}{max(1, round(skew))} s off",
            "set both clocks by NTP" if bad else "",
        )


def _health(status: int, body: dict[str, Any], url: str) -> Finding:
    """What the node says is wrong with it, and what to do by the kinds of that.

    A kind that is not known here, of another release, gets no advice but to look.
    """
    problems = [str(problem) for problem in body.get("problems", ())]
    kinds = [str(kind) for kind in body.get("problem_kinds", ())]
    kinds += ["unknown"] * (len(problems) - len(kinds))
    if status != _HTTP_OK or any(kind != ProblemKind.CLUSTER for kind in kinds):
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.WARN if problems else Verdict.OK
    advice = dict.fromkeys(_ADVICE.get(kind, _LOOK) for kind in kinds)
    detail = "; ".join(problems) or (f"ready, says {url}" if status == _HTTP_OK else f"not ready, says {url}")
    return Finding("health", verdict, detail, "; ".join(advice))


def _scrub(url: str) -> Iterator[Finding]:
    """The findings about scrubbing: when every batch was last read, and what damage is known."""
    from datetime import UTC, datetime

    try:
        values = _samples(url)
    except OSError:
        return
    if "tidemill_damaged_batches" not in values:
        return  # The node is starting or stopping, or of another release.
    damaged, ended_ms = (
        int(values["tidemill_damaged_batches"]),
        values["tidemill_scrub_last_pass_timestamp_ms"],
    )
    when = "all data has not been read through yet"
    if ended_ms:
        ended = datetime.fromtimestamp(ended_ms / 1000, UTC)
        when = f"all data was last read through at {ended:%Y-%m-%d %H:%M} UTC"
    if not values["tidemill_scrub_interval_ms"]:
        when += ", and is not: scrub_interval_ms is 0"
    elif values["tidemill_scrub_progress_ratio"]:
        when += f", and {values['tidemill_scrub_progress_ratio']:.0%} of the partitions are again"
    if damaged:
        advice = "stop the node, then 'tidemill log verify' and 'tidemill log repair'"
        yield Finding("scrub", Verdict.FAIL, f"{damaged} damaged batches are known; {when}", advice)
    else:
        yield Finding("scrub", Verdict.OK, f"no damage is known; {when}")


def _samples(url: str) -> dict[str, float]:
    """The samples without labels that a node shows to Prometheus."""
    import urllib.request

    with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_SECONDS) as response:  # noqa: S310 - always http
        lines = response.read().decode().splitlines()
    pairs = (line.split(" ") for line in lines if not line.startswith("#") and "{" not in line)
    return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}


def _reason(error: OSError) -> str:
    from tidemill.net.errors import reason_of

    # urllib wraps the system's error into one of its own.
    cause = getattr(error, "reason", error)
    return reason_of(cause) if isinstance(cause, OSError) else str(cause)


def _get(url: str) -> tuple[int, float | None, dict[str, Any]]:
    """Get a URL; gives the status, the server's time and the JSON body."""
    import urllib.error
    import urllib.request
    from email.utils import parsedate_to_datetime

    try:
        with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_SECONDS) as response:  # noqa: S310 - always http
            status, headers, body = response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        status, headers, body = error.code, error.headers, error.read()
    date = headers.get("Date")
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = {}
    served_at = parsedate_to_datetime(date).timestamp() if date else None
    return status, served_at, parsed if isinstance(parsed, dict) else {}
