"""Jobs whose prompts are in chunks: read once, and returned if they are not complete."""

import msgspec
from redis.asyncio import Redis

from contract import keys
from contract.messages import GenerationJob, JobFinished, JobReturned, ReturnReason
from contract.prompts import CHUNK_BYTES, CHUNK_TOKENS, chunk_names, names_of
from contract.queue import JobQueue, RequeueResult
from tests.contract.test_prompts import chunked, write
from tests.support.redis_server import RedisServer
from tests.worker.conftest import MODEL, Gateway, make_job, running_worker
from worker.engine.scripted import Script
from worker.queue.link import PromptChunks

STEADY = Script(step_seconds=0.005)
MANY_BYTES = 100 * CHUNK_BYTES


def long_job(tokens: int, **fields: object) -> GenerationJob:
    made = make_job(prompt_token_ids=[300 + at % 500 for at in range(tokens)], seed=3, **fields)
    return msgspec.structs.replace(made, chunks=names_of(made.cache_salt, made.prompt_token_ids))


async def test_turns_of_a_chat_read_each_chunk_once(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    first, second = long_job(2 * CHUNK_TOKENS), long_job(2 * CHUNK_TOKENS + 9)
    plain = make_job(prompt_token_ids=second.prompt_token_ids, seed=3)
    await write(gateway.queue, first)
    async with running_worker(redis_server, STEADY, chunk_cache_bytes=MANY_BYTES):
        await gateway.enqueue(first, plain)
        await gateway.finished(first, plain)
        await redis.delete(*await redis.keys("*:chunk:*"))
        await gateway.enqueue(second)
        await gateway.finished(second)
    end = gateway.end(second)
    assert isinstance(end, JobFinished)
    assert end.prompt_tokens == len(second.prompt_token_ids)
    assert gateway.token_ids(second) == gateway.token_ids(plain)


async def test_job_with_an_incomplete_prompt_is_returned_alone(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    lost, wrong, short = long_job(CHUNK_TOKENS), long_job(CHUNK_TOKENS, tenant="b"), make_job()
    wrong = msgspec.structs.replace(wrong, chunks=names_of("other", wrong.prompt_token_ids))
    (name,) = chunk_names(wrong.chunks, wrong.rest)
    await gateway.queue.write_chunks({name: wrong.prompt_token_ids.tobytes()}, ttl_ms=60_000)
    async with running_worker(redis_server, STEADY, chunk_cache_bytes=MANY_BYTES):
        await gateway.enqueue(lost, wrong, short)
        await gateway.finished(short)
        for job in (lost, wrong):
            await gateway.read_until(lambda job=job: gateway.returned(job))  # type: ignore[misc]
            returned = JobReturned(job.handle, 1, ReturnReason.PROMPT_LOST, False)
            assert gateway.returned(job) == [returned]
            whole = msgspec.structs.replace(job, chunks=b"")
            requeued = await gateway.queue.requeue(whole, 1, is_returned=True)
            assert requeued is RequeueResult.REQUEUED
        await gateway.finished(lost, wrong)
    assert isinstance(gateway.end(lost), JobFinished)
    assert gateway.token_ids(lost) == gateway.token_ids(wrong)
    assert not await redis.exists(keys.chunk(MODEL, name.hex()))


async def test_tenant_with_many_chunks_loses_its_own(redis: Redis) -> None:
    queue = JobQueue(redis, MODEL)
    chunks = PromptChunks(queue, most_bytes=5 * CHUNK_BYTES)
    small = chunked("j", 2 * CHUNK_TOKENS, tenant="small")
    # Chats of one tenant, which differ from the first token on.
    floods = [
        chunked(f"f{number}", CHUNK_TOKENS, tenant="large", cache_salt=f"{number}")
        for number in range(9)
    ]
    for job in (small, *floods):
        await write(queue, job)
        assert await chunks.whole(job) is not None
    await redis.flushall()
    kept = [job.id for job in (small, *floods) if await chunks.whole(job) is not None]
    assert kept == ["j", "f6", "f7", "f8"]


async def test_worker_without_memory_for_chunks_reads_them_each_time(redis: Redis) -> None:
    queue, job = JobQueue(redis, MODEL), chunked("j", CHUNK_TOKENS)
    chunks = PromptChunks(queue, most_bytes=0)
    await write(queue, job)
    for _ in range(2):
        whole = await chunks.whole(job)
        assert whole is not None
        assert whole.prompt_token_ids == job.prompt_token_ids
    await redis.flushall()
    assert await chunks.whole(job) is None
