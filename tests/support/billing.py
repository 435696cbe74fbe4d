"""A billing system: an HTTP server that stores each event once, and fails as a test says."""

import asyncio
import json
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

from gateway.platform.database.tables import ExportBatchRow, ExportBatchState, ExportSinkRow

OK: Final = (True, 204, "")
"""What happens to a request: whether it is stored, the status (0: the connection is closed; -1: no
response), and more headers."""
Fate = tuple[bool, int, str]


@dataclass
class Billing:
    """The receiver of OpenMeter's and Stripe's requests."""

    port: int = 0
    fates: deque[Fate] = field(default_factory=deque)
    """Fates of the next requests; further ones succeed."""
    poison: set[str] = field(default_factory=set)
    """Ids that are never accepted."""
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Stored events by id. A repeated event must be the same."""
    received: Counter[str] = field(default_factory=Counter)
    """How often each event arrived."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    on_request: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cost(self) -> int:
        """Return the sum of the distinct events in micro-dollars."""
        return sum(int(event["cost"]) for event in self.events.values())

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            # A client may reach its time limit before it sends.
            with suppress(asyncio.IncompleteReadError):
                await self._respond(reader, writer)
        finally:
            self.in_flight -= 1
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        self.requests.append((first, headers))
        read = _log_records if "/v1/logs" in first else _cloud_events
        events = _stripes(body) if "meter_events" in first else read(body)
        is_stored, status, more = self.fates.popleft() if self.fates else OK
        self.received.update(event["id"] for event in events)
        if status == OK[1] and (bad := [e["id"] for e in events if e["id"] in self.poison]):
            is_stored, status, more = False, 400, f"no such event {bad[0]}"
        elif "meter_events" in first and is_stored and events[0]["id"] in self.events:
            # As Stripe responds to a known identifier.
            is_stored, more = True, f"An event already exists with identifier {events[0]['id']}."
            status = 400 if status == OK[1] else status
        if is_stored:
            for event in events:
                assert self.events.setdefault(event["id"], event) == event
        self.on_request()
        if status < 0:
            await reader.read()  # Until the client closes the connection.
        elif status:
            text = more if status == 400 else ""
            extra = "" if status == 400 else more
            length = f"content-length: {len(text)}\r\n"
            writer.write(f"HTTP/1.1 {status} X\r\n{extra}{length}\r\n{text}".encode())
            await writer.drain()


@asynccontextmanager
async def running_billing() -> AsyncIterator[Billing]:
    """Serve on loopback until the end of the block."""
    billing, tasks = Billing(), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(billing.respond(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    billing.port = server.sockets[0].getsockname()[1]
    try:
        yield billing
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
    # A wrong request fails the test.
    for result in results:
        if isinstance(result, Exception):
            raise result


def rejected_batch(sink: ExportSinkRow) -> ExportBatchRow:
    """Return a request that the sink has not accepted."""
    return ExportBatchRow(
        sink=sink.name,
        state=ExportBatchState.REJECTED,
        after=0,
        upto=1,
        rows=1,
        oldest_at=sink.created_at,
        identifier="cmpl-1",
        customer="",
        occurred_at=sink.created_at,
        attempts=1,
        last_error="400: no",
    )


@contextmanager
def billing_in_thread() -> Iterator[Billing]:
    """Do the same as `running_billing` for tests without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = running_billing()
    billing = asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
    try:
        yield billing
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _cloud_events(body: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(body)
    return [{**event, "cost": event["data"]["cost_micros"]} for event in events]


def _log_records(body: bytes) -> list[dict[str, Any]]:
    [resource] = json.loads(body)["resourceLogs"]
    [scope] = resource["scopeLogs"]
    events = []
    for each in scope["logRecords"]:
        data = {one["key"]: one["value"] for one in each.pop("attributes")}
        texts = {key: str(*value.values()) for key, value in data.items()}
        more = {"id": texts["log.record.uid"], "cost": texts["sluice.cost_micros"]}
        events.append(each | texts | more)
    return events


def _stripes(body: bytes) -> list[dict[str, Any]]:
    fields = {name: values[0] for name, values in parse_qs(body.decode()).items()}
    return [{**fields, "id": fields["identifier"], "cost": fields["payload[value]"]}]
