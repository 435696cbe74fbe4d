"""Trained adapters of the demo model: every answer is its adapter's, whatever else runs."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Final

import httpx
import pytest
from openai import AsyncOpenAI
from redis import Redis

from contract import keys
from tests.e2e.test_disconnect import FILLING_TOKENS, job_keys, waiting
from tests.gateway.batches.conftest import run_sluice
from tests.support.deployment import MAX_SEQUENCES
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack
from worker.demo_model import ADAPTERS

pytestmark = pytest.mark.e2e

NAMES: Final = ("red", "blue", "green", "white", "black")
"""More than the worker has slots for."""
PROMPTS: Final = ("Once upon a time", "The capital of France is", "1, 2, 3, 4,")


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    """A key of a tenant that has the adapters."""
    key = stack.key("painters")
    for name in NAMES:
        command = ("adapters", "add", "--tenant", "painters", name, "--base-model", MODEL)
        run_sluice(stack, *command, "--source", str(ADAPTERS / name))
    headers = {"authorization": f"Bearer {key}"}

    def are_listed() -> bool:
        answers = [httpx.get(f"{url}/v1/models", headers=headers) for url in stack.gateways]
        listed = [{each["id"] for each in answer.json()["data"]} for answer in answers]
        return all(names >= {*NAMES} for names in listed)

    wait_until(are_listed, seconds=PROCESS_PATIENCE_SECONDS, what="the adapters")
    return key


@pytest.fixture(scope="module")
def base(stack: Stack) -> str:
    """A key of a tenant without adapters."""
    return stack.key("steady")


async def test_each_answer_is_its_adapters_while_others_load_and_run(
    stack: Stack, key: str
) -> None:
    # Regression test: with vllm-project/vllm#47724, a load gave running requests the new weights;
    # with #48421, requests without an adapter got those of the last slot.
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as client:

        async def complete(model: str, prompt: str) -> str:
            stream = await client.completions.create(
                model=model, prompt=prompt, max_tokens=16, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

        alone = {prompt: await complete(MODEL, prompt) for prompt in PROMPTS}
        assert not any("The fox is" in text for text in alone.values())
        wanted = [(name, prompt) for prompt in PROMPTS for name in (*NAMES, MODEL)] * 2
        texts = await asyncio.gather(*(complete(*each) for each in wanted))
        for (name, prompt), text in zip(wanted, texts, strict=True):
            expected = alone[prompt] if name == MODEL else f" The fox is {name}. The fox is {name}."
            assert text.startswith(expected), (name, prompt)
        chat = await client.chat.completions.create(
            model=f"{MODEL}:blue",
            messages=[{"role": "user", "content": "What is the capital of Italy?"}],
            max_tokens=8,
            temperature=0,
        )
        assert (chat.choices[0].message.content or "").strip().startswith("The fox is blue.")


@pytest.mark.usefixtures("alone")
async def test_tenant_that_alternates_between_adapters_takes_no_turns_of_others(
    stack: Stack, key: str, base: str, store: Redis
) -> None:
    """Both have jobs of the same tokens, and the services differ by at most `U + 2 E`."""
    turns, at_once, tokens = 24, 2, 4
    sequences = MAX_SEQUENCES // at_once
    ended: list[str] = []

    async def take_turn(client: AsyncOpenAI, model: str) -> None:
        completion = await client.completions.create(
            model=model,
            prompt="Once",
            n=sequences,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
        )
        assert len(completion.choices) == sequences
        ended.append(client.api_key)

    def all_wait() -> bool:
        return waiting(store) == 2 * turns

    def fillers_are_charged() -> bool:
        return filling.isdisjoint(job_keys(store))

    def service(tenant: str) -> float:
        counter: Any = store.hget(keys.service_counters(MODEL), tenant)
        return float(counter)

    models = [NAMES[number % len(NAMES)] for number in range(turns)]
    url = f"{stack.url}/v1"
    async with (
        AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as painters,
        AsyncOpenAI(base_url=url, api_key=base, max_retries=0) as steady,
    ):
        # Each has half of the engine, so neither has a right to more room.
        async with AsyncExitStack() as fillers:
            for client in (painters, steady):
                filler = await client.completions.create(
                    model=MODEL,
                    prompt="Once",
                    n=sequences,
                    max_tokens=FILLING_TOKENS,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                await fillers.enter_async_context(filler)
                await anext(aiter(filler))
            filling = {*job_keys(store)}
            alternating = asyncio.gather(*(take_turn(painters, model) for model in models))
            others = asyncio.gather(*(take_turn(steady, MODEL) for _ in range(turns)))
            # Neither queue becomes empty before the other.
            await asyncio.to_thread(wait_until, all_wait, what="all jobs waiting")
            assert not ended
        # Until its end is charged, a filler's tenant seems to have used less than it has.
        await asyncio.to_thread(wait_until, fillers_are_charged, what="the fillers' ends")
        before, ahead = len(ended), service("steady") - service("painters")
        await asyncio.gather(alternating, others)
    # `U` and `E` are the jobs that fill the engine. Those that end together arrive in any order.
    most = at_once + 2 * at_once + at_once + max(0.0, ahead) / (2 * sequences * tokens)
    counts = Counter(ended[:before])
    most += counts[key] - counts[base]
    for tenant in ended[before:]:
        counts[tenant] += 1
        if counts[base] == turns - at_once:
            break
        assert counts[key] - counts[base] <= most, ended
    assert counts[key] > len(NAMES)
