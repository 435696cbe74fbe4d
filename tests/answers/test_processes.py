"""Real gateways are killed and stopped, and their clients lose nothing."""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract import keys
from gateway.accounts.usage import Outcome, UsageRecord, decode_usage
from tests.gateway.coming_back import Events, Reader, await_status, go_on
from tests.gateway.conftest import asking, eventually, gateway_client, nothing_left
from tests.support.events import numbered_events, texts_by_choice
from tests.support.stack import MODEL, Stack, running_stack

TENANT = "acme"
STEP_SECONDS = "0.03"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "prompt": "The first one"},
    "seeded": {"temperature": 1.0, "seed": 11, "prompt": "The second one"},
    "choices": {"temperature": 1.0, "seed": 5, "n": 2, "prompt": ["One", "Two"]},
    "logprobs": {"temperature": 0, "logprobs": 2, "echo": True, "prompt": "The fourth one"},
    "usage": {"temperature": 0, "stream_options": {"include_usage": True}},
}
MAX_TOKENS = 60

_names = itertools.count(1)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A worker, and one gateway that stays."""
    with running_stack() as stack:
        stack.start_gateway("steady")
        for number in (1, 2):
            stack.start_worker(
                f"worker-{number}",
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
    """A client of the gateway that stays."""
    key = await asyncio.to_thread(stack.key, TENANT)
    async with gateway_client(stack.url, key) as client:
        yield client


class Mortal:
    """A gateway that will be gone before the test is over."""

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
    """A gateway of the test's own, which has a second to finish when it is stopped."""
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


def told(events: Events) -> dict[str, Any]:
    """Return what a whole stream says, in however many chunks it said it."""
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
    async with client.stream("POST", "/v1/completions", json=body) as response:
        return await Reader(response).read_all()


async def records_of(store: "Redis", *request_ids: str) -> list[UsageRecord]:
    """Wait for the records of these requests, of which there must be one each."""

    async def all_records() -> list[UsageRecord]:
        entries: Any = await store.xrange(keys.usage(keys.bucket_of(TENANT)))
        records = [decode_usage(fields[b"u"]) for _, fields in entries]
        return [each for each in records if each.request_id.partition(".")[0] in request_ids]

    async def are_there() -> bool:
        return len(await all_records()) >= len(request_ids)

    await eventually(are_there, seconds=20, what="the settlement")
    records = await all_records()
    assert sorted(each.request_id for each in records) == sorted(request_ids), records
    return records


async def test_streams_of_a_killed_gateway_go_on_at_another_one_exactly(
    steady: httpx.AsyncClient, mortal: Mortal, store: "Redis"
) -> None:
    expected = {
        name: told(await undisturbed(steady, parameters)) for name, parameters in CASES.items()
    }
    killed = asyncio.Event()

    async def disturbed(parameters: dict[str, Any], number: int) -> Events:
        body = asking(stream=True, max_tokens=MAX_TOKENS, **parameters)
        async with mortal.client.stream("POST", "/v1/completions", json=body) as response:
            reader = Reader(response)
            first = await reader.read(number)
            await killed.wait()
            del reader  # It is its client that stays until now.
        request_id = first[0][1]
        async with steady.stream(
            "GET",
            f"/v1/completions/{request_id}",
            params={"stream": "true"},
            headers={"last-event-id": f"{request_id}:{number}"},
        ) as response:
            return first + await Reader(response).read_all()

    async def kill() -> None:
        await asyncio.sleep(0.8)
        await mortal.kill()
        killed.set()

    async with asyncio.TaskGroup() as tasks:
        streams = {
            name: tasks.create_task(disturbed(parameters, 4 + place))
            for place, (name, parameters) in enumerate(CASES.items())
        }
        tasks.create_task(kill())

    events = {name: stream.result() for name, stream in streams.items()}
    for name, stream in events.items():
        assert [number for _, _, number in stream] == list(range(1, len(stream) + 1)), name
        assert told(stream) == expected[name], name
    records = await records_of(store, *(stream[0][1] for stream in events.values()))
    assert {each.outcome for each in records} == {Outcome.FINISHED}
    await eventually(lambda: nothing_left(store, MODEL), seconds=10, what="nothing being left")


async def test_background_answer_of_a_killed_gateway_is_finished_without_anybody(
    steady: httpx.AsyncClient, mortal: Mortal, store: "Redis"
) -> None:
    body = asking(temperature=0, max_tokens=MAX_TOKENS, prompt="In the background")
    whole = (await steady.post("/v1/completions", json=body)).json()["choices"]
    response = await mortal.client.post("/v1/completions", json=body | {"background": True})
    request_id = response.json()["id"]
    await asyncio.sleep(0.7)
    await mortal.kill()

    (record,) = await records_of(store, request_id)

    assert (record.outcome, record.completion_tokens) == (Outcome.FINISHED, MAX_TOKENS)
    await await_status(steady, request_id, "completed")
    again = await steady.get(f"/v1/completions/{request_id}")
    assert again.json()["choices"] == whole


async def test_background_answer_of_a_gateway_that_stops_goes_on_elsewhere(
    steady: httpx.AsyncClient, mortal: Mortal, store: "Redis"
) -> None:
    body = asking(temperature=0, max_tokens=250, prompt="A long one")
    response = await mortal.client.post("/v1/completions", json=body | {"background": True})
    request_id = response.json()["id"]
    await asyncio.sleep(0.5)

    assert await mortal.stop() == 0

    (record,) = await records_of(store, request_id)
    assert (record.outcome, record.completion_tokens) == (Outcome.FINISHED, 250)


async def test_stream_of_a_gateway_that_stops_can_be_continued(
    steady: httpx.AsyncClient, mortal: Mortal, store: "Redis"
) -> None:
    parameters = {"temperature": 0, "prompt": "Cut in the middle", "max_tokens": 250}
    body = asking(stream=True, **parameters)
    async with mortal.client.stream("POST", "/v1/completions", json=body) as response:
        reader = Reader(response)
        await reader.read(3)
        stopping = asyncio.create_task(mortal.stop())
        cut = await reader.read_all()
    assert await stopping == 0
    assert b"gateway_stopping" in cut[-2][0]
    got = [event for event in cut if b'"error"' not in event[0] and b"[DONE]" not in event[0]]

    rest = await go_on(steady, got[0][1], len(got))
    assert rest.status_code == 200, rest.text
    events = got + numbered_events(rest.content)

    expected = await steady.post("/v1/completions", json=asking(**parameters))
    assert texts_by_choice(chunks_of(events))[0] == expected.json()["choices"][0]["text"]


async def test_idempotent_request_of_a_killed_gateway_is_answered_by_another_one(
    steady: httpx.AsyncClient, mortal: Mortal, store: "Redis"
) -> None:
    body = asking(temperature=0, max_tokens=MAX_TOKENS, prompt="Only once")
    headers = {"idempotency-key": "only-once"}
    first = asyncio.create_task(mortal.client.post("/v1/completions", json=body, headers=headers))
    await asyncio.sleep(0.7)
    await mortal.kill()
    with pytest.raises(httpx.TransportError):
        await first

    again = await steady.post("/v1/completions", json=body, headers=headers)

    assert again.status_code == 200, again.text
    assert again.headers["idempotent-replayed"] == "true"
    whole = await steady.post("/v1/completions", json=body)
    assert again.json()["choices"] == whole.json()["choices"]
    (record,) = await records_of(store, again.json()["id"])
    assert (record.outcome, record.completion_tokens) == (Outcome.FINISHED, MAX_TOKENS)
