"""Memory per request in Redis, a gateway and PostgreSQL: `python -m bench.memory`, for
docs/capacity.md.

The program measures Redis and the gateway before and while many requests are in one state. It
prints the difference divided by their number. It uses the scripted engine and one gateway.
"""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import asyncpg
import httpx
from redis import Redis

from bench.postgres import running_postgres
from bench.processes import resident_mib
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL
from bench.systems import Deployment, Engine

TENANT: Final = "memory"
STREAMS: Final = 200
PROMPT_TOKENS: Final = 1_000
COMPLETION_TOKENS: Final = 500
STEP_SECONDS: Final = 0.02
ROWS: Final = 2_000
SETTLE_SECONDS: Final = 3.0
"""Time after which the last journals are written, and gateways have sent all updates to Redis."""
LOOK_SECONDS: Final = 0.5
MOST_LOOKS: Final = 120
"""Checks of the ledger until it has every record."""
_VOCABULARY: Final = 2_000
_KIBIBYTE: Final = 1024


def main() -> None:
    """Measure everything and print one line for each figure."""
    with running_postgres() as postgres, tempfile.TemporaryDirectory() as folder:
        location = postgres.create_database("memory")
        roomy = _deployment(max_sequences=STREAMS)
        url = f"postgresql+asyncpg://{location}"
        with running_sluice(roomy, Path(folder), database_url=url) as sluice:
            sluice.key(TENANT)
            asyncio.run(_running(sluice))
            asyncio.run(_ledger(sluice, f"postgresql://{location}"))
    with tempfile.TemporaryDirectory() as folder:
        crowded = _deployment(max_sequences=1)
        with running_sluice(crowded, Path(folder)) as sluice:
            sluice.key(TENANT)
            asyncio.run(_waiting(sluice))


def _deployment(*, max_sequences: int) -> Deployment:
    return Deployment(
        engine=Engine.SCRIPTED,
        max_sequences=max_sequences,
        context_window=PROMPT_TOKENS + COMPLETION_TOKENS,
        step_seconds=STEP_SECONDS,
    )


async def _running(sluice: Sluice) -> None:
    (url,) = sluice.urls(1)
    (gateway,) = sluice.groups(1)["gateway"]
    redis = Redis(port=sluice.redis_port)
    async with _client(sluice, url) as client:
        # The first requests load what all later ones share: tokenizer, key, price.
        await _complete(client, number=STREAMS, tokens=1)
        await asyncio.sleep(SETTLE_SECONDS)
        in_redis, in_gateway = _used(redis), resident_mib(gateway)
        streams = [
            asyncio.create_task(_ask(client, tokens=COMPLETION_TOKENS)) for _ in range(STREAMS)
        ]
        # Close to their end, when a journal is longest.
        await asyncio.sleep(COMPLETION_TOKENS * STEP_SECONDS * 0.9)
        _print("running stream, Redis", _used(redis) - in_redis, STREAMS)
        mebibytes = resident_mib(gateway) - in_gateway
        _print("running stream, gateway", mebibytes * _KIBIBYTE * _KIBIBYTE, STREAMS)
        await asyncio.gather(*streams)
        await asyncio.sleep(SETTLE_SECONDS)
        _print("ended stream that is kept, Redis", _used(redis) - in_redis, STREAMS)


async def _waiting(sluice: Sluice) -> None:
    (url,) = sluice.urls(1)
    redis = Redis(port=sluice.redis_port)
    async with _client(sluice, url) as client:
        await _complete(client, number=1, tokens=1)
        await asyncio.sleep(SETTLE_SECONDS)
        before = _used(redis)
        streams = [
            asyncio.create_task(_ask(client, tokens=COMPLETION_TOKENS)) for _ in range(STREAMS)
        ]
        await asyncio.sleep(SETTLE_SECONDS)
        _print(
            f"waiting job of {PROMPT_TOKENS} prompt tokens, Redis", _used(redis) - before, STREAMS
        )
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)


async def _ledger(sluice: Sluice, url: str) -> None:
    redis = Redis(port=sluice.redis_port)
    (gateway_url,) = sluice.urls(1)
    jobs, beat = sluice.start_command("jobs"), sluice.start_command("beat")
    database = await asyncpg.connect(url)
    try:
        async with _client(sluice, gateway_url) as client:
            before = _used(redis)
            await _complete(client, number=ROWS, tokens=1)
            await asyncio.sleep(SETTLE_SECONDS)
        for _ in range(MOST_LOOKS):
            if await _rows(database) >= ROWS:
                break
            await asyncio.sleep(LOOK_SECONDS)
        _print("whole answer that is not kept, Redis", _used(redis) - before, ROWS)
        size = await database.fetchval(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c "
            "WHERE c.relkind = 'r' AND c.relname LIKE 'usage_ledger%'"
        )
        _print("row of the ledger with its indexes, PostgreSQL", size, await _rows(database))
    finally:
        await database.close()
        beat.stop()
        jobs.stop()


async def _rows(database: Any) -> int:
    count: int = await database.fetchval("SELECT count(*) FROM usage_ledger")
    return count


@asynccontextmanager
async def _client(sluice: Sluice, url: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {sluice.key(TENANT)}"}
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=120
    ) as client:
        yield client


async def _complete(client: httpx.AsyncClient, *, number: int, tokens: int) -> None:
    await asyncio.gather(*(_ask(client, tokens=tokens, streamed=False) for _ in range(number)))


async def _ask(client: httpx.AsyncClient, *, tokens: int, streamed: bool = True) -> None:
    prompt = [secrets.randbelow(_VOCABULARY) for _ in range(PROMPT_TOKENS)]
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": streamed,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_bytes():
            pass


def _used(redis: "Redis") -> int:
    memory: Any = redis.info("memory")
    used: int = memory["used_memory"]
    return used


def _print(what: str, size: float, number: int) -> None:
    print(f"{what:50} {size / number / _KIBIBYTE:6.1f} KiB", flush=True)


if __name__ == "__main__":
    main()
