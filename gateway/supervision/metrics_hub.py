"""The supervisor's side of the metrics that several gateway processes share."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gateway.http.shared_metrics import (
    COLLECT,
    Family,
    add_up,
    cumulative,
    decode,
    read_message,
    write_message,
)

SNAPSHOT_SECONDS: Final = 3.0
"""How long a process may take for a snapshot. Its latest one counts if it takes longer."""
CHECK_SECONDS: Final = 10.0
SILENT_SECONDS: Final = 60.0
"""Time without a snapshot after which a process counts as stuck, as for the chart's liveness
probe. Probes cannot find such a process, because others accept their connections."""


class _Process:
    """A connected process and its latest snapshot."""

    def __init__(self, pid: int, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.families: list[Family] = []
        self.responded_at = time.monotonic()
        self._writer = writer
        self._arrived = asyncio.Event()

    async def refresh(self) -> None:
        """Request a snapshot and wait for it, or for a late one that was requested earlier."""
        self._arrived.clear()
        self._writer.write(b"\n")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), SNAPSHOT_SECONDS)

    def arrived(self, families: list[Family]) -> None:
        """Store a snapshot."""
        self.families = families
        self.responded_at = time.monotonic()
        self._arrived.set()

    def left(self) -> None:
        """Stop waiting for a snapshot."""
        self._arrived.set()


class MetricsHub:
    """Adds up the metrics of all processes, including the counts of those that have ended.

    Without these counts, a sum would fall when a process ends, and Prometheus would count
    everything before as a new increase. What a process counted after the last scrape is lost with
    it.
    """

    def __init__(self, *, on_join: Callable[[], None], on_silence: Callable[[int], None]) -> None:
        """Start without processes.

        Args:
            on_join: Called for each process that connects.
            on_silence: Called with the id of each process that is stuck.
        """
        self._on_join = on_join
        self._on_silence = on_silence
        self._processes: set[_Process] = set()
        self._ended: list[Family] = []
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Accept connections of processes on a Unix socket."""
        self._server = await asyncio.start_unix_server(self._serve, path)

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    async def watch(self) -> None:
        """Find stuck processes until this task is cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self._refresh()
            for process in self._processes:
                if time.monotonic() - process.responded_at > SILENT_SECONDS:
                    self._on_silence(process.pid)

    async def collect(self) -> list[Family]:
        """Return the current sums."""
        await self._refresh()
        return add_up([self._ended, *(process.families for process in self._processes)])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A process may end at any time.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            line = await reader.readline()
            if line != COLLECT:
                await self._follow(_Process(int(line.split()[1]), writer), reader)
            else:
                write_message(writer, msgspec.msgpack.encode(await self.collect()))
                await writer.drain()
        writer.close()

    async def _refresh(self) -> None:
        await asyncio.gather(*(process.refresh() for process in self._processes))

    async def _follow(self, process: _Process, reader: asyncio.StreamReader) -> None:
        self._processes.add(process)
        self._on_join()
        try:
            while True:
                process.arrived(decode(await read_message(reader)))
        finally:
            self._processes.remove(process)
            self._ended = add_up([self._ended, cumulative(process.families)])
            process.left()
