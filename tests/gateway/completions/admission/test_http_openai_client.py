"""OpenAI's client library, with resumption and background responses."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, ConflictError
from redis.asyncio import Redis

from contract.messages import CallPiece
from contract.outcomes import FinishReason
from tests.gateway.chats import chatting, serve_chats, tool
from tests.gateway.conftest import asking
from tests.support.stack import MODEL, Stack

ASKED = asking(max_tokens=12)


@pytest.fixture
async def openai(stack: Stack, key: str) -> AsyncIterator[AsyncOpenAI]:
    """A client of the first gateway that does not retry requests."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as client:
        yield client


async def streamed_text(openai: AsyncOpenAI, **headers: str) -> str:
    """Return the text of a stream as the library joins it."""
    stream = await openai.completions.create(**ASKED, stream=True, extra_headers=headers)
    return "".join([choice.text async for chunk in stream for choice in chunk.choices])


async def test_stream_is_read_as_usual(openai: AsyncOpenAI) -> None:
    whole = await openai.completions.create(**ASKED)
    assert await streamed_text(openai) == whole.choices[0].text


async def test_stream_resumes_after_the_last_event_id(openai: AsyncOpenAI) -> None:
    whole = await openai.completions.create(**ASKED)
    headers = {"x-event-ids": "true"}
    raw = await openai.completions.with_raw_response.create(
        **ASKED, stream=True, extra_headers=headers
    )
    body = b"".join([part async for part in raw.http_response.aiter_bytes()])
    events = body.split(b"\n\n")
    last_event_id = events[4].split(b"\nid: ")[1].decode()
    rest = await streamed_text(openai, **{"last-event-id": last_event_id})
    assert rest
    assert whole.choices[0].text.endswith(rest)
    assert rest != whole.choices[0].text


async def test_background_completion_is_started_and_fetched(openai: AsyncOpenAI) -> None:
    started = await openai.completions.create(**ASKED, extra_body={"background": True})
    answer = await openai.get(f"/completions/{started.id}?stream=true", cast_to=httpx.Response)
    assert answer.text.count("data: ") > 1
    whole = await openai.get(f"/completions/{started.id}", cast_to=httpx.Response)
    assert whole.json()["choices"][0]["finish_reason"] == "length"


async def test_idempotency_key_gives_the_same_response(openai: AsyncOpenAI) -> None:
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    first = await openai.completions.create(**ASKED, extra_headers=headers)
    again = await openai.completions.create(**ASKED, extra_headers=headers)
    assert again == first
    with pytest.raises(ConflictError, match="Idempotency-Key"):
        await openai.completions.create(model=MODEL, prompt="Other", extra_headers=headers)


async def test_chat_is_returned_whole_and_as_a_stream(openai: AsyncOpenAI) -> None:
    whole = (await openai.chat.completions.create(**chatting())).choices[0]
    stream = await openai.chat.completions.create(**chatting(), stream=True)
    deltas = [choice.delta async for chunk in stream for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content


async def test_tool_calls_are_joined(openai: AsyncOpenAI, store: "Redis") -> None:
    worker, name = await serve_chats(store)

    async def talk() -> None:
        claim = await worker.claim_one()
        for call in (CallPiece(0, "add", '{"a":'), CallPiece(0, "", "1}")):
            said = worker.next_delta(claim, "", calls=[call])
            await worker.send(claim.job.gateway, deltas=[said])
        last = worker.next_delta(claim, "", finish_reason=FinishReason.STOP)
        await worker.send(claim.job.gateway, deltas=[last])
        await worker.finish(claim)

    talking = asyncio.create_task(talk())
    async with openai.chat.completions.stream(**chatting(name, tools=[tool()])) as stream:
        (choice,) = (await stream.get_final_completion()).choices
    await talking
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == (
        *("function", "add"),
        '{"a":1}',
    )


async def test_wrong_chat_is_refused_by_name(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="must") as caught:
        await openai.chat.completions.create(model=MODEL, messages=[])
    assert caught.value.param == "messages"
