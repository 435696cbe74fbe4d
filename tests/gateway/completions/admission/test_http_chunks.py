"""Two turns with a long prompt, from HTTP through Redis to a worker with the scripted engine."""

import httpx
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from contract import keys
from contract.prompts import CHUNK_BYTES, CHUNK_TOKENS
from tests.gateway.conftest import complete
from tests.support.events import parse_chunks
from tests.support.fake_worker import FakeWorker
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from tests.worker.conftest import MODEL, running_worker
from worker.engine.scripted import Script

WINDOW = 4 * CHUNK_TOKENS
TURN = [300 + at % 1_000 for at in range(2 * CHUNK_TOKENS + 9)]


def counts() -> list[float]:
    """Return how many chunks the worker of this process had in memory, and read, so far."""
    name, outcomes = "sluice_worker_prompt_chunks_total", ("held", "read")
    return [REGISTRY.get_sample_value(name, {"outcome": each}) or 0.0 for each in outcomes]


async def test_second_turn_sends_and_reads_only_what_is_new(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, stack: Stack, store: "Redis"
) -> None:
    announced = FakeWorker(store, MODEL)

    async def turn(client: httpx.AsyncClient, prompt: list[int]) -> str:
        response = await complete(client, model=MODEL, prompt=prompt, stream=True)
        assert response.status_code == 200, response.text
        chunks = parse_chunks(response.content)
        return "".join(each["text"] for chunk in chunks for each in chunk["choices"])

    assert isinstance(stack.redis, RedisServer)
    script = Script(step_seconds=0.001, context_window=WINDOW)
    longer = TURN + TURN[:CHUNK_TOKENS]
    async with running_worker(stack.redis, script, chunk_cache_bytes=9 * CHUNK_BYTES):
        await announced.announce(context_window=WINDOW)
        before = counts()
        texts = [await turn(client, TURN), await turn(other_client, longer)]
        assert counts() == [before[0] + 2, before[1] + 2 + 1]
        assert len(await store.keys(keys.chunk(MODEL, "*"))) == 3
        await store.delete(*await store.keys(keys.chunk(MODEL, "*")))
    # Nothing has the chunks, so the worker gets whole prompts.
    async with running_worker(stack.redis, script):
        whole = [await turn(client, TURN), await turn(other_client, longer)]
        assert not await store.keys(keys.chunk(MODEL, "*"))
    assert texts == whole
    await announced.announce(context_window=WINDOW, ttl_ms=1)
    await store.hdel(keys.MODELS, MODEL)
