"""What `sluice check` finds from the place of a process, and the checks that all places share."""

import json
import resource
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable
from enum import StrEnum
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import click
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from common import clock
from common.redis_cluster import slot_map_of
from common.redis_url import describe, redis_client, unverified_options

OLDEST_REDIS: Final = (6, 2)
LATENCY_MS: Final = 5.0
CLOCK_SECONDS: Final = 1.0
FULL: Final = 0.8
"""Share of `maxmemory` in use from which Redis may soon reject writes."""
TIMEOUT_SECONDS: Final = 5.0
_PINGS: Final = 15
_MEBIBYTE: Final = 2**20
LOCAL: Final = ("127.0.0.1", "::1", "localhost", None)
"""Hosts of this machine, whose connections need no encryption."""


class State(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """What one check has found."""

    check: str
    state: State
    found: str
    remedy: str = ""


def finding(check: str, found: str, *problems: tuple[bool, State, str]) -> Finding:
    """Return a finding with the first of the problems that is met: its state and remedy."""
    for is_met, state, remedy in problems:
        if is_met:
            return Finding(check, state, found, remedy)
    return Finding(check, State.OK, found)


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print findings, and return the exit code: 1 if one is an error."""
    every = list(findings)
    if as_json:
        click.echo(json.dumps([each._asdict() for each in every], indent=2))
    else:
        for each in every:
            click.echo(f"{each.state.upper():7}  {each.check}: {each.found}")
            if each.remedy:
                click.echo(f"{'':7}  {'':{len(each.check)}}  -> {each.remedy}")
    return int(any(each.state is State.ERROR for each in every))


def check_files(wanted: int) -> Finding:
    """Compare the limit of open files with the descriptors that a process may need."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    is_low = limit != resource.RLIM_INFINITY and limit < wanted
    remedy = f"Raise the limit to {wanted} (ulimit -n, LimitNOFILE), or allow fewer connections."
    found = f"{'unlimited' if limit == resource.RLIM_INFINITY else limit} (wanted: {wanted})"
    return finding("open files", found, (is_low, State.WARNING, remedy))


def check_clock(check: str, seconds: float) -> Finding:
    """Judge how far the clock of a server is ahead of this machine's."""
    remedy = "Synchronize the clocks (NTP): limits, expiries and invoices depend on them."
    is_wrong = abs(seconds) > CLOCK_SECONDS
    return finding(check, f"{seconds:+.2f} s", (is_wrong, State.ERROR, remedy))


def check_latency(check: str, seconds: list[float]) -> Finding:
    """Judge the durations of round trips."""
    median = 1000 * statistics.median(seconds)
    found = f"median {median:.2f} ms, longest {1000 * max(seconds):.2f} ms"
    remedy = "Place it in the same zone: each request waits for several round trips."
    return finding(check, found, (median > LATENCY_MS, State.WARNING, remedy))


async def check_redis(
    name: str, url: str, cause_of: Callable[[BaseException], str], *, needed_bytes: float = 0.0
) -> AsyncIterator[Finding]:
    """Check the servers of a URL.

    Args:
        name: of the store, such as `Redis`.
        url: of the server, its sentinels or its cluster.
        cause_of: describes an error without a password.
        needed_bytes: `maxmemory` that all servers need by docs/capacity.md; 0 if unknown.
    """
    client = redis_client(
        url, socket_timeout=TIMEOUT_SECONDS, socket_connect_timeout=TIMEOUT_SECONDS
    )
    yield _check_redis_tls(name, url)
    try:
        async with client:
            servers = [client]
            if (slots := slot_map_of(client)) is not None:
                await slots.ready()
                servers = [slots.client(address) for address in slots.masters]
            for server in servers:
                label = name if server is client else f"{name} {describe(server)[9:]}"
                for each in await _check_server(label, server, needed_bytes / len(servers)):
                    yield each
    except (RedisError, OSError) as error:
        found = f"{describe(client)}: {cause_of(error)}"
        yield Finding(name, State.ERROR, found, "Check the URL, the network, TLS and the user.")


def _check_redis_tls(name: str, url: str) -> Finding:
    host = urlsplit(url).hostname
    is_plain = urlsplit(url).scheme == "redis" and host not in LOCAL
    unverified = ", ".join(unverified_options(url))
    found = unverified or ("verified" if url.startswith("rediss:") else "not encrypted")
    return finding(
        f"{name} TLS",
        found,
        (bool(unverified), State.ERROR, "Use ssl_ca_certs=FILE with the CA in place of it."),
        (is_plain, State.WARNING, "Use rediss:// outside of a private network."),
    )


async def _check_server(name: str, server: "Redis", needed_bytes: float) -> list[Finding]:
    seconds = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        at, micros = await server.time()
        seconds.append(time.perf_counter() - began)
    ahead = at + micros / 1e6 - clock.now_ms() / 1000 + seconds[-1] / 2
    try:
        info: dict[str, Any] = await server.info()
    except NoPermissionError:
        found = "not permitted to read it (INFO): check from the place of a gateway"
        return [
            Finding(f"{name} settings", State.OK, found),
            check_latency(f"{name} latency", seconds),
            check_clock(f"{name} clock", ahead),
        ]
    version = tuple(map(int, info["redis_version"].split(".")[:2]))
    policy, most, used = info["maxmemory_policy"], info["maxmemory"], info["used_memory"]
    memory = f"{used / _MEBIBYTE:.0f} of {most / _MEBIBYTE:.0f} MiB" if most else "no maxmemory"
    need = f" (docs/capacity.md: {needed_bytes / _MEBIBYTE:.0f} MiB)" if needed_bytes else ""
    return [
        finding(
            f"{name} version",
            info["redis_version"],
            (version < OLDEST_REDIS, State.ERROR, "Install Redis 6.2 or later, or Valkey."),
        ),
        finding(
            f"{name} role",
            info["role"],
            (info["role"] != "master", State.ERROR, "Name the master: replicas reject writes."),
        ),
        finding(
            f"{name} eviction",
            policy,
            (
                policy != "noeviction",
                State.ERROR,
                "Set maxmemory-policy noeviction: Redis holds limits and usage.",
            ),
        ),
        finding(
            f"{name} persistence",
            "appendonly" if info["aof_enabled"] else "no appendonly",
            (
                not info["aof_enabled"],
                State.WARNING,
                "Set appendonly yes: a restart would lose usage that is not in the ledger yet.",
            ),
        ),
        finding(
            f"{name} memory",
            memory + need,
            (not most, State.WARNING, "Set maxmemory, or the system may kill Redis."),
            (used > FULL * most, State.ERROR, "Raise maxmemory: a full Redis rejects requests."),
            (most < needed_bytes, State.WARNING, "Raise maxmemory to what the load needs."),
        ),
        check_latency(f"{name} latency", seconds),
        check_clock(f"{name} clock", ahead),
    ]
