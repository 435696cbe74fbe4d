"""Two workers with the real engine: second turns go to the first ones' worker, and classes."""

import asyncio
from typing import Any

import pytest
import uvloop
from openai import OpenAI
from redis import Redis

from contract import keys
from gateway.billing.ledger.drain import Drain
from tests.e2e.completions import cached_tokens, complete
from tests.failures.kills.killing import ENGINE, STREAMS, WORKERS, kill_worker, start_workers
from tests.failures.proofs.client import Answer, request
from tests.failures.proofs.ledger import open_books
from tests.failures.proofs.until import engine_tokens, until
from tests.support.stack import MODEL, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3_600)]

CHATS = 6
FIRST, SECOND = 1_300, 1_340
"""Tokens of the prompts: ten blocks of the cache, and some more.

How long a job waits for the worker that has cached its prefix follows from the time to process the
prefix. So it has to be long, for a busy machine.
"""


def test_second_turns_find_the_first_ones_in_the_cache(stack: Stack) -> None:
    start_workers(stack)
    with (
        OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key(), max_retries=0) as client,
        Redis.from_url(stack.redis.url) as store,
    ):

        def found(chat: int, tokens: int) -> int:
            prompt = [300 + (chat * 97 + index) % 700 for index in range(tokens)]
            return cached_tokens(complete(client, prompt, max_tokens=2))

        def held() -> list[int]:
            return [int(store.scard(keys.held(MODEL, name))) for name in worker_ids(store)]

        before = sum(held())
        # Idle workers take turns.
        assert [found(chat, FIRST) for chat in range(CHATS)] == [0] * CHATS
        uvloop.run(until(lambda: sum(held()) >= before + 6 * CHATS, what="publication"))
        assert min(held()) > 0
        # In another order, taking turns would find three of six.
        assert [found(chat ^ 1, SECOND) for chat in range(CHATS)] == [1_280] * CHATS


def worker_ids(store: "Redis") -> list[str]:
    """Return the workers that claim jobs."""
    names: list[bytes] = store.zrange(keys.workers(MODEL), 0, -1)  # type: ignore[assignment]
    assert len(names) == len(WORKERS)
    return [name.decode() for name in names]


OTHER_CLASS = "worker-3"
OTHER_ENGINE = ENGINE | {"SLUICE_ENGINE_ARGUMENTS": '{"dtype": "bfloat16"}'}
TOKENS = 600


def classes_of(event: dict[str, Any]) -> list[str]:
    """Return the exactness classes after the first part of the fingerprint of an event."""
    fingerprint: str = event["system_fingerprint"]
    return fingerprint.split("-")[1:]


@pytest.mark.long
def test_receipts_name_the_data_types_that_generated_each_response(stack: Stack) -> None:
    """Streams of a worker in float32 continue on one in bfloat16 after its end."""
    first = WORKERS[0]
    for name in {*WORKERS, OTHER_CLASS} & stack.processes.keys():
        stack.stop(name)
    start_workers(stack, [first])
    stack.launch_worker(OTHER_CLASS, OTHER_ENGINE)
    stack.await_worker(OTHER_CLASS)
    key = stack.key("classes")
    answers = [Answer() for _ in range(STREAMS)]

    async def prove() -> None:
        before = engine_tokens(stack, first)
        async with asyncio.TaskGroup() as tasks:
            for number, answer in enumerate(answers):
                asked = {
                    "model": MODEL,
                    "prompt": [300 + number] * 20,
                    "max_tokens": TOKENS,
                    "ignore_eos": True,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                tasks.create_task(request(stack.url, key, asked, answer=answer))
            await until(lambda: all(each.events for each in answers), what="first tokens")
            await until(lambda: engine_tokens(stack, first) > before + 300, what="tokens")
            await kill_worker(stack, first)
        async with open_books(stack) as books:
            await books.open_at_most(0)
            await Drain(books.redis, books.database).run()
            rows = {row["request_id"]: row for row in await books.rows("classes")}
        seen = set[tuple[str, ...]]()
        for answer in answers:
            row = rows[str(answer.request_id)]
            begun, ended = map(classes_of, (answer.events[0], answer.events[-1]))
            assert row["completion_tokens"] == TOKENS
            assert row["exactness_class"] == ", ".join(ended)
            assert row["class_crossings"] == len(ended) - 1
            assert ended[0] == begun[0]
            seen.add(tuple(ended))
        classes = {each for names in seen for each in names}
        assert len(classes) == 2
        # Those of the killed worker crossed, the others did not, and none in the other direction.
        assert sorted(map(len, seen)) == [1, 2]
        [alone] = [names[0] for names in seen if len(names) == 1]
        assert all(names[-1] == alone for names in seen)

    uvloop.run(prove())
    start_workers(stack)
    stack.stop(OTHER_CLASS)
