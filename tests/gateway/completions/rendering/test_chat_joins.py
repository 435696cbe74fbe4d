"""A chat's stream joins to its whole response, however its deltas are cut and rendered."""

import json
import operator
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contract.dialect import Dialect
from contract.messages import CallPiece, TokenLogprob
from contract.outcomes import FinishReason
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.sse import DONE, ChunkRenderer
from gateway.dialects.request import ChatRequest, Tool, ToolMode, ToolUse
from tests.gateway.replies import completion, ended, failed, inbox, said
from tests.support.events import numbered_events, parse_chunks

TOOLS = [Tool("f", {}, is_strict=False)]
TO_TEXTS = ToolUse(TOOLS, ToolMode.AUTO, texts=("f",))
"""Calls of other names are those of functions."""
TEXTS = st.one_of(st.text(max_size=4), st.sampled_from(['{"input": "a', "\\u00e9b", '"}', ""]))
PLAIN: dict[str, Any] = {"logprobs": None}

# A token of the reasoning, and one of the content. A mark, or a token whose text is held back,
# has no text.
REASONING = st.tuples(st.just("reasoning"), TEXTS)
ANSWERING = st.one_of(
    st.tuples(st.sampled_from(["text", "call", "arguments"]), TEXTS), st.just(("mark", ""))
)
SEQUENCES = st.tuples(st.lists(REASONING, max_size=5), st.lists(ANSWERING, max_size=8)).map(
    lambda phases: [*phases[0], *phases[1]]
)
FIELDS = st.fixed_dictionaries(
    {
        "chat": st.builds(
            ChatRequest,
            messages=st.just([]),
            shows_reasoning=st.booleans(),
            uses_legacy_functions=st.booleans(),
        ),
        "tool_use": st.sampled_from(
            [
                None,
                ToolUse(TOOLS, ToolMode.AUTO),
                ToolUse(TOOLS, ToolMode.AUTO, is_parallel=False),
                ToolUse(TOOLS, ToolMode.NAMED, "f"),
                TO_TEXTS,
            ]
        ),
        "dialect": st.sampled_from(Dialect),
        "include_usage": st.booleans(),
    }
).filter(lambda each: each["tool_use"] != TO_TEXTS or not each["chat"].uses_legacy_functions)
# Streams with data of tokens use the slow rendering; half of the others use the fast one.
DETAILS = st.one_of(
    st.just(PLAIN),
    st.fixed_dictionaries(
        {
            "logprobs": st.sampled_from([None, 0, 1]),
            "return_token_ids": st.booleans(),
            "names_tokens_by_id": st.booleans(),
            "include_obfuscation": st.booleans(),
            "timings_per_token": st.booleans(),
            "continuous_usage": st.booleans(),
        }
    ),
)
ALL_FIELDS = st.builds(operator.or_, FIELDS, DETAILS)


def cut(
    choice: int, tokens: list[tuple[str, str]], random: Any, finish: FinishReason, *, scored: bool
) -> list[Reply]:
    """Return the deltas of a choice, each of some tokens as they may be gathered."""
    replies: list[Reply] = []
    calls, position = -1, 0
    while position < len(tokens) or not replies:
        taken = tokens[position : position + random.randint(1, 4)]
        content, reasoning, pieces = "", "", []
        for kind, text in taken:
            if kind == "reasoning":
                reasoning += text
            elif kind == "text":
                content += text
            elif kind == "call":
                calls += 1
                pieces.append(CallPiece(calls, "f" + text))
            elif kind == "arguments" and calls >= 0:
                pieces.append(CallPiece(calls, "", text))
        ids = list(range(position, position + len(taken)))
        position += len(taken)
        replies.append(
            said(
                content,
                choice=choice,
                finish=finish if position >= len(tokens) else None,
                stop_reason="."
                if finish is FinishReason.STOP and position >= len(tokens)
                else None,
                token_ids=ids,
                reasoning=reasoning,
                reasoning_tokens=sum(kind == "reasoning" for kind, _ in taken),
                calls=pieces,
                logprobs=[TokenLogprob(str(each), -1.0, 0) for each in ids] if scored else None,
            )
        )
    return replies


