"""Parts of a choice beside its text: suffix, token ids, tool calls, padding."""

import json
from typing import Any

from contract.dialect import Dialect
from contract.messages import TokenLogprob
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.sse import BLOCK_BYTES, ChunkRenderer
from gateway.dialects.request import Tool, ToolMode, ToolUse
from tests.gateway.replies import LENGTH, STOP, completion, ended, inbox, said
from tests.support.cases import all_cases
from tests.support.events import parse_chunks, split_events, texts_by_choice


def streamed(answer: Completion, *replies: Reply) -> list[dict[str, Any]]:
    """Return the chunks of replies that arrive one by one."""
    renderer = ChunkRenderer(answer)
    return parse_chunks(b"".join(renderer.render([reply]) for reply in replies))


async def whole(answer: Completion, *replies: Reply) -> dict[str, Any]:
    """Return the body for some replies."""
    body: dict[str, Any] = json.loads((await collect(answer, inbox(*replies))).content)
    return body


TWO = [said("a"), said("b", choice=1, finish=LENGTH), said("c", finish=STOP), ended()]


@all_cases("dialect", Dialect)
async def test_conflict_09_suffix_follows_every_choice_in_mistralrs_only(
    dialect: Dialect,
) -> None:
    answer = completion(dialect=dialect, n=2, suffix="!\n", prompt_texts=["P "])
    end = "!\n" if dialect is Dialect.MISTRALRS else ""
    expected = {0: "P ac" + end, 1: "P b" + end}
    assert texts_by_choice(streamed(answer, *TWO)) == expected
    body = await whole(answer, *TWO)
    assert {choice["index"]: choice["text"] for choice in body["choices"]} == expected


def test_suffix_comes_once_and_with_the_finish_reason() -> None:
    answer = completion(dialect=Dialect.MISTRALRS, suffix="!")
    chunks = streamed(answer, said("a"), said("b"), said("", finish=STOP), ended())
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "!"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_token_ids_come_with_their_text() -> None:
    answer = completion(n=2, return_token_ids=True, prompt_token_ids=[[1, 2]])
    replies = [
        said("a", token_ids=[10]),
        said("", token_ids=[11]),
        said("b", choice=1, token_ids=[20], finish=STOP),
        said("c", token_ids=[12, 13], finish=STOP),
        ended(),
    ]
    chunks = streamed(answer, *replies)
    reported = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["index"], choice["token_ids"]) for choice in reported] == [
        (0, [10]),
        (0, [11]),
        (1, [20]),
        (0, [12, 13]),
    ]
    assert [choice.get("prompt_token_ids") for choice in reported] == [[1, 2], None, [1, 2], None]
    first, second = (await whole(answer, *replies))["choices"]
    assert (first["token_ids"], first["prompt_token_ids"]) == ([10, 11, 12, 13], [1, 2])
    assert (second["token_ids"], second["prompt_token_ids"]) == ([20], [1, 2])


async def test_token_ids_of_log_probabilities_are_returned_on_request() -> None:
    replies = [
        said(
            "ab",
            token_ids=[10, 11],
            logprobs=[TokenLogprob("a", -1.0, 0), TokenLogprob("b", -1.0, 1)],
        ),
        said("c", token_ids=[12], logprobs=[TokenLogprob("c", -1.0, 2)], finish=STOP),
        ended(),
    ]
    asked = completion(dialect=Dialect.FIREWORKS, logprobs=0, return_token_ids=True)
    assert [
        chunk["choices"][0]["logprobs"]["token_ids"] for chunk in streamed(asked, *replies)
    ] == [[10, 11], [12]]
    assert (await whole(asked, *replies))["choices"][0]["logprobs"]["token_ids"] == [10, 11, 12]
    plain = completion(dialect=Dialect.FIREWORKS, logprobs=0)
    assert "token_ids" not in (await whole(plain, *replies))["choices"][0]["logprobs"]


async def test_tokens_that_best_of_discarded_are_counted_separately() -> None:
    replies = [said("ab", token_ids=[1, 2], finish=STOP), ended(tokens=7)]
    body = await whole(completion(best_of=3), *replies)
    assert body["usage"]["completion_tokens"] == 7
    assert body["usage"]["completion_tokens_details"] == {"best_of_tokens": 5}
    assert "completion_tokens_details" not in (await whole(completion(), *replies))["usage"]


CALL_F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
USE = ToolUse([Tool("f", {}, is_strict=False)], ToolMode.AUTO)


async def test_tool_calls_come_with_the_end_of_their_choice() -> None:
    answer = completion(n=2, tool_use=USE, prompt_texts=[CALL_G])
    text = f"x {CALL_F}{CALL_G}"
    replies = [
        said(text[:20]),
        said("plain", choice=1, finish=STOP),
        said(text[20:-3]),
        said(text[-3:], finish=STOP),
        ended(),
    ]
    first, plain, second, final = (chunk["choices"][0] for chunk in streamed(answer, *replies))
    assert "tool_calls" not in first
    assert "tool_calls" not in second
    assert (plain["finish_reason"], "tool_calls" in plain) == ("stop", False)
    assert final["text"] == text[-3:]
    assert final["finish_reason"] == "tool_calls"
    ids = [call.pop("id") for call in final["tool_calls"]]
    assert len({*ids}) == 2
    assert all(name.startswith("call_") for name in ids)
    assert final["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    called, other = (await whole(answer, *replies))["choices"]
    assert called["text"] == CALL_G + text
    assert [call["function"]["name"] for call in called["tool_calls"]] == ["f", "g"]
    assert (called["finish_reason"], other["finish_reason"]) == ("tool_calls", "stop")
    assert "tool_calls" not in other


async def test_choice_that_was_cut_off_keeps_its_finish_reason() -> None:
    replies = [said(CALL_F + " and", finish=LENGTH), ended()]
    (choice,) = (await whole(completion(tool_use=USE), *replies))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["tool_calls"][0]["function"]["name"] == "f"


async def test_text_is_not_searched_for_calls_without_tools() -> None:
    replies = [said(CALL_F, finish=STOP), ended()]
    (choice,) = (await whole(completion(tool_use=None), *replies))["choices"]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice


@all_cases("text", ["", "a", "a word", '"\n\x00', "😀" * 5, "x" * 100])
def test_chunks_are_padded_to_the_same_length(text: str) -> None:
    renderer = ChunkRenderer(completion(include_obfuscation=True, include_usage=True))
    body = renderer.render([said(text + "."), said(text, finish=STOP), ended()])
    *events, _ = split_events(body)
    assert len(events) == 3
    for event in events:
        assert (len(event) + len("\n\n")) % BLOCK_BYTES == 0
        assert json.loads(event.removeprefix(b"data: "))["obfuscation"] is not None


def test_chunks_of_short_texts_do_not_differ_in_length() -> None:
    renderer = ChunkRenderer(completion(include_obfuscation=True))
    lengths = {len(renderer.render([said(text)])) for text in ("a", "word", "longer word")}
    assert len(lengths) == 1


def test_chunks_are_padded_only_on_request() -> None:
    assert all("obfuscation" not in chunk for chunk in streamed(completion(n=2), *TWO))
