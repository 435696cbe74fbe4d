"""Whole responses to completions."""

import json
from typing import Any

import pytest

from contract.dialect import Dialect
from contract.messages import TokenLogprob
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import collect
from gateway.records.errors import GenerationFailedError, GenerationTimeoutError
from tests.gateway.replies import LENGTH, STOP, completion, ended, failed, inbox, said, scored
from tests.support.cases import all_cases


async def whole(answer: Completion, *replies: Reply) -> dict[str, Any]:
    """Return the body for some replies."""
    collected = await collect(answer, inbox(*replies))
    body: dict[str, Any] = json.loads(collected.content)
    assert body["usage"].items() >= collected.usage.body().items()
    return body


async def test_response_has_all_fields_of_openai() -> None:
    body = await whole(completion(), said("a"), said("b", finish=STOP), ended(cached=1))
    assert body == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@all_cases("dialect", Dialect)
@all_cases("logprobs", [None, 0])
async def test_required_members_are_present_in_every_dialect(
    dialect: Dialect, logprobs: int | None
) -> None:
    body = await whole(
        completion(dialect=dialect, logprobs=logprobs), said("a", finish=STOP), ended()
    )
    assert {"id", "object", "created", "model", "choices", "usage"} <= set(body)
    (choice,) = body["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert (choice["logprobs"] is None) == (logprobs is None)
    assert (
        body["usage"].items()
        >= {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
        }.items()
    )


async def test_choices_are_in_order_whatever_order_they_finish_in() -> None:
    body = await whole(
        completion(prompts=2, n=2),
        said("11", prompt=1, choice=1, finish=LENGTH),
        said("10", prompt=1, finish=STOP),
        ended(prompt=1),
        said("01", choice=1, finish=STOP),
        said("00", finish=STOP, stop_reason="."),
        ended(),
    )
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "00"),
        (1, "01"),
        (2, "10"),
        (3, "11"),
    ]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "stop", "stop", "length"]
    assert [c["stop_reason"] for c in body["choices"]] == [".", None, None, None]
    assert body["usage"]["total_tokens"] == 10


async def test_echo_precedes_every_choice() -> None:
    body = await whole(
        completion(n=2, prompt_texts=["P "]),
        said("a", finish=STOP),
        said("b", choice=1, finish=STOP),
        ended(),
    )
    assert [choice["text"] for choice in body["choices"]] == ["P a", "P b"]


async def test_echo_with_logprobs_scores_prompt_and_completion() -> None:
    body = await whole(
        completion(n=2, prompt_texts=["xyz"], logprobs=1),
        scored([TokenLogprob("xy", None, 0), TokenLogprob("z", -1.0, 2, [("z", -1.0)], [6])]),
        said("a", logprobs=[TokenLogprob("a", -0.5, 0, [("a", -0.5)], [9])]),
        said("b", finish=STOP, logprobs=[TokenLogprob("b", -0.5, 1, [("b", -0.5)], [9])]),
        said("c", choice=1, finish=STOP, logprobs=[TokenLogprob("c", -0.5, 0, [("c", -0.5)], [9])]),
        ended(),
    )
    first, second = (choice["logprobs"] for choice in body["choices"])
    assert first["tokens"] == ["xy", "z", "a", "b"]
    assert first["text_offset"] == [0, 2, 3, 4]
    assert first["token_logprobs"][0] is None
    assert first["top_logprobs"][0] is None
    assert second["tokens"] == ["xy", "z", "c"]


async def test_logprobs_are_lists_even_if_no_token_was_generated() -> None:
    body = await whole(completion(logprobs=0), said("", finish=LENGTH), ended(tokens=0))
    assert body["choices"][0]["logprobs"] == {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }


@all_cases(
    ("code", "expected"),
    [
        (FailureCode.WORKER_LOST, GenerationFailedError),
        (FailureCode.DEADLINE_EXCEEDED, GenerationTimeoutError),
    ],
)
async def test_failure_of_one_prompt_fails_the_request(
    code: FailureCode, expected: type[Exception]
) -> None:
    replies = [said("a", finish=STOP), ended(), failed(code, prompt=1)]
    with pytest.raises(expected):
        await collect(completion(prompts=2), inbox(*replies))
