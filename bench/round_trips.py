"""Count the Redis commands of one request with Redis' own MONITOR.

Requests run one at a time, so that no two share a pipeline and each command is a round trip.
"""

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.client import Answer
from bench.measure import MeasureError, drive
from bench.scenarios import Scenario
from bench.starting import StartError
from bench.systems import System

_LINE = re.compile(rb'\+(\d+\.\d+) \[\d+ [^ ]+:(\d+)\] "([^"]*)"(.*)')
_EVALSHA = "EVALSHA"
_REPLY = "XADD"
"""How a worker sends tokens; the first one is the first that a gateway receives of a request."""
_ROOM = re.compile(rb'"\{(\w+):[^}"]*\}')
_IDLE_SECONDS = 5.0
"""How long to record the commands that occur without any request."""
_TAIL_SECONDS = 2.5
"""Commands of ended requests are sent within this time."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command that reached Redis."""

    at: float
    """Unix time in seconds, by the clock of Redis, which runs on this machine."""
    port: int
    """Port of the client."""
    name: str
    """For a script, with the kind of hash tag of its first key: `EVALSHA {b}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrips:
    """Mean number of commands per request for one part of a system."""

    system: str
    part: str
    requests: int
    before_first: dict[str, float]
    """Sent after the request was sent and before its first token reached Redis, where a read waits
    for it. Without replies through Redis: before the client received its first token."""
    in_all: dict[str, float]
    """All commands, minus those that the same processes send when there is no request."""


def count(
    scenario: Scenario, system: System, *, redis_port: int, seed: str
) -> Iterator[RoundTrips]:
    """Send the scenario's requests, one at a time, and count. Raises MeasureError."""
    one = replace(scenario, streams=1)
    _send(replace(one, requests=2), system, seed=f"{seed} warm-up")
    parts = system.groups(1)
    ports = {part: _local_ports(pids) for part, pids in parts.items()}
    with _monitoring(redis_port) as idle:
        time.sleep(_IDLE_SECONDS)
    offset = time.time() - time.perf_counter()
    with _monitoring(redis_port) as commands:
        began = time.perf_counter()
        answers = _send(one, system, seed=seed)
        time.sleep(_TAIL_SECONDS)
        share = (time.perf_counter() - began) / _IDLE_SECONDS
        for part, pids in parts.items():
            ports[part] |= _local_ports(pids)
    spans = [_span(answer, offset, commands) for answer in answers]
    for part in parts:
        own = [each for each in commands if each.port in ports[part]]
        background = Counter(each.name for each in idle if each.port in ports[part])
        early = [each for each in own if any(sent <= each.at <= end for sent, end in spans)]
        if own and part != "redis":
            yield RoundTrips(
                system=system.name,
                part=part,
                requests=len(answers),
                before_first=_means(early, {}, len(answers)),
                in_all=_means(
                    own, {name: share * number for name, number in background.items()}, len(answers)
                ),
            )


def _span(answer: Answer, offset: float, commands: Sequence[Command]) -> tuple[float, float]:
    """Return when the request was sent and when its first token arrived."""
    sent, read = offset + answer.sent, offset + answer.reads[0]
    replies = [each.at for each in commands if each.name == _REPLY and sent <= each.at <= read]
    return sent, min([*replies, read])


def _means(
    commands: Sequence[Command], background: Mapping[str, float], requests: int
) -> dict[str, float]:
    """Return the commands per request by name, without the very rare ones."""
    found = Counter(each.name for each in commands)
    means = {name: (found[name] - background.get(name, 0.0)) / requests for name in sorted(found)}
    return {name: mean for name, mean in means.items() if mean >= 0.05}


def _send(scenario: Scenario, system: System, *, seed: str) -> list[Answer]:
    answers, _ = drive(scenario, system, seed=seed)
    if failures := [answer.error for answer in answers if answer.error]:
        raise MeasureError(f"{system.name} failed {len(failures)} requests: {failures[0]}")
    return answers


@contextmanager
def _monitoring(redis_port: int) -> Iterator[list[Command]]:
    """Collect every command in a list that is complete when the block has ended."""
    commands: list[Command] = []
    with socket.create_connection(("127.0.0.1", redis_port)) as connection:
        connection.sendall(b"MONITOR\r\n")
        lines = connection.makefile("rb")
        if lines.readline() != b"+OK\r\n":
            raise StartError("Redis rejects MONITOR")
        reader = threading.Thread(target=_read, args=(lines, commands))
        reader.start()
        yield commands
        connection.shutdown(socket.SHUT_RD)
        reader.join()


def _read(lines: Iterator[bytes], commands: list[Command]) -> None:
    # Commands called by scripts have `lua` in place of a client address, and do not match.
    for line in lines:
        if match := _LINE.match(line):
            at, port, name, rest = match.groups()
            commands.append(Command(float(at), int(port), _name(name.decode().upper(), rest)))


def _name(command: str, rest: bytes) -> str:
    room = _ROOM.search(rest) if command == _EVALSHA else None
    return command if room is None else f"{command} {{{room[1].decode()}}}"


def _local_ports(pids: Sequence[int]) -> set[int]:
    """Return the TCP ports of those processes that still run."""
    folders = [Path(f"/proc/{pid}/fd") for pid in pids]
    sockets = {_target(each) for folder in folders if folder.exists() for each in folder.iterdir()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""
