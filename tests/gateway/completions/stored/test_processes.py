"""Real gateways are killed and stopped, and their clients lose no tokens."""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract import keys
from gateway.records.usage_record import Outcome, UsageRecord, decode_usage
from tests.gateway.conftest import asking, eventually, gateway_client, nothing_left
from tests.gateway.resuming import Events, Reader, await_status, resume
from tests.support.events import numbered_events, texts_by_choice
from tests.support.stack import MODEL, Stack, metric, running_stack

TENANT = "acme"
PATH = "/v1/completions"
WORKERS = ("worker-1", "worker-2")
STEP_SECONDS = "0.03"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "prompt": "The first one"},
    "seeded": {"temperature": 1.0, "seed": 11, "prompt": "The second one"},
    "choices": {"temperature": 1.0, "seed": 5, "n": 2, "prompt": ["One", "Two"]},
    "logprobs": {"temperature": 0, "logprobs": 2, "echo": True, "prompt": "The fourth one"},
    "usage": {"temperature": 0, "stream_options": {"include_usage": True}},
}
MAX_TOKENS = 120

_names = itertools.count(1)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A worker, and one gateway that no test ends."""
    with running_stack() as stack:
        stack.start_gateway("steady")
        for name in WORKERS:
            stack.start_worker(
                name,
                SLUICE_ENGINE="scripted",
                SLUICE_SCRIPTED_STEP_SECONDS=STEP_SECONDS,
            )
        yield stack
        stack.close()


@pytest.fixture
async def store(stack: Stack) -> AsyncIterator["Redis"]:
    """A client of the deployment's Redis."""
    async with Redis.from_url(stack.redis.url) as client:
        yield client


