"""Server-sent events of a stream: exact bytes, usage in the final chunk, one end."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.dialect import Dialect
from contract.messages import TokenLogprob
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.sse import DONE, ChunkRenderer
from gateway.dialects.request import ChatRequest
from gateway.records.errors import GenerationFailedError, OverloadedError
from tests.gateway.replies import (
    LENGTH,
    STOP,
    begun,
    completion,
    ended,
    failed,
    inbox,
    said,
    scored,
)
from tests.support.cases import all_cases
from tests.support.events import parse_chunks, split_events, texts_by_choice

HEAD = (
    b'{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m",'
    b'"system_fingerprint":"fp_1","choices":'
)
USAGE = (
    b'"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,'
    b'"prompt_tokens_details":{"cached_tokens":0}}'
)


def stream(answer: Completion, *replies: Reply) -> bytes:
    """Render replies that arrive one by one."""
    renderer = ChunkRenderer(answer)
    return b"".join(renderer.render([reply]) for reply in replies)


def only_chunk(body: bytes) -> Any:
    """Return the only chunk of a piece of a stream."""
    (event,) = split_events(body)
    return json.loads(event.removeprefix(b"data: "))


def test_stream_is_byte_for_byte_as_documented() -> None:
    body = stream(completion(), said("Hel"), said("lo", finish=STOP), ended())
    assert body == (
        b"data: " + HEAD + b'[{"index":0,"text":"Hel","logprobs":null,"finish_reason":null}]}\n\n'
        b"data: "
        + HEAD
        + b'[{"index":0,"text":"lo","logprobs":null,"finish_reason":"stop"}],'
        + USAGE
        + b"}\n\n"
        b"data: [DONE]\n\n"
    )


@all_cases("chat", [None, ChatRequest(messages=[])])
def test_fingerprint_has_the_classes_of_the_engines_so_far(chat: ChatRequest | None) -> None:
    renderer, texts = ChunkRenderer(completion(chat=chat)), ""
    seen: dict[str, str] = {}
    for name in "aaba":
        texts += name
        replies = [begun(name), said(name), said(name)]
        for event in split_events(b"".join(renderer.render([reply]) for reply in replies)):
            seen[json.loads(event.removeprefix(b"data: "))["system_fingerprint"]] = texts
    assert seen == {"fp_1-a": "aa", "fp_1-a-b": "aaba"}


def test_include_usage_adds_the_extra_chunk_and_nulls_elsewhere() -> None:
    body = stream(
        completion(include_usage=True, logprobs=0),
        said("a", logprobs=[TokenLogprob("a", -0.5, 0, [("a", -0.5)], [9])]),
        said("b", choice=0, finish=LENGTH),
        ended(cached=2),
    )
    first, final, extra = parse_chunks(body)
    assert first["usage"] is None
    assert final["choices"][0]["finish_reason"] == "length"
    assert final["usage"] is None
    assert extra["choices"] == []
    assert extra["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_plain_chunks_have_usage_null_only_on_request() -> None:
    plain = stream(completion(), said("a"))
    asked = stream(completion(include_usage=True), said("a"))
    assert b"usage" not in plain
    assert only_chunk(asked)["usage"] is None


def test_final_chunk_waits_for_the_counts() -> None:
    renderer = ChunkRenderer(completion())
    assert renderer.render([said("a"), said("b", finish=STOP)]).count(b"data: ") == 1
    assert renderer.render([]) == b""
    last = renderer.render([ended()])
    assert renderer.finished
    (final,) = parse_chunks(last)
    assert final["choices"][0]["text"] == "b"
    assert final["usage"]["total_tokens"] == 5


def test_final_chunk_is_that_of_the_choice_that_finishes_last() -> None:
    chunks = parse_chunks(
        stream(
            completion(n=2),
            said("a", choice=1, finish=STOP),
            said("b", choice=0),
            said("c", choice=0, finish=LENGTH),
            ended(),
        )
    )
    assert [(c["choices"][0]["index"], "usage" in c) for c in chunks] == [
        (1, False),
        (0, False),
        (0, True),
    ]


def test_several_prompts_end_together_with_the_sum_of_their_usage() -> None:
    answer = completion(prompts=2, n=2)
    replies = [
        said("00", finish=STOP),
        said("01", choice=1, finish=STOP),
        ended(prompt_tokens=3, tokens=4, cached=1),
        said("10", prompt=1, finish=STOP),
        said("11", prompt=1, choice=1, finish=LENGTH),
        ended(prompt=1, prompt_tokens=5, tokens=6, cached=2),
    ]
    chunks = parse_chunks(stream(answer, *replies))
    assert texts_by_choice(chunks) == {0: "00", 1: "01", 2: "10", 3: "11"}
    assert [chunk.get("usage") for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 10,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_empty_delta_gives_no_chunk() -> None:
    assert stream(completion(), said("")) == b""
    assert stream(completion(logprobs=1), said("")) == b""


def test_empty_final_delta_gives_the_final_chunk() -> None:
    (chunk,) = parse_chunks(stream(completion(), said("", finish=STOP), ended()))
    assert chunk["choices"][0]["text"] == ""


def test_stop_reason_is_included_if_there_is_one() -> None:
    first, second = parse_chunks(
        stream(
            completion(n=2),
            said("a", finish=STOP, stop_reason="\n"),
            said("b", choice=1, finish=STOP),
            ended(),
        )
    )
    assert first["choices"][0]["stop_reason"] == "\n"
    assert "stop_reason" not in second["choices"][0]


@pytest.mark.parametrize(
    "text",
    [
        "\x00\x01\x1f\x7f",
        "a\nb\r\nc",
        '"\\/',
        "\u2028\u2029",
        "😀é漢",
        "data: [DONE]\n\n",
        "</script>",
    ],
    ids=["control", "newlines", "quotes", "separators", "beyond-ascii", "event", "markup"],
)
def test_any_text_survives_the_framing(text: str) -> None:
    chunks = parse_chunks(
        stream(completion(prompt_texts=[text]), said(text), said(text, finish=STOP), ended())
    )
    assert texts_by_choice(chunks) == {0: text * 3}


def test_echo_comes_before_the_first_text_of_every_choice() -> None:
    chunks = parse_chunks(
        stream(
            completion(prompts=2, n=2, prompt_texts=["P0 ", "P1 "]),
            *(said("a", prompt=p, choice=c) for p in (0, 1) for c in (0, 1)),
            *(said("b", prompt=p, choice=c, finish=STOP) for p in (0, 1) for c in (0, 1)),
            ended(),
            ended(prompt=1),
        )
    )
    assert texts_by_choice(chunks) == {0: "P0 ab", 1: "P0 ab", 2: "P1 ab", 3: "P1 ab"}
    assert [chunk["choices"][0]["text"] for chunk in chunks[:2]] == ["P0 a", "P0 a"]


def test_echo_without_completion_is_one_chunk() -> None:
    (chunk,) = parse_chunks(
        stream(completion(prompt_texts=["prompt"]), said("", finish=LENGTH), ended(tokens=0))
    )
    assert chunk["choices"][0]["text"] == "prompt"
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert chunk["usage"]["completion_tokens"] == 0


PROMPT_SCORES = [TokenLogprob("ab", None, 0), TokenLogprob("c", -1.0, 2, [("c", -1.0)], [6])]


def test_echo_with_logprobs_puts_the_prompt_first_and_shifts_the_offsets() -> None:
    first, second = parse_chunks(
        stream(
            completion(prompt_texts=["abc"], logprobs=1),
            scored(PROMPT_SCORES),
            said("d", logprobs=[TokenLogprob("d", -0.5, 0, [("d", -0.5)], [9])]),
            said("e", finish=STOP, logprobs=[TokenLogprob("e", -0.25, 1, [("e", -0.25)], [9])]),
            ended(),
        )
    )
    assert first["choices"][0]["text"] == "abcd"
    assert first["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c", "d"],
        "token_logprobs": [None, -1.0, -0.5],
        "top_logprobs": [None, {"c": -1.0}, {"d": -0.5}],
        "text_offset": [0, 2, 3],
    }
    assert second["choices"][0]["logprobs"]["text_offset"] == [4]


def test_each_alternative_has_a_key_of_its_own() -> None:
    top = [("\ufffd", -0.5), ("a", -1.0), ("\ufffd", -2.0), ("a", -3.0), ("é", -4.0), ("b", -5.0)]
    # The token itself, 9, completes the character that another token is.
    parts = {4: b"\xe2", 6: b"\xf0\x9f", 9: b"\xa9"}
    token = TokenLogprob("é", -5.5, 0, [*top, ("é", -5.5)], [4, 5, 6, 7, 8, 10, 9], parts=parts)
    body = stream(completion(logprobs=6), said("é", logprobs=[token]))
    logprobs = only_chunk(body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["é"]
    assert logprobs["top_logprobs"] == [
        {
            "bytes:\\xe2": -0.5,
            "a": -1.0,
            "bytes:\\xf0\\x9f": -2.0,
            "token_id:7": -3.0,
            "token_id:8": -4.0,
            "b": -5.0,
            "é": -5.5,
        }
    ]


def test_impossible_token_has_a_number_for_its_logprob() -> None:
    body = stream(
        completion(logprobs=0),
        said("x", logprobs=[TokenLogprob("x", float("-inf"), 0, [("x", float("-inf"))], [9])]),
    )
    logprobs = only_chunk(body)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]


def test_delta_without_logprobs_has_null() -> None:
    body = stream(completion(logprobs=1), said("held"))
    assert only_chunk(body)["choices"][0]["logprobs"] is None


def test_failure_ends_the_stream_after_earlier_replies() -> None:
    renderer = ChunkRenderer(completion(prompts=2))
    body = renderer.render([said("a"), failed(), said("b", prompt=1)])
    assert body.count(b"data: ") == 1
    assert isinstance(renderer.failure, GenerationFailedError)
    assert not renderer.finished


def test_error_event_ends_the_stream() -> None:
    renderer = ChunkRenderer(completion())
    body = renderer.render_failure(OverloadedError('say "no"\n', param="p"))
    event, done = split_events(body)
    assert done == DONE
    assert json.loads(event.removeprefix(b"data: ")) == {
        "error": {
            "message": 'say "no"\n',
            "type": "service_unavailable",
            "param": "p",
            "code": "overloaded",
        }
    }


PIECES = st.lists(st.text(max_size=6), min_size=1, max_size=6)
HISTORY = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        st.lists(PIECES, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]),
        st.lists(st.text(max_size=4), min_size=shape[0], max_size=shape[0]),
        st.randoms(use_true_random=False),
    )
)


OPTIONS = st.fixed_dictionaries(
    {
        "dialect": st.sampled_from(Dialect),
        "logprobs": st.sampled_from([None, 0]),
        "suffix": st.sampled_from(["", "}\n"]),
        "return_token_ids": st.booleans(),
        "include_usage": st.booleans(),
        "include_obfuscation": st.booleans(),
        "timings_per_token": st.booleans(),
        "continuous_usage": st.booleans(),
        "wants_timings": st.booleans(),
    }
)


@given(HISTORY, st.booleans(), OPTIONS, st.integers(1, 4))
async def test_stream_joins_to_the_whole_response(
    history: Any, echo: bool, options: dict[str, Any], batch: int
) -> None:
    (prompts, n), pieces, prompt_texts, random = history
    replies = arrivals(n, pieces, random, with_logprobs=options["logprobs"] is not None)
    answer = completion(
        prompts=prompts, n=n, prompt_texts=prompt_texts if echo else None, **options
    )

    renderer = ChunkRenderer(answer)
    body = b"".join(
        renderer.render(replies[start : start + batch]) for start in range(0, len(replies), batch)
    )
    content = (await collect(answer, inbox(*replies))).content

    assert renderer.finished
    chunks, whole = parse_chunks(body), json.loads(content)
    assert texts_by_choice(chunks) == {c["index"]: c["text"] for c in whole["choices"]}
    assert tokens_by_choice(chunks) == {
        choice["index"]: (
            choice.get("token_ids", []),
            choice["logprobs"]["tokens"] if choice["logprobs"] else [],
            choice["logprobs"]["text_offset"] if choice["logprobs"] else [],
        )
        for choice in whole["choices"]
    }
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")][-1:]
    assert usage.keys() == whole["usage"].keys()
    assert usage["total_tokens"] == whole["usage"]["total_tokens"]
    assert ("timings" in chunks[-1]) == ("timings" in whole)


def arrivals(n: int, pieces: list[list[str]], random: Any, *, with_logprobs: bool) -> list[Reply]:
    """Return the replies of all choices in a random order; `pieces` are their texts."""
    queues = {
        (index // n, index % n): [
            said(
                text,
                prompt=index // n,
                choice=index % n,
                finish=STOP if position == len(texts) - 1 else None,
                logprobs=[TokenLogprob(text, -1.0, position)] if with_logprobs else None,
                token_ids=[position],
            )
            for position, text in enumerate(texts)
        ]
        for index, texts in enumerate(pieces)
    }
    replies: list[Reply] = []
    while queues:
        place = random.choice(sorted(queues))
        replies.append(queues[place].pop(0))
        if not queues[place]:
            del queues[place]
            if not any(prompt == place[0] for prompt, _ in queues):
                replies.append(ended(prompt=place[0]))
    return replies


def tokens_by_choice(
    chunks: list[dict[str, Any]],
) -> dict[int, tuple[list[int], list[str], list[int]]]:
    """Return the joined token ids, tokens and offsets of each choice."""
    joined: dict[int, tuple[list[int], list[str], list[int]]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ids, tokens, offsets = joined.setdefault(choice["index"], ([], [], []))
        ids += choice.get("token_ids", [])
        if choice["logprobs"]:
            tokens += choice["logprobs"]["tokens"]
            offsets += choice["logprobs"]["text_offset"]
    return joined


@all_cases("code", FailureCode)
def test_every_failure_ends_a_stream(code: FailureCode) -> None:
    renderer = ChunkRenderer(completion())
    assert renderer.render([failed(code)]) == b""
    assert renderer.failure is not None
