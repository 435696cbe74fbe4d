"""Three models on two hosts, one of which is killed during a swap: no request is lost."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import asking, eventually
from tests.support.events import KEEP_ALIVES, parse_chunks, texts_by_choice
from tests.support.stack import CHECKPOINT, MODEL, Stack

MODELS = ("first", "second", "third")
HOSTS = ("host-1", "host-2")
STREAMS = 4
"""For each model in a burst, of which half run at once."""
SWAPPING = "Swapping from"


@pytest.fixture
async def hosts(stack: Stack, tmp_path: Path) -> AsyncIterator[tuple[str, ...]]:
    """Options of two running hosts of three models with the scripted engine."""
    shared = {
        "engine": "scripted",
        "model_path": str(CHECKPOINT),
        "scripted_step_seconds": 0.01,
        "max_sequences": STREAMS // 2,
        "drain_seconds": 0.2,
    }
    models = tmp_path / "models.json"
    models.write_text(json.dumps([shared | {"model_name": name} for name in MODELS]))
    # One of the two other models sleeps in each host, so some swaps wake a worker.
    bounds = ("--least-seconds=0.5", "--longest-wait-seconds=2", "--sleeping-models=1")
    options = (f"--models={models}", *bounds)
    for name in HOSTS:
        stack.launch_host(name, *options)
    yield options
    for name in HOSTS:
        await asyncio.to_thread(stack.stop, name)


async def _stream(client: httpx.AsyncClient, model: str, seed: int) -> bytes:
    body = asking(model=model, seed=seed, max_tokens=40, ignore_eos=True, stream=True)
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.content
    return response.content


@pytest.mark.slow
async def test_bursts_are_answered_although_a_host_is_killed_during_a_swap(
    stack: Stack, impatient_client: httpx.AsyncClient, hosts: tuple[str, ...]
) -> None:
    async def are_known() -> bool:
        listed = (await impatient_client.get("/v1/models")).json()["data"]
        return {*MODELS} <= {each["id"] for each in listed}

    await eventually(are_known, what="each model being started once")
    seeds = range(STREAMS)
    expected = [
        texts_by_choice(parse_chunks(await _stream(impatient_client, MODEL, seed)))
        for seed in seeds
    ]
    swaps = {name: stack.log(name).count(SWAPPING) for name in HOSTS}
    burst = [
        asyncio.create_task(_stream(impatient_client, model, seed))
        for model in MODELS
        for seed in seeds
    ]
    victim = ""

    def swaps_again() -> bool:
        nonlocal victim
        begun = [name for name in HOSTS if stack.log(name).count(SWAPPING) > swaps[name]]
        victim = begun[0] if begun else ""
        return bool(victim)

    await eventually(swaps_again, what="a swap")
    stack.kill(victim)
    stack.launch_host(victim, *hosts)
    answers = await asyncio.gather(*burst)
    texts = [texts_by_choice(parse_chunks(answer)) for answer in answers]
    assert texts == expected * len(MODELS)
    # The model without a worker, at least, was held.
    assert any(KEEP_ALIVES.search(answer) for answer in answers)
