"""Clients that read a part of a stream and resume it later."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from contract.queue import JobClaim
from tests.gateway.conftest import asking
from tests.support.events import numbered_events
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS

Events = list[tuple[bytes, str, int]]


class Reader:
    """Reads a stream in parts; its client stays until the response is closed."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200
        self._parts = response.aiter_raw()
        self._body = b""

    async def read(self, number: int) -> Events:
        """Return data, request and number of the first events; fewer only at the end."""
        while len(events := numbered_events(self._body[: self._body.rfind(b"\n\n") + 2])) < number:
            if not (part := await anext(self._parts, b"")):
                break
            self._body += part
        return events[:number]

    async def read_all(self) -> Events:
        """Return all events of the stream."""
        async for part in self._parts:
            self._body += part
        return numbered_events(self._body)


@asynccontextmanager
async def begun(
    client: httpx.AsyncClient, worker: FakeWorker, model: str, text: str
) -> AsyncIterator[tuple[httpx.Response, JobClaim]]:
    """Start a stream and send its first token; yield the response and the job's claim."""

    async def send_first() -> JobClaim:
        claim = await worker.claim_one()
        await worker.say(claim, text)
        return claim

    # A gateway that commits nothing early begins its response with the first token.
    sending = asyncio.create_task(send_first())
    body = asking(model=model, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        yield response, await sending


async def begin(client: httpx.AsyncClient, number: int, **parameters: Any) -> Events:
    """Start a stream, read a number of its events, and disconnect."""
    return await begin_at("/v1/completions", client, number, asking(**parameters))


async def begin_at(
    path: str, client: httpx.AsyncClient, number: int, body: dict[str, Any]
) -> Events:
    """Start a stream at an endpoint, read a number of its events, and disconnect."""
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        return await Reader(response).read(number)


def path_of(request_id: str) -> str:
    """Return the path of a stored response."""
    kinds = {"chatcmpl-": "chat/completions", "cmpl-": "completions", "msg_": "messages"}
    kind = next(kind for prefix, kind in kinds.items() if request_id.startswith(prefix))
    return f"/v1/{kind}/{request_id}"


async def resume(client: httpx.AsyncClient, request_id: str, number: int) -> httpx.Response:
    """Read a stream from after an event."""
    return await client.get(
        path_of(request_id),
        params={"stream": "true"},
        headers={"last-event-id": f"{request_id}:{number}"},
    )


async def status_of(client: httpx.AsyncClient, request_id: str) -> str:
    """Return the status of a completion; `completed` if its response is whole."""
    response = await client.get(path_of(request_id))
    assert response.status_code == 200, response.text
    body = response.json()
    return "completed" if "choices" in body else str(body["status"])


async def await_status(client: httpx.AsyncClient, request_id: str, status: str) -> None:
    """Wait until a completion has a status."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (found := await status_of(client, request_id)) != status:
            assert found in ("queued", "in_progress"), found
            await asyncio.sleep(0.02)
