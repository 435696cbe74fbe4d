"""Clients that send a gateway requests of every kind until they are stopped."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import httpx

from gateway.accounts.aliases import AliasService
from gateway.billing.prices import PriceService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from tests.gateway.conftest import asking
from tests.support.stack import MODEL, Stack

BODIES = (
    asking(stream=True, max_tokens=40),
    asking(max_tokens=10, service_tier="priority"),
    asking(stream=True, max_tokens=20, service_tier="flex"),
    asking(max_tokens=0.5),
)
"""Two streams, a whole response, and a request that is refused."""
PATIENCE_SECONDS = 0.2
"""Timeout of a client that disconnects before its response."""
PAUSE_SECONDS = 0.5
"""Time between two requests of the client that exceeds its limits."""


async def sell(stack: Stack) -> None:
    """Give the model a price, and hide it behind an alias of its name."""
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        announcer = ChangeAnnouncer(redis)
        await AliasService(database, announcer).put(MODEL, weights={MODEL: 1})
        await PriceService(database, announcer).add(
            MODEL, prompt_micros=15_000_000, completion_micros=60_000_000
        )
    finally:
        await redis.aclose()
        await database.aclose()


def run_batch(url: str, key: str, *, lines: int) -> None:
    """Begin a batch of short completions."""
    line = {"method": "POST", "url": "/v1/completions", "body": asking(max_tokens=20)}
    content = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(lines))
    with httpx.Client(
        base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30
    ) as client:
        file = client.post(
            "/v1/files", files={"file": ("batch.jsonl", content)}, data={"purpose": "batch"}
        )
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        client.post("/v1/batches", json={"input_file_id": file.json()["id"], **asked})


@contextmanager
def load(url: str, keys: Sequence[str], *, clients: int, limited: str = "") -> Iterator[None]:
    """Send requests for the length of a block, from so many concurrent clients.

    One more client uses a key whose limits reject its requests, if one is given.
    """
    stopping = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_run(url, keys, limited, clients, stopping.is_set))
    )
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


async def _run(
    url: str, keys: Sequence[str], limited: str, clients: int, is_over: Callable[[], bool]
) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await asyncio.gather(
            *(_ask(client, keys[each % len(keys)], is_over) for each in range(clients)),
            _leave(client, keys[0], is_over),
            *([_exceed(client, limited, is_over)] if limited else ()),
        )


async def _ask(client: httpx.AsyncClient, key: str, is_over: Callable[[], bool]) -> None:
    while not is_over():
        for body in BODIES:
            await _post(client, key, body)


async def _leave(client: httpx.AsyncClient, key: str, is_over: Callable[[], bool]) -> None:
    while not is_over():
        await _post(client, key, asking(max_tokens=200), timeout=PATIENCE_SECONDS)


async def _exceed(client: httpx.AsyncClient, key: str, is_over: Callable[[], bool]) -> None:
    while not is_over():
        await _post(client, key, asking(max_tokens=1))
        await asyncio.sleep(PAUSE_SECONDS)


async def _post(
    client: httpx.AsyncClient, key: str, body: dict[str, object], timeout: float = 30
) -> None:
    headers = {"authorization": f"Bearer {key}"}
    # Some clients time out on purpose, and other tests detect refused connections.
    with suppress(httpx.TransportError):
        await client.post("/v1/completions", json=body, headers=headers, timeout=timeout)
