"""Prompts of jobs: token ids on the wire between this release and others, and chunks in Redis."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from contract import keys
from contract.affinity import prefix_affinity, prefix_ends
from contract.messages import GenerationJob, decode_job, encode_job
from contract.prompts import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    NAME_BYTES,
    chunk_ends,
    chunk_names,
    decode_prompt,
    digests_at,
    encode_ids,
    names_of,
    packed,
)
from contract.queue import JobQueue
from tests.contract.test_queue import MODEL, job
from tests.support.cases import all_cases
from tests.support.kinds import every_redis

EDGES = [0, 1, 127, 128, 255, 256, 0xCE, 0xCECECECE, 65_535, 65_536, 2**31, 2**32 - 1]
TTL_MS = 60_000


def chunked(job_id: str, tokens: int, **fields: str) -> GenerationJob:
    made = job(job_id, prompt_tokens=tokens, **fields)
    names = names_of(made.cache_salt, made.prompt_token_ids)
    return msgspec.structs.replace(made, chunks=names)


async def write(queue: JobQueue, made: GenerationJob) -> list[bytes]:
    """Write the chunks of a job; return their names."""
    names, content = chunk_names(made.chunks, made.rest), made.prompt_token_ids.tobytes()
    parts = [content[at * CHUNK_BYTES : (at + 1) * CHUNK_BYTES] for at in range(len(names))]
    await queue.write_chunks(dict(zip(names, parts, strict=True)), ttl_ms=TTL_MS)
    return names


@all_cases("token_ids", [[], [0], EDGES, EDGES * 2_000])
def test_prompt_is_an_array_of_integers(token_ids: list[int]) -> None:
    encoded = encode_ids(packed(token_ids))
    assert msgspec.msgpack.decode(encoded, type=list[int]) == token_ids
    assert decode_prompt(encoded) == (b"", packed(token_ids))


@all_cases("prompt", [[-1], [2**32], [1, -5, 2], ["a"], None, b"\1\0\0\0", {}, 7, [b"a", 1]])
def test_job_whose_prompt_has_no_token_ids_cannot_be_decoded(prompt: object) -> None:
    fields = msgspec.msgpack.decode(encode_job(job("j1")))
    encoded = msgspec.msgpack.encode(fields | {"prompt_token_ids": prompt})
    with pytest.raises(msgspec.MsgspecError):
        decode_job(encoded)


def test_names_depend_on_all_tokens_before_and_on_the_salt() -> None:
    tokens = packed(range(3 * CHUNK_TOKENS))
    names, more = names_of("a", tokens), names_of("a", tokens + packed([1]))
    assert more[:-NAME_BYTES] == names
    other = names_of("a", packed([7]) + tokens[1:])
    parts = {each[at : at + NAME_BYTES] for each in (names, other) for at in range(0, 48, 16)}
    assert len(parts | {names_of("b", tokens)[:NAME_BYTES]}) == 7


def test_one_pass_gives_the_digests_for_chunks_and_for_affinity() -> None:
    tokens = packed(range(3 * CHUNK_TOKENS + 5))
    prefixes, chunks = prefix_ends(len(tokens), 32), chunk_ends(len(tokens))
    digests = digests_at("a", tokens, {*prefixes, *chunks})
    assert prefixes[-1] == 3 * CHUNK_TOKENS
    assert prefix_affinity("a", tokens, 32, digests) == prefix_affinity("a", tokens, 32)
    assert names_of("a", tokens, digests) == names_of("a", tokens)


@every_redis
async def test_job_has_its_whole_prompt_again_with_its_chunks(any_redis: "Redis") -> None:
    queue = JobQueue(any_redis, MODEL)
    for number, tokens in enumerate((CHUNK_TOKENS, CHUNK_TOKENS + 1, 20 * CHUNK_TOKENS - 1)):
        made = chunked(f"j{number}", tokens)
        names = await write(queue, made)
        kept = await queue.keep_chunks([*names, b"none"], ttl_ms=TTL_MS)
        assert kept == [*[True] * len(names), False]
        encoded = encode_job(made)
        assert len(encoded) < 5 * (tokens % CHUNK_TOKENS) + NAME_BYTES * (len(names) + 1) + 300
        # A release that does not know chunks must not take the rest for the whole prompt.
        older = msgspec.defstruct("Older", [("prompt_token_ids", list[int])])
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(encoded, type=older)
        decoded = decode_job(encoded)
        assert encode_job(decoded) == encoded
        whole, chunks = await queue.with_prompt(decoded)
        assert whole == msgspec.structs.replace(made, chunks=b"")
        assert list(chunks) == names
        await any_redis.flushall()
        assert await queue.with_prompt(decoded, chunks) == (whole, chunks)
        assert await queue.with_prompt(decoded) == (None, {})


FAULTS: dict[str, Callable[[list[bytes]], list[bytes | None]]] = {
    "lost": lambda parts: [parts[0], None, parts[2]],
    "changed": lambda parts: [parts[0], b"\1" + parts[1][1:], parts[2]],
    "in another order": lambda parts: [parts[1], parts[0], parts[2]],
    "cut": lambda parts: [parts[0], parts[1], parts[2][:-4]],
    "torn": lambda parts: [parts[0], parts[1], parts[2][:-1]],
    "longer": lambda parts: [parts[0], parts[1] + parts[1][:4], parts[2]],
    "empty": lambda parts: [parts[0], b"", parts[2]],
}


@all_cases("fault", [*FAULTS])
async def test_wrong_chunks_are_deleted_and_make_no_prompt(any_redis: "Redis", fault: str) -> None:
    queue, made = JobQueue(any_redis, MODEL), chunked("j", 3 * CHUNK_TOKENS + 5)
    names = await write(queue, made)
    redis_keys = [keys.chunk(MODEL, name.hex()) for name in names]
    stored: Any = await any_redis.mget(redis_keys)
    parts = FAULTS[fault](stored)
    for key, part in zip(redis_keys, parts, strict=True):
        await (any_redis.delete(key) if part is None else any_redis.set(key, part))
    assert await queue.with_prompt(decode_job(encode_job(made))) == (None, {})
    # Those that are right are useful to other jobs if another one is merely gone.
    assert await any_redis.exists(*redis_keys) == (2 if fault == "lost" else 0)
