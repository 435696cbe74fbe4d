"""Two workers with the real engine: the second turn of a chat goes to the first one's worker."""

import pytest
import uvloop
from openai import OpenAI
from redis import Redis

from contract import keys
from tests.e2e.completions import cached_tokens, complete
from tests.failures.kills.killing import WORKERS, start_workers
from tests.failures.proofs.until import until
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