@pytest.fixture
async def steady(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway that no test ends."""
    key = await asyncio.to_thread(stack.key, TENANT)
    async with gateway_client(stack.url, key) as client:
        yield client


class Mortal:
    """A gateway that the test ends."""

    def __init__(self, stack: Stack, client: httpx.AsyncClient, name: str) -> None:
        self.client = client
        self._stack = stack
        self._name = name

    async def kill(self) -> None:
        """End it by SIGKILL."""
        await asyncio.to_thread(self._stack.kill, self._name)

    async def stop(self) -> int:
        """End it by SIGTERM."""
        return await asyncio.to_thread(self._stack.stop, self._name)


@pytest.fixture
async def mortal(stack: Stack) -> AsyncIterator[Mortal]:
    """A separate gateway for the test, which drains for at most a second."""
    name = f"mortal-{next(_names)}"
    key = await asyncio.to_thread(stack.key, TENANT)
    url = await asyncio.to_thread(stack.start_gateway, name, SLUICE_DRAIN_TIMEOUT="1")
    async with gateway_client(url, key) as client:
        yield Mortal(stack, client, name)
    if name in stack.processes:
        stack.kill(name)


def chunks_of(events: Events) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream."""
    data = [line.removeprefix(b"data: ") for line, _, _ in events]
    assert data[-1] == b"[DONE]"
    return [json.loads(line) for line in data[:-1]]


def reported(events: Events) -> dict[str, Any]:
    """Return the content of a whole stream, whatever its chunks."""
    chunks = chunks_of(events)
    logprobs: defaultdict[int, list[Any]] = defaultdict(list)
    reasons: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        if choice["logprobs"] is not None:
            lists = choice["logprobs"]
            logprobs[choice["index"]] += zip(
                lists["tokens"], lists["token_logprobs"], lists["text_offset"], strict=True
            )
        reasons[choice["index"]] = choice["finish_reason"]
    return {
        "texts": texts_by_choice(chunks),
        "logprobs": logprobs,
        "reasons": reasons,
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
    }


async def undisturbed(client: httpx.AsyncClient, parameters: dict[str, Any]) -> Events:
    body = asking(stream=True, max_tokens=MAX_TOKENS, **parameters)
    async with client.stream("POST", PATH, json=body) as response:
        return await Reader(response).read_all()


async def records_of(store: "Redis", *request_ids: str) -> list[UsageRecord]:
    """Wait for the records of these requests, of which there must be one each."""

    async def all_records() -> list[UsageRecord]:
        entries: Any = await store.xrange(keys.usage(keys.bucket_of(TENANT)))
        records = [decode_usage(fields[b"u"]) for _, fields in entries]
        return [each for each in records if each.request_id.partition(".")[0] in request_ids]

    async def are_there() -> bool:
        return len(await all_records()) >= len(request_ids)

    await eventually(are_there, what="the settlement")
    records = await all_records()
    assert sorted(each.request_id for each in records) == sorted(request_ids), records
    return records


async def jobs_claimed(stack: Stack) -> float:
    """Return how many jobs the workers have claimed so far."""
    urls = [stack.worker_url(name) for name in WORKERS]
    return sum(
        [await asyncio.to_thread(metric, url, "sluice_worker_jobs_claimed_total") for url in urls]
    )


async def test_requests_of_a_killed_gateway_continue_exactly_at_another(
    stack: Stack, steady: httpx.AsyncClient, mortal: Mortal, store: "Redis"
) -> None:
    in_background = asking(temperature=0, max_tokens=MAX_TOKENS, prompt="In the background")
    only_once = asking(temperature=0, max_tokens=MAX_TOKENS, prompt="Only once")
    headers = {"idempotency-key": "only-once"}
    async with asyncio.TaskGroup() as tasks:
        streamed = {
            name: tasks.create_task(undisturbed(steady, each)) for name, each in CASES.items()
        }
        answers = [
            tasks.create_task(steady.post(PATH, json=body)) for body in (in_background, only_once)
        ]
    expected = {name: reported(stream.result()) for name, stream in streamed.items()}
    whole = [answer.result().json() for answer in answers]
    claimed = await jobs_claimed(stack)
    streamed_jobs = len(CASES) + 1  # One has two prompts.
    killed = asyncio.Event()
    have_begun = [asyncio.Event() for _ in CASES]

    async def disturbed(parameters: dict[str, Any], place: int) -> Events:
        body = asking(stream=True, max_tokens=MAX_TOKENS, **parameters)
        number = 4 + place
        async with mortal.client.stream("POST", PATH, json=body) as response:
            reader = Reader(response)
            first = await reader.read(number)
            have_begun[place].set()
            await killed.wait()
            del reader  # Its client stays until now.
        request_id = first[0][1]
        async with steady.stream(
            "GET",
            f"{PATH}/{request_id}",
            params={"stream": "true"},
            headers={"last-event-id": f"{request_id}:{number}"},
        ) as response:
            return first + await Reader(response).read_all()

    async def kill() -> tuple[str, httpx.Response]:
        """Start whole responses, kill the gateway when all of them run, and read them elsewhere."""
        for each in have_begun:
            await each.wait()
        once = asyncio.create_task(mortal.client.post(PATH, json=only_once, headers=headers))
        response = await mortal.client.post(PATH, json=in_background | {"background": True})

        async def have_both_begun() -> bool:
            return await jobs_claimed(stack) >= claimed + streamed_jobs + 2

        await eventually(have_both_begun, what="two more jobs being claimed")
        await mortal.kill()
        killed.set()
        with suppress(httpx.TransportError):
            # On a slow machine it may have finished just before.
            assert (await once).status_code == 200
        again = await steady.post(PATH, json=only_once, headers=headers)
        return response.json()["id"], again

    async with asyncio.TaskGroup() as tasks:
        streams = {
            name: tasks.create_task(disturbed(parameters, place))
            for place, (name, parameters) in enumerate(CASES.items())
        }
        killing = tasks.create_task(kill())
    background_id, again = killing.result()

    events = {name: stream.result() for name, stream in streams.items()}
    for name, stream in events.items():
        assert [number for _, _, number in stream] == list(range(1, len(stream) + 1)), name
        assert reported(stream) == expected[name], name
    assert again.status_code == 200, again.text
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["choices"] == whole[1]["choices"]
    others = (background_id, again.json()["id"])
    records = await records_of(store, *(stream[0][1] for stream in events.values()), *others)
    assert {each.outcome for each in records} == {Outcome.FINISHED}
    counts = [each.completion_tokens for each in records if each.request_id in others]
    assert counts == [MAX_TOKENS] * 2
    await await_status(steady, background_id, "completed")
    finished = await steady.get(f"{PATH}/{background_id}")
    assert finished.json()["choices"] == whole[0]["choices"]
    await eventually(lambda: nothing_left(store, MODEL), what="nothing being left")


async def test_requests_of_a_stopping_gateway_continue_at_another(
    steady: httpx.AsyncClient, mortal: Mortal, store: "Redis"
) -> None:
    parameters = {"temperature": 0, "prompt": "Cut in the middle", "max_tokens": 250}
    body = asking(temperature=0, max_tokens=250, prompt="A long one")
    response = await mortal.client.post(PATH, json=body | {"background": True})
    background_id = response.json()["id"]
    expecting = asyncio.create_task(steady.post(PATH, json=asking(**parameters)))
    streamed = asking(stream=True, **parameters)
    async with mortal.client.stream("POST", PATH, json=streamed) as response:
        reader = Reader(response)
        await reader.read(3)
        stopping = asyncio.create_task(mortal.stop())
        cut = await reader.read_all()
    assert await stopping == 0
    assert b"gateway_stopping" in cut[-2][0]
    got = [event for event in cut if b'"error"' not in event[0] and b"[DONE]" not in event[0]]

    rest = await resume(steady, got[0][1], len(got))
    assert rest.status_code == 200, rest.text
    events = got + numbered_events(rest.content)

    expected = (await expecting).json()
    assert texts_by_choice(chunks_of(events))[0] == expected["choices"][0]["text"]
    (record,) = await records_of(store, background_id)
    assert (record.outcome, record.completion_tokens) == (Outcome.FINISHED, 250)