def mixed(queues: list[list[Reply]], random: Any) -> list[Reply]:
    """Return the replies of all choices as they may arrive."""
    replies: list[Reply] = []
    while waiting := [queue for queue in queues if queue]:
        replies.append(random.choice(waiting).pop(0))
    return [*replies, ended(tokens=9)]


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Join the chunks of each choice, as clients do."""
    reported: defaultdict[int, dict[str, Any]] = defaultdict(
        lambda: {"message": defaultdict(str), "calls": {}, "ids": [], "scored": [], "finish": None}
    )
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = reported[choice["index"]]
        assert whole["finish"] is None, "it continues after its end"
        delta = choice["delta"]
        assert ("role" in delta) == (not whole["message"]), "the role comes first, and once"
        # Dialect vllm repeats the reasoning under another name.
        assert len(delta.keys() - {"role", "reasoning"}) <= 1
        for call in delta.pop("tool_calls", []):
            known = whole["calls"].setdefault(call["index"], defaultdict(str))
            known["id"] = known.get("id") or call["id"]
            known["type"] = known.get("type") or call["type"]
            for name, text in call[known["type"]].items():
                known[name] += text
        for name, text in delta.pop("function_call", {}).items():
            whole["calls"].setdefault(0, defaultdict(str))[name] += text
        for name, text in delta.items():
            whole["message"][name] += text
        whole["ids"] += choice.get("token_ids", [])
        whole["scored"] += (choice["logprobs"] or {"content": []})["content"]
        whole["finish"], whole["stop"] = choice["finish_reason"], choice.get("stop_reason")
    return dict(reported)


def as_joined(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of a whole response in the form of `joined`."""
    message = {name: value for name, value in choice["message"].items() if value is not None}
    calls = {
        index: call[call["type"]] | {"id": call["id"], "type": call["type"]}
        for index, call in enumerate(message.pop("tool_calls", []))
    }
    if "function_call" in message:
        calls = {0: message.pop("function_call")}
    message.setdefault("content", "")
    return {
        "message": message,
        "calls": calls,
        "ids": choice.get("token_ids", []),
        "scored": (choice["logprobs"] or {"content": []})["content"],
        "finish": choice["finish_reason"],
        "stop": choice["stop_reason"],
    }


@given(
    ALL_FIELDS,
    st.lists(SEQUENCES, min_size=1, max_size=3),
    st.sampled_from(FinishReason),
    st.randoms(use_true_random=False),
    st.integers(1, 4),
)
async def test_stream_joins_to_the_whole_response_however_it_is_cut(
    fields: dict[str, Any],
    sequences: list[list[tuple[str, str]]],
    finish: FinishReason,
    random: Any,
    batch: int,
) -> None:
    answer = completion(n=len(sequences), **fields)
    is_scored = fields["logprobs"] is not None

    def arrivals() -> list[Reply]:
        queues = [
            cut(index, tokens, random, finish, scored=is_scored)
            for index, tokens in enumerate(sequences)
        ]
        return mixed(queues, random)

    replies = arrivals()
    renderer = ChunkRenderer(answer)
    body = b"".join(
        renderer.render(replies[start : start + batch]) for start in range(0, len(replies), batch)
    )
    assert renderer.finished
    chunks = parse_chunks(body)
    streamed = joined(chunks)
    whole = json.loads((await collect(answer, inbox(*replies))).content)
    again = json.loads((await collect(answer, inbox(*arrivals()))).content)

    assert streamed == {each["index"]: as_joined(each) for each in whole["choices"]}
    assert again["choices"] == whole["choices"]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")][-1:]
    counts = {"prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"}
    assert {name: usage[name] for name in counts} == {name: whole["usage"][name] for name in counts}


def rendered(answer: Completion, replies: list[Reply], *, skip: int, batch: int) -> bytes:
    """Render replies in batches, and the failure if there is one."""
    renderer = ChunkRenderer(answer, skip=skip, has_ids=True)
    body = b"".join(
        renderer.render(replies[start : start + batch]) for start in range(0, len(replies), batch)
    )
    return body if renderer.failure is None else body + renderer.render_failure(renderer.failure)


@given(
    ALL_FIELDS,
    st.lists(SEQUENCES, min_size=1, max_size=2),
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.integers(0, 30),
    st.booleans(),
)
def test_events_after_an_event_id_are_the_same_in_every_rendering(
    fields: dict[str, Any],
    sequences: list[list[tuple[str, str]]],
    random: Any,
    batch: int,
    skip: int,
    fails: bool,
) -> None:
    # Padding is random, and times are those of each rendering.
    changing = {"dialect": Dialect.OPENAI, "include_obfuscation": False, "timings_per_token": False}
    answer = completion(n=len(sequences), **(fields | changing))
    queues = [
        cut(index, tokens, random, FinishReason.STOP, scored=fields["logprobs"] is not None)
        for index, tokens in enumerate(sequences)
    ]
    replies = mixed(queues, random)
    if fails:
        replies = [*replies[: len(replies) // 2], failed()]

    first = numbered_events(rendered(answer, replies, skip=0, batch=1))
    assert [number for _, _, number in first] == list(range(1, len(first) + 1))
    assert first[-1][0] == DONE
    assert numbered_events(rendered(answer, replies, skip=skip, batch=batch)) == first[skip:]
