"""Streams as a client receives them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from contract import keys, messages
from contract.messages import JobFinished
from contract.outcomes import FailureCode, FinishReason
from gateway.completions.settlement import SLICE_TOKENS
from gateway.records.limits import LimitName
from gateway.records.scopes import Scope
from tests.gateway.callers import caller
from tests.gateway.chats import HELLO, serve_chats
from tests.gateway.conftest import (
    KEEP_ALIVE_SECONDS,
    asking,
    complete,
    eventually,
    gateway_client,
    nothing_left,
    serve,
)
from tests.gateway.http_calls import connection, message_of, post
from tests.gateway.resuming import Reader, begun
from tests.support.events import DONE, parse_chunks, split_events, texts_by_choice
from tests.support.fake_worker import delta
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack, metric


async def streamed(client: httpx.AsyncClient, **parameters: Any) -> list[dict[str, Any]]:
    """Return all chunks of a stream."""
    response = await complete(client, stream=True, **parameters)
    assert response.status_code == 200, response.text
    return parse_chunks(response.content)


async def test_stream_has_the_headers_and_framing_of_server_sent_events(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "framed")
    request = asyncio.create_task(
        client.post("/v1/completions", json=asking(model="framed", stream=True))
    )
    await worker.conclude(await worker.claim_one(), "a", "b", "c")
    response = await request
    body = response.content
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = split_events(body)
    assert events[-1] == DONE
    first, second, final = (json.loads(event.removeprefix(b"data: ")) for event in events[:-1])
    fixed = ("id", "object", "created", "model", "system_fingerprint")
    assert len({tuple(chunk[name] for name in fixed) for chunk in (first, second, final)}) == 1
    assert first["object"] == "text_completion"
    assert first["id"].startswith("cmpl-")
    assert first["model"] == "framed"
    assert body.startswith(
        f'data: {{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},'
        f'"model":"framed","system_fingerprint":"{first["system_fingerprint"]}",'
        f'"choices":[{{"index":0,"text":{json.dumps(first["choices"][0]["text"])},'
        f'"logprobs":null,"finish_reason":null}}]}}\n\n'.encode()
    )
    assert "usage" not in first
    assert final["usage"]["completion_tokens"] == 3


async def test_tokens_arrive_one_by_one_as_they_are_generated(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "unhurried")
    async with begun(client, worker, "unhurried", "0") as (response, claim):
        reader = Reader(response)
        for number in range(1, 10):
            # The worker continues only when its last token has arrived.
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert len(await reader.read(number)) == number
            await worker.say(claim, str(number))
        await worker.conclude(claim, "10")
        events = await reader.read_all()
    chunks = [json.loads(data.removeprefix(b"data: ")) for data, _, _ in events[:-1]]
    assert texts_by_choice(chunks) == {0: "012345678910"}


async def test_stream_joins_to_the_text_of_the_whole_response(client: httpx.AsyncClient) -> None:
    parameters = {"prompt": ["One", "Two"], "n": 3, "max_tokens": 12, "stop": " the"}
    whole = (await complete(client, **parameters)).json()
    chunks = await streamed(client, **parameters)
    assert texts_by_choice(chunks) == {c["index"]: c["text"] for c in whole["choices"]}
    assert chunks[-1]["usage"] == whole["usage"]


async def test_several_prompts_times_n_interleave(client: httpx.AsyncClient) -> None:
    chunks = await streamed(client, prompt=["One", "Two", "Three"], n=3, max_tokens=6)
    texts = texts_by_choice(chunks)
    assert sorted(texts) == list(range(9))
    assert len(set(texts.values())) == 9
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)
    assert chunks[-1]["usage"]["completion_tokens"] == 54
    assert [chunk for chunk in chunks if "usage" in chunk] == chunks[-1:]


async def test_include_usage_gives_the_extra_chunk(client: httpx.AsyncClient) -> None:
    *others, extra = await streamed(client, max_tokens=3, stream_options={"include_usage": True})
    assert extra["choices"] == []
    assert extra["usage"]["completion_tokens"] == 3
    assert others
    assert {chunk["usage"] for chunk in others} == {None}


async def test_failure_before_the_first_token_has_an_error_status(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "failing")
    request = asyncio.create_task(complete(client, model="failing", stream=True))
    await worker.fail(await worker.claim_one(), FailureCode.ENGINE_ERROR)
    message_of(await request, status=503, kind="service_unavailable", code="engine_dead")


async def test_failure_after_the_first_token_is_an_event_and_done(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "failing")
    async with begun(client, worker, "failing", "a") as (response, claim):
        reader = Reader(response)
        await reader.read(1)
        await worker.fail(claim, FailureCode.ENGINE_ERROR)
        first, error, done = [data for data, _, _ in await reader.read_all()]
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "a"
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_dead"
    assert done == DONE


async def test_one_failed_prompt_cancels_the_others(
    client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "failing")
    request = asyncio.create_task(complete(client, model="failing", prompt=["a", "b", "c"]))
    first, second = await worker.claim(2)
    await worker.fail(first, FailureCode.ENGINE_ERROR)
    assert (await request).status_code == 503
    control = keys.control("failing", worker.name)
    await eventually(lambda: store.llen(control), what="the cancellation being sent")
    assert await store.lrange(control, 0, -1) == [second.job.id.encode()]
    await worker.drop(second)
    await eventually(lambda: nothing_left(store, "failing"), what="the third one being taken back")


async def read_keep_alives(parts: AsyncIterator[bytes], number: int, *, after: int = 0) -> bytes:
    """Read a stream until it has a number of keep-alives, after a number of events."""
    body = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while body.count(b"\n\n") < after or not body.endswith(b" " * (number - 1)):
            body += await anext(parts)
    return body


async def test_long_wait_commits_the_stream_and_sends_keep_alives(
    impatient_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "slow")
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with impatient_client.stream(
        "POST", "/v1/completions", json=asking(model="slow", stream=True)
    ) as response:
        # Nobody has claimed the job, so it is the wait that has committed the stream.
        assert loop.time() - began > 0.5
        assert response.status_code == 200
        claim = await worker.claim_one()
        parts = response.aiter_raw()
        body = await read_keep_alives(parts, 3)
        waited = loop.time() - began
        assert len(body.removeprefix(b"data: ")) <= waited / KEEP_ALIVE_SECONDS
        await worker.say(claim, "late", finish=FinishReason.STOP)
        await worker.finish(claim, tokens=1)
        body += b"".join([part async for part in parts])
    assert texts_by_choice(parse_chunks(body)) == {0: "late"}


async def test_keep_alives_fill_silence_between_tokens(
    impatient_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "slow")
    async with begun(impatient_client, worker, "slow", "a") as (response, claim):
        parts = response.aiter_raw()
        body = await read_keep_alives(parts, 3, after=1)
        await worker.say(claim, "b", finish=FinishReason.STOP)
        await worker.finish(claim, tokens=2)
        body += b"".join([part async for part in parts])
    assert texts_by_choice(parse_chunks(body)) == {0: "ab"}


async def test_failure_after_the_commit_is_an_event(
    impatient_client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "slow")
    async with impatient_client.stream(
        "POST", "/v1/completions", json=asking(model="slow", stream=True)
    ) as response:
        await worker.fail(await worker.claim_one(), FailureCode.INVALID_REQUEST, "No.")
        events = split_events(await response.aread())
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["message"] == "No."
    assert events[-1] == DONE


async def test_slow_reader_is_cut_off_without_affecting_other_streams(
    stack: Stack, key: str, client: httpx.AsyncClient, store: "Redis"
) -> None:
    worker = await serve(store, "wordy")
    frames, text = 1500, "x" * 10_000
    async with connection(stack.url) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(key, asking(model="wordy", stream=True)))
        slow = await worker.claim_one()
        beside = asyncio.create_task(complete(client, model="wordy", stream=True))
        quick = await worker.claim_one()
        for number in range(frames):
            await worker.send(
                slow.job.gateway, deltas=[delta(slow, text), delta(quick, f"{number} ")]
            )
            if number % 50 == 0:
                await asyncio.sleep(0.005)
        last = delta(quick, "end", finish_reason=FinishReason.STOP)
        end = JobFinished(quick.job.handle, 1, 3, 0, 0)
        await worker.send(quick.job.gateway, deltas=[last], finished=[end])

        response = await asyncio.wait_for(beside, PATIENCE_SECONDS)
        texts = texts_by_choice(parse_chunks(response.content))
        assert texts == {0: "".join(f"{number} " for number in range(frames)) + "end"}
        control = keys.control("wordy", worker.name)
        await eventually(lambda: store.llen(control), what="the cancellation being sent")
        assert await store.lrange(control, 0, -1) == [slow.job.id.encode()]

        writer.transport.resume_reading()  # type: ignore[attr-defined]
        rest = b""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not rest.endswith(b"\n\n\r\n0\r\n\r\n"):
                rest += await reader.read(1 << 20)
    assert rest.count(text.encode()) < frames
    assert b'"code":"slow_reader"' in rest[-500:]


async def test_frames_go_to_the_gateway_of_the_request(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, store: "Redis"
) -> None:
    async def reported() -> set[tuple[bytes, bytes]]:
        """Return the gateway and id of each frame with tokens. Gateways also send notices."""
        names = [key async for key in store.scan_iter(match="{g:gw-*}:replies")]
        entries: Any = {name: await store.xrange(name) for name in names}
        return {
            (name, entry_id)
            for name, found in entries.items()
            for entry_id, fields in found
            if messages.decode_frame(fields[b"f"]).deltas
        }

    # Requests of earlier tests have ended.
    await eventually(lambda: nothing_left(store, MODEL), what="the end of other streams")
    before = await reported()
    await streamed(client, max_tokens=5)
    after = await reported()
    # Gateways trim their streams, so a count may fall.
    (first,) = {name for name, _ in after - before}
    await streamed(other_client, max_tokens=5)
    (second,) = {name for name, _ in await reported() - before - after}
    assert first != second


@pytest.mark.parametrize("streams", [32, pytest.param(64, marks=pytest.mark.long)])
async def test_many_streams_of_many_tenants_over_two_gateways_keep_their_own_text(
    stack: Stack, store: "Redis", streams: int
) -> None:
    names = [f"tenant-{number}" for number in range(16)]
    tenant_keys = await asyncio.to_thread(lambda: [stack.key(name) for name in names])
    clients = [gateway_client(url, key) for url in stack.gateways[:2] for key in tenant_keys]

    async def run() -> list[dict[int, str]]:
        chunks = await asyncio.gather(
            *(
                streamed(
                    clients[number % len(clients)],
                    prompt=f"Stream {number}",
                    seed=number,
                    max_tokens=40,
                )
                for number in range(streams)
            )
        )
        return [texts_by_choice(each) for each in chunks]

    async def counted(name: str) -> float:
        return await asyncio.to_thread(metric, stack.worker_url(), f"sluice_worker_{name}_total")

    await eventually(lambda: nothing_left(store, MODEL), what="the end of other streams")
    steps, tokens = await counted("engine_steps"), await counted("completion_tokens")
    first = await run()
    second = await run()
    steps = await counted("engine_steps") - steps
    tokens = await counted("completion_tokens") - tokens
    await asyncio.gather(*(client.aclose() for client in clients))

    assert first == second
    assert len({texts[0] for texts in first}) == streams
    # In each step every running stream gets a token: a gateway had several at once.
    assert tokens > 2 * steps


OPEN_ENDED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
    "chats": ("/v1/chat/completions", {"messages": HELLO}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 32_000}),
    "responses": ("/v1/responses", {"input": "Hello"}),
}


async def test_limit_ends_an_open_ended_stream_in_the_form_of_its_api(
    stack: Stack, store: "Redis"
) -> None:
    most = len(OPEN_ENDED) * SLICE_TOKENS
    limits = {LimitName.COMPLETION_TOKENS_PER_MINUTE: most}
    worker, name = await serve_chats(store, context_window=65_536)

    async def ended(path: str, body: dict[str, Any]) -> list[bytes]:
        asked = {"model": name, "stream": True} | body
        answer = await client.post(path, json=asked, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 200, answer.text
        return answer.content.removesuffix(b"\n\n").split(b"\n\n")

    async with caller(stack, "open-ended", Scope.COMPLETIONS, limits=limits) as client:
        asked = [asyncio.create_task(ended(*each)) for each in OPEN_ENDED.values()]
        claims = [await worker.claim_one() for _ in asked]
        for claim in claims:
            # Almost all that is reserved, so that the next slice is due.
            used = worker.next_delta(claim, "a", tokens=SLICE_TOKENS - 96)
            await worker.send(claim.job.gateway, deltas=[used])
        streams = dict(zip(OPEN_ENDED, await asyncio.gather(*asked), strict=True))
    for claim in claims:
        await worker.drop(claim)
    message = r"The response has ended early\. .*completion tokens.* Please try again in [0-9.]+s\."
    for api in ("completions", "chats"):
        *_, error, done = streams[api]
        described = json.loads(error.removeprefix(b"data: "))["error"]
        assert (described["type"], described["code"]) == ("rate_limit_error", "tokens")
        assert re.fullmatch(message, described["message"])
        assert done == DONE
    kind, data = streams["messages"][-1].split(b"\n")
    described = json.loads(data.removeprefix(b"data: "))
    assert (kind, described["type"]) == (b"event: error", "error")
    assert described["error"]["type"] == "rate_limit_error"
    assert re.fullmatch(message, described["error"]["message"])
    kind, data = streams["responses"][-1].split(b"\n")
    response = json.loads(data.removeprefix(b"data: "))["response"]
    assert (kind, response["status"]) == (b"event: response.failed", "failed")
    assert response["error"]["code"] == "rate_limit_exceeded"
    assert re.fullmatch(message, response["error"]["message"])
    assert response["usage"]["output_tokens"] == SLICE_TOKENS - 96
