"""Turns of an agent's session go to the worker that served the session last, in each API."""

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract.affinity import prefix_affinity, session_affinity
from contract.messages import Feature
from contract.outcomes import FinishReason
from contract.queue import Affinity, ClaimResult, JobClaim
from tests.gateway.chats import TOKENIZER, serve_chats
from tests.support.fake_worker import ROOM, FakeWorker, chat_format
from tests.support.patience import PATIENCE_SECONDS

BLOCK = 16
IMAGE_TOKEN, PNG = "<image>", "data:image/png;base64,iVBORw0KGgo="
SYSTEM = "You edit files. " * 60
CARD: dict[str, Any] = {"cache_block_tokens": BLOCK, "features": [Feature.CHAT, Feature.IMAGES]}

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
APIS = [
    (CHAT, {"prompt_cache_key": "s"}, {}),
    (CHAT, {}, {"x-session-affinity": "s"}),
    (CHAT, {"session_id": "s"}, {}),
    (MESSAGES, {"metadata": {"user_id": "s"}}, {}),
    (MESSAGES, {}, {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}),
    (RESPONSES, {"prompt_cache_key": "s"}, {"session_id": "another"}),
    (RESPONSES, {}, {"session-id": "s"}),
]


def turn(path: str, model: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return a body with these messages of a user, and what the model said to each."""
    said: list[Any] = [{"role": "user", "content": texts[0]}]
    for text in texts[1:]:
        said += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": text}]
    body: dict[str, Any] = {"model": model}
    if path == CHAT:
        return body | {"messages": [{"role": "system", "content": SYSTEM}, *said]}
    if path == MESSAGES:
        return body | {"messages": said, "system": SYSTEM, "max_tokens": 9}
    return body | {"input": said, "instructions": SYSTEM}


def cached_share(body: dict[str, Any]) -> float:
    """Return the share of the prompt's tokens that an API reports as cached."""
    usage = body["usage"]
    if (cached := usage.get("cache_read_input_tokens")) is not None:
        return float(cached / (cached + usage["input_tokens"]))
    prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return float(details["cached_tokens"] / prompt)


async def claimed(worker: FakeWorker) -> ClaimResult:
    """Claim until there is a job, or one is kept for another worker."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            affinity = Affinity(1_000, 1_000.0, 15_000)
            result = await worker.queue.claim(
                worker.name, ROOM, most_jobs=1, lease_ms=60_000, affinity=affinity
            )
            if result.claims or result.kept_jobs:
                return result
            await asyncio.sleep(0.01)


async def finish(worker: FakeWorker, claim: JobClaim, *known: Sequence[int]) -> None:
    """End a job; `known` are the prompts in the worker's cache."""
    prompt = claim.job.prompt_token_ids
    common = [
        sum(1 for _ in takewhile(lambda e: e[0] == e[1], zip(prompt, each, strict=False)))
        for each in known
    ]
    await worker.say(claim, "Done.", finish=FinishReason.STOP)
    await worker.finish(claim, cached=max(common, default=0) // BLOCK * BLOCK)


@pytest.mark.parametrize(("path", "named", "headers"), APIS)
async def test_next_turn_finds_its_cache_before_that_is_published(
    client: httpx.AsyncClient,
    store: "Redis",
    path: str,
    named: dict[str, Any],
    headers: dict[str, str],
) -> None:
    first, name = await serve_chats(store, form=chat_format(), **CARD)
    second = FakeWorker(store, name, name=f"{first.name}-2")
    await second.announce(chat=chat_format(), **CARD)

    def ask(*texts: str) -> "asyncio.Task[httpx.Response]":
        body = turn(path, name, texts) | named
        return asyncio.create_task(client.post(path, json=body, headers=headers))

    request = ask("Read it.")
    [claim] = (await claimed(first)).claims
    await finish(first, claim)
    assert (await request).status_code == 200
    request = ask("Read it.", "Now edit it.")
    assert (await claimed(second)).claims == []
    [again] = (await claimed(first)).claims
    await finish(first, again, claim.job.prompt_token_ids)
    assert cached_share((await request).json()) > 0.9


async def test_text_before_the_first_image_has_digests(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    """A session with a screenshot finds the worker that holds all that precedes it."""
    worker, name = await serve_chats(
        store, **CARD, image_token=IMAGE_TOKEN, max_images=2, image_tokens=100
    )
    prompt = f"{SYSTEM}<image>{SYSTEM}"
    named = {"prompt_cache_key": ["no text"], "session_id": "s"}
    body = {"model": name, "prompt": prompt, "images": [PNG]} | named
    request = asyncio.create_task(client.post("/v1/completions", json=body))
    job = (claim := await worker.claim_one()).job
    mark = [*job.prompt_token_ids].index(int(TOKENIZER.token_to_id(IMAGE_TOKEN) or 0))
    before = job.prompt_token_ids[:mark]
    assert len(before) > 10 * BLOCK
    digests = prefix_affinity(job.cache_salt, before, BLOCK)
    # The rest of the prompt counts as cached at the worker that served the session last.
    assert job.affinity == digests + session_affinity(job.cache_salt, "s ", before)
    await finish(worker, claim)
    assert (await request).status_code == 200
