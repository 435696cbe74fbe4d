"""Log-probabilities and ids of a chat's tokens, without those of hidden reasoning."""

import json
from typing import Any

from contract.dialect import Dialect
from contract.messages import CallPiece, TokenLogprob
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.sse import ChunkRenderer
from gateway.dialects.request import ChatRequest, Tool, ToolMode, ToolUse
from tests.gateway.replies import LENGTH, STOP, completion, ended, inbox, said
from tests.support.cases import all_cases
from tests.support.events import parse_chunks

HIDING = ChatRequest(messages=[], shows_reasoning=False)
CHAT = ChatRequest(messages=[])
USE = ToolUse([Tool("f", {}, is_strict=False)], ToolMode.AUTO)


def streamed(*replies: Reply, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of the chunks of replies that arrive one by one."""
    renderer = ChunkRenderer(completion(**({"chat": CHAT} | fields)))
    chunks = parse_chunks(b"".join(renderer.render([reply]) for reply in replies))
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def whole(*replies: Reply, **fields: Any) -> dict[str, Any]:
    """Return the choice of the whole response."""
    answer = completion(**({"chat": CHAT} | fields))
    body = json.loads((await collect(answer, inbox(*replies))).content)
    (choice,) = body["choices"]
    return dict(choice)


def scored(token: str, logprob: float = -0.5) -> TokenLogprob:
    """Make a token that is the likeliest one."""
    return TokenLogprob(token, logprob, 0, [(token, logprob), ("z", -3.0)], [9, 8])


def tokens(choice: dict[str, Any]) -> list[str]:
    """Return the tokens that have log-probabilities in a choice."""
    return [entry["token"] for entry in (choice["logprobs"] or {"content": []})["content"]]


async def test_logprobs_are_one_object_for_each_token() -> None:
    top = [("é", -0.5), ("\ufffd", -1.0), ("x", float("-inf"))]
    replies = [
        said("é", logprobs=[TokenLogprob("é", -0.5, 0, top, [9, 8, 7], parts={8: b"\xe2"})]),
        said("", finish=STOP, logprobs=[TokenLogprob("</s>", float("-inf"), 1, top, [9, 8, 7])]),
        ended(),
    ]
    fields = {"logprobs": 3, "dialect": Dialect.LLAMACPP}
    expected = {
        "token": "é",
        "logprob": -0.5,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
            {"token": "\ufffd", "logprob": -1.0, "bytes": [0xE2]},
            {"token": "x", "logprob": -9999.0, "bytes": [0x78]},
        ],
    }
    role, content, final = streamed(*replies, **fields)
    assert role["logprobs"] is None
    assert content["logprobs"] == {"content": [expected], "refusal": None}
    assert final["logprobs"]["content"][0]["logprob"] == -9999.0
    assert (await whole(*replies, **fields))["logprobs"] == {
        "content": [expected, *final["logprobs"]["content"]],
        "refusal": None,
    }


@all_cases("asked", [0, 1, 2, 5])
async def test_no_more_alternatives_are_returned_than_requested(asked: int) -> None:
    top = [("a", -0.5), ("b", -1.0), ("c", -2.0)]
    reply = said("c", finish=STOP, logprobs=[TokenLogprob("c", -2.0, 0, top, [7, 8, 9])])
    choice = await whole(reply, ended(), logprobs=asked)
    (entry,) = choice["logprobs"]["content"]
    assert [each["token"] for each in entry["top_logprobs"]] == ["a", "b", "c"][:asked]


async def test_logprobs_are_returned_only_on_request() -> None:
    reply = said("c", finish=STOP, logprobs=[scored("c")])
    assert (await whole(reply, ended()))["logprobs"] is None
    empty = await whole(said("", finish=LENGTH), ended(tokens=0), logprobs=0)
    assert empty["logprobs"] == {"content": [], "refusal": None}


async def test_tokens_are_returned_once_with_their_first_content() -> None:
    replies = [
        said(
            "b",
            reasoning="a",
            reasoning_tokens=1,
            token_ids=[1, 2],
            logprobs=[scored("a"), scored("b")],
        ),
        said("", token_ids=[3], logprobs=[scored("<tool_call>")]),
        said("", calls=[CallPiece(0, "f", "{}")], token_ids=[4], logprobs=[scored("{}")]),
        said("c", token_ids=[5, 6], finish=STOP, logprobs=[scored("c"), scored("</s>")]),
        ended(),
    ]
    fields = {"logprobs": 0, "return_token_ids": True, "tool_use": USE}
    fields |= {"dialect": Dialect.LLAMACPP}
    reported = streamed(*replies, **fields)
    assert [(each["delta"], each.get("token_ids"), tokens(each)) for each in reported] == [
        ({"role": "assistant", "content": ""}, None, []),
        ({"reasoning_content": "a"}, [1, 2], ["a", "b"]),
        ({"content": "b"}, None, []),
        ({}, [3], ["<tool_call>"]),
        ({"tool_calls": reported[4]["delta"]["tool_calls"]}, [4], ["{}"]),
        ({"content": "c"}, [5, 6], ["c", "</s>"]),
        ({}, None, []),
    ]
    assert [each.get("prompt_token_ids") for each in reported] == [[5, 6, 7], *[None] * 6]
    choice = await whole(*replies, **fields)
    assert choice["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert choice["prompt_token_ids"] == [5, 6, 7]


async def test_tokens_of_dialect_openai_join_to_the_content() -> None:
    replies = [
        said("", token_ids=[1, 2], logprobs=[scored("<think>"), scored("a")]),
        said("b", reasoning="a", reasoning_tokens=2, token_ids=[3], logprobs=[scored("\n\nb")]),
        said("c", token_ids=[4, 5], logprobs=[scored("c"), scored("")]),
        said("é", token_ids=[6, 7], logprobs=[scored("é"), scored("</s>")]),
        said("", token_ids=[8, 9], logprobs=[scored("d"), scored("ef")]),
        said("d", token_ids=[4], logprobs=[scored("<tool_call>")]),
        said("ef", calls=[CallPiece(0, "f", "{}")], token_ids=[5], logprobs=[scored("{}")]),
        said("g", token_ids=[6, 7], finish=STOP, logprobs=[scored("gh"), scored("</s>")]),
        ended(),
    ]
    for chat in (CHAT, HIDING):
        fields = {"logprobs": 0, "tool_use": USE, "chat": chat}
        found = [each for part in streamed(*replies, **fields) for each in tokens(part)]
        assert found == ["b", "c", "", "é", "d", "ef", "g"]
        choice = await whole(*replies, **fields)
        assert (tokens(choice), "".join(found)) == (found, choice["message"]["content"])


async def test_dialect_vllm_has_the_prompt_ids_beside_the_choices() -> None:
    answer = completion(chat=CHAT, dialect=Dialect.VLLM, n=2, return_token_ids=True)
    replies = [said("a", choice=1, finish=STOP), said("b", finish=STOP), ended()]
    chunks = parse_chunks(ChunkRenderer(answer).render(replies))
    openings = [chunk for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert [chunk for chunk in chunks if "prompt_token_ids" in chunk] == openings
    assert [chunk["prompt_token_ids"] for chunk in openings] == [[5, 6, 7]] * 2

    body = json.loads((await collect(answer, inbox(*replies))).content)
    assert body["prompt_token_ids"] == [5, 6, 7]
    for choice in (*body["choices"], *(chunk["choices"][0] for chunk in chunks)):
        assert "prompt_token_ids" not in choice


async def test_tokens_are_named_by_their_ids() -> None:
    entry = TokenLogprob("é", -1.0, 0, [("x", -0.5), ("é", -1.0)], [8, 9])
    replies = [said("é", token_ids=[9], logprobs=[entry], finish=STOP), ended()]
    fields = {"logprobs": 2, "names_tokens_by_id": True}
    [whole_token] = (await whole(*replies, **fields))["logprobs"]["content"]
    assert whole_token == streamed(*replies, **fields)[1]["logprobs"]["content"][0]
    assert (whole_token["token"], whole_token["bytes"]) == ("token_id:9", list("é".encode()))
    assert [(each["token"], each["logprob"]) for each in whole_token["top_logprobs"]] == [
        ("token_id:8", -0.5),
        ("token_id:9", -1.0),
    ]


def scored_by_id(text: str, *token_ids: int, **fields: Any) -> Reply:
    """Make a delta whose log-probabilities name tokens by their ids."""
    logprobs = [scored(str(token)) for token in token_ids]
    return said(text, token_ids=token_ids, logprobs=logprobs, **fields)


HIDDEN = [
    scored_by_id("", 1, 2, reasoning="se", reasoning_tokens=1),
    scored_by_id("", 3, reasoning="cret", reasoning_tokens=2),
    scored_by_id("", 4, reasoning_tokens=1),
    scored_by_id("", 5),
]


@all_cases(
    ("rest", "ids", "parts"),
    [
        ([scored_by_id("no", 6, 7)], [5, 6, 7, 9], ["content"]),
        ([scored_by_id("", 6, calls=[CallPiece(0, "f", "{}")])], [5, 6, 9], ["tool_calls"]),
        ([], [], []),
    ],
    ids=["content", "call", "nothing"],
)
async def test_hidden_reasoning_shows_in_nothing(
    rest: list[Reply], ids: list[int], parts: list[str]
) -> None:
    replies = [*HIDDEN, *rest, scored_by_id("", 9, finish=STOP), ended(tokens=9)]
    fields = {"chat": HIDING, "logprobs": 1, "return_token_ids": True, "tool_use": USE}
    fields |= {"dialect": Dialect.LLAMACPP}
    reported = streamed(*replies, **fields)

    assert [token for each in reported for token in each.get("token_ids", [])] == ids
    assert [token for each in reported for token in tokens(each)] == [str(token) for token in ids]
    assert [name for each in reported[1:] for name in each["delta"]] == parts

    choice = await whole(*replies, **fields)
    assert choice["token_ids"] == ids
    assert tokens(choice) == [str(token) for token in ids]
    assert "reasoning_content" not in choice["message"]
    assert "cret" not in json.dumps([reported, choice])


def test_hidden_reasoning_does_not_show_because_of_a_blank_line_before_it() -> None:
    replies = [
        scored_by_id("\n", 1, reasoning_tokens=1),
        scored_by_id("", 2),
        scored_by_id("", 3, reasoning="secret", reasoning_tokens=2),
        scored_by_id("no", 4, finish=STOP),
        ended(),
    ]
    for fields in ({}, {"return_token_ids": True}):
        reported = streamed(*replies, chat=HIDING, **fields)
        assert "".join(each["delta"].get("content", "") for each in reported) == "\nno"
        assert "secret" not in json.dumps(reported)
        ids = [token for each in reported for token in each.get("token_ids", [])]
        assert ids == ([4] if fields else [])


async def test_hidden_reasoning_is_counted() -> None:
    replies = [*HIDDEN, said("no", finish=STOP), ended(tokens=6)]
    answer = completion(chat=HIDING)
    body = json.loads((await collect(answer, inbox(*replies))).content)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    *_, final = parse_chunks(ChunkRenderer(answer).render(replies))
    assert final["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
