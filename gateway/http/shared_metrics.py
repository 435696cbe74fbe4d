"""Metrics of several processes that serve one port, as one page.

Each process sends a snapshot of its metrics to the supervisor on request. The supervisor adds them
up, and returns the sums to the process that serves the scrape.
"""

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from typing_extensions import override

JOIN: Final = b"join %d\n"
"""First line of a connection on which a process sends snapshots, one for each line it reads, with
the id of the process."""
COLLECT: Final = b"collect\n"
"""Only line of a connection on which a process reads the sums."""
LENGTH_BYTES: Final = 4
"""Bytes of the big-endian length before each message."""

_CUMULATIVE: Final = frozenset({"counter", "histogram"})
_ADDED_PREFIX: Final = "sluice_gateway_"
_ADDED: Final = frozenset(
    {
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_max_fds",
    }
)
"""Gauges of one process, besides those with the prefix above. All others describe what the
processes share, so that the largest value counts."""

_Exemplar = tuple[dict[str, str], float, float]
"""Labels, value, and Unix time in seconds."""


class Value(msgspec.Struct, array_like=True):
    """One sample of a metric."""

    name: str
    labels: dict[str, str]
    value: float
    exemplar: _Exemplar | None


class Family(msgspec.Struct, array_like=True):
    """A metric with all its samples."""

    name: str
    documentation: str
    type: str
    values: list[Value]


class _Key(NamedTuple):
    name: str
    labels: frozenset[tuple[str, str]]


def snapshot(registry: Collector) -> bytes:
    """Return the current values of all metrics, for `decode`."""
    return msgspec.msgpack.encode(
        [
            Family(
                metric.name,
                metric.documentation,
                metric.type,
                [
                    Value(sample.name, sample.labels, sample.value, _plain(sample.exemplar))
                    for sample in metric.samples
                ],
            )
            for metric in registry.collect()
        ]
    )


def decode(content: bytes) -> list[Family]:
    """Return the families of a snapshot."""
    return msgspec.msgpack.decode(content, type=list[Family])


def add_up(snapshots: Iterable[Iterable[Family]]) -> list[Family]:
    """Return the sums of counters, histograms and the gauges of one process, else the maxima."""
    families: dict[str, Family] = {}
    found: dict[_Key, Value] = {}
    for family in (family for each in snapshots for family in each):
        sums = families.setdefault(
            family.name, Family(family.name, family.documentation, family.type, [])
        )
        adds = _is_added(family)
        for value in family.values:
            key = _Key(value.name, frozenset(value.labels.items()))
            if (total := found.get(key)) is None:
                found[key] = total = Value(value.name, value.labels, value.value, value.exemplar)
                sums.values.append(total)
                continue
            total.value = total.value + value.value if adds else _larger(total.value, value.value)
            total.exemplar = _later(total.exemplar, value.exemplar)
    return list(families.values())


def cumulative(families: Iterable[Family]) -> list[Family]:
    """Return the counters and histograms, which outlive their process."""
    return [family for family in families if family.type in _CUMULATIVE]


class Sums(Collector):
    """Families of several processes in the form that prometheus-client writes."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    @override
    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for value in family.values:
                exemplar = None if value.exemplar is None else Exemplar(*value.exemplar)
                metric.add_sample(value.name, value.labels, value.value, exemplar=exemplar)
            yield metric


class MetricsLink:
    """A process's connections to the supervisor."""

    def __init__(self, path: Path) -> None:
        """Do not connect yet. `path` is the supervisor's Unix socket."""
        self._path = path

    async def report(self, take_snapshot: Callable[[], Awaitable[bytes]]) -> None:
        """Send a snapshot whenever the supervisor requests one, until it closes the connection."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(JOIN % os.getpid())
            # The supervisor may be killed at any time.
            with contextlib.suppress(ConnectionError):
                while await reader.readline():
                    write_message(writer, await take_snapshot())
                    await writer.drain()
        finally:
            writer.close()

    async def collect(self) -> Sums:
        """Return the sums over all processes."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(COLLECT)
            return Sums(decode(await read_message(reader)))
        finally:
            writer.close()


def write_message(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Write a message with its length."""
    writer.write(len(content).to_bytes(LENGTH_BYTES) + content)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Read a message. Raises IncompleteReadError if the connection is closed before its end."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
    return await reader.readexactly(length)


def _is_added(family: Family) -> bool:
    if family.type in _CUMULATIVE:
        return True
    return family.name.startswith(_ADDED_PREFIX) or family.name in _ADDED


def _larger(one: float, other: float) -> float:
    """Return the larger value; a known one rather than NaN."""
    return other if math.isnan(one) or other > one else one


def _plain(exemplar: Exemplar | None) -> _Exemplar | None:
    if exemplar is None:
        return None
    return (exemplar.labels, exemplar.value, float(exemplar.timestamp or 0.0))


def _later(one: _Exemplar | None, other: _Exemplar | None) -> _Exemplar | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=itemgetter(2))
