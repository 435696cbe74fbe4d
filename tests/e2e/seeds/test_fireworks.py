"""The completions document of Fireworks: each of its guarantees, on the real engine."""

import json
from statistics import mean
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.examples import COUNTING, ENDING, LONG, OPEN, ids_of
from tests.e2e.seeds.calling import (
    Body,
    Caller,
    check_defaults,
    check_usage,
    finishes,
    joined,
    text_of,
    texts_of,
)

pytestmark = pytest.mark.e2e

DIALECT = "fireworks"
WINDOW = 2048
GREEDY: Body = {"temperature": 0, "max_tokens": 24}

DEFAULTS: Body = {
    "context_length_exceeded_behavior": "truncate",
    "echo": False,
    "frequency_penalty": 0,
    "ignore_eos": False,
    "max_tokens": 16,
    "mirostat_lr": 0.1,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "stream": False,
    "temperature": 1,
    "top_p": 1,
}

SCHEMA: Body = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def test_response_has_the_documented_fields(caller: Caller) -> None:
    answer = caller.complete(DIALECT, {"prompt": OPEN})

    assert {"choices", "created", "id", "model", "object", "usage"} <= set(answer)
    assert answer["object"] == "text_completion"
    assert isinstance(answer["created"], int)
    choice = answer["choices"][0]
    assert {"index", "text", "finish_reason", "logprobs"} <= set(choice)


def test_defaults_are_those_of_the_document(caller: Caller) -> None:
    others = {"temperature": 0.2, "top_k": 2}
    check_defaults(caller, DIALECT, {"prompt": OPEN}, defaults=DEFAULTS, others=others)


def test_max_tokens_default_is_16(caller: Caller) -> None:
    answer = caller.complete(DIALECT, {"prompt": COUNTING, "ignore_eos": True})

    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


@each_at_once("prompt", ["Once upon a time", ["a", "b"], [12, 34], [[12, 34], [56]]])
def test_every_form_of_prompt_is_accepted(caller: Caller, prompt: Any) -> None:
    answer = caller.complete(DIALECT, {"prompt": prompt, "max_tokens": 2, "n": 2})

    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(texts_of(answer)) == 2 * (len(prompt) if several else 1)


@each_at_once("behavior", [{}, {"context_length_exceeded_behavior": "truncate"}])
def test_truncate_lowers_max_tokens_to_the_window(caller: Caller, behavior: Body) -> None:
    body = {"prompt": [5] * (WINDOW - 9), "max_tokens": 100, "ignore_eos": True}
    response = caller.post(DIALECT, body | behavior)

    assert response.headers["x-max-tokens-applied"] == "9"
    assert response.json()["usage"]["completion_tokens"] == 9


def test_error_rejects_requests_beyond_the_window(caller: Caller) -> None:
    behavior = {"context_length_exceeded_behavior": "error"}
    body = {"prompt": [5] * (WINDOW - 9), "max_tokens": 10}

    assert caller.refused(DIALECT, body | behavior)["code"] == "context_length_exceeded"
    caller.complete(DIALECT, body | behavior | {"max_tokens": 9})


def test_echo_returns_the_prompt_in_addition(caller: Caller) -> None:
    body = {"prompt": LONG.prompt} | GREEDY
    plain, echoed = caller.texts(DIALECT, body, body | {"echo": True})

    assert echoed == LONG.prompt + plain


@each_at_once("name", ["frequency_penalty", "presence_penalty"])
@each_at_once("value", [-2, 2])
def test_penalties_accept_their_whole_range(caller: Caller, name: str, value: float) -> None:
    body = {"prompt": COUNTING} | GREEDY | {"max_tokens": 40}
    plain, changed = caller.texts(DIALECT, body, body | {name: value})

    # A reward for used tokens repeats them, a penalty does not.
    assert (changed != plain) or value < 0
    assert caller.refused(DIALECT, body | {name: value * 1.01})["param"] == name


def test_repetition_penalty_counts_prompt_and_output(caller: Caller) -> None:
    body = {"prompt": COUNTING} | GREEDY | {"max_tokens": 1, "logprobs": 5}
    plain, penalized = caller.texts(
        DIALECT, *(body | {"repetition_penalty": penalty} for penalty in (1.0, 2.0))
    )
    # Its first token is the space that the prompt has four times.
    assert plain in COUNTING
    assert penalized != plain


def test_ignore_eos_continues_after_the_end(caller: Caller) -> None:
    body = {"prompt": ENDING.prompt, "temperature": 0, "max_tokens": ENDING.max_tokens + 40}
    ended, forced = at_once(
        lambda: caller.complete(DIALECT, body),
        lambda: caller.complete(DIALECT, body | {"ignore_eos": True}),
    )

    assert ended["choices"][0]["finish_reason"] == "stop"
    assert forced["choices"][0]["finish_reason"] == "length"
    assert forced["usage"]["completion_tokens"] == body["max_tokens"]


@each_at_once("count", [1, 5])
def test_logprobs_have_the_chosen_token_too(caller: Caller, count: int) -> None:
    body = {"prompt": OPEN, "logprobs": count, "seed": 1, "max_tokens": 12}
    logprobs = caller.complete(DIALECT, body)["choices"][0]["logprobs"]

    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert token in top
        assert len(top) <= count + 1


def test_more_than_five_logprobs_are_refused(caller: Caller) -> None:
    error = caller.refused(DIALECT, {"prompt": OPEN, "logprobs": 6})

    assert error["param"] == "logprobs"
    assert "5" in error["message"]


def test_mirostat_target_sets_the_surprise(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 50, "ignore_eos": True, "logprobs": 0, "seed": 5, "n": 4}

    def surprise(target: float) -> float:
        asked = body | {"mirostat_target": target, "mirostat_lr": 0.1}
        choices = caller.complete(DIALECT, asked)["choices"]
        return -mean(float(v) for c in choices for v in c["logprobs"]["token_logprobs"])

    low, high = at_once(lambda: surprise(1.2), lambda: surprise(8.0))
    assert low < high


def test_n_completions_for_each_prompt(caller: Caller) -> None:
    answer = caller.complete(DIALECT, {"prompt": [OPEN, COUNTING], "n": 4, "max_tokens": 3})

    assert len(texts_of(answer)) == 8
    assert caller.refused(DIALECT, {"prompt": OPEN, "n": 129})["param"] == "n"


@each_at_once("seed", range(3))
def test_json_mode_gives_valid_json(caller: Caller, seed: int) -> None:
    body = {"prompt": "A person as JSON:\n", "max_tokens": 600, "seed": seed, "temperature": 0.5}
    answer = caller.complete(DIALECT, body | {"response_format": {"type": "json_object"}})

    assert answer["choices"][0]["finish_reason"] == "stop"
    assert isinstance(json.loads(text_of(answer)), dict)


@each_at_once("stream", [False, True])
def test_json_mode_with_a_schema_gives_json_that_matches(caller: Caller, stream: bool) -> None:
    body = {
        "prompt": "A product:\n",
        "max_tokens": 200,
        "response_format": {"type": "json_object", "schema": SCHEMA},
    }
    text = (
        joined(caller.stream(DIALECT, body)) if stream else text_of(caller.complete(DIALECT, body))
    )

    jsonschema.validate(json.loads(text), SCHEMA)


def test_truncated_json_has_finish_reason_length(caller: Caller) -> None:
    body = {"prompt": "A product:\n", "max_tokens": 3}
    answer = caller.complete(
        DIALECT, body | {"response_format": {"type": "json_object", "schema": SCHEMA}}
    )

    assert answer["choices"][0]["finish_reason"] == "length"
    assert text_of(answer).startswith("{")


@each_at_once("stream", [False, True])
def test_text_contains_the_stop_sequence(caller: Caller, stream: bool) -> None:
    body = {"prompt": COUNTING, "temperature": 0, "max_tokens": 40, "stop": [" never", " 8"]}
    text = (
        joined(caller.stream(DIALECT, body)) if stream else text_of(caller.complete(DIALECT, body))
    )

    assert text == " 5, 6, 7, 8"


def test_four_stop_sequences_and_more_are_accepted(caller: Caller) -> None:
    body = {"prompt": COUNTING, "max_tokens": 2}

    caller.complete(DIALECT, body | {"stop": ["a", "b", "c", "d"]})
    # The document allows four, and the gateway more.
    caller.complete(DIALECT, body | {"stop": list("abcde")})


def test_stream_ends_with_usage_and_done(caller: Caller) -> None:
    chunks = caller.stream(DIALECT, {"prompt": OPEN, "max_tokens": 5, "n": 2})

    check_usage(chunks[-1]["usage"])
    assert chunks[-1]["choices"][0]["finish_reason"] is not None
    assert [chunk.get("usage") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert sorted(index for index, _ in finishes(chunks)) == [0, 1]


@each_at_once(
    "name, edges, beyond",
    [
        ("temperature", [0, 2], [-0.01, 2.01]),
        ("top_p", [0, 1], [-0.01, 1.01]),
        ("top_k", [1, 128], []),
        ("repetition_penalty", [0.01, 2], [0, 2.01]),
        ("n", [1, 8], [0, 129]),
        ("logprobs", [0, 5], [-1, 6]),
        ("max_tokens", [1, WINDOW], []),
        ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
    ],
)
def test_ranges_are_those_of_the_document(
    caller: Caller, name: str, edges: list[float], beyond: list[float]
) -> None:
    body = {"prompt": COUNTING, "max_tokens": 1, "stop": ","}

    for value in edges:
        caller.complete(DIALECT, body | {name: value})
    for value in beyond:
        assert caller.refused(DIALECT, body | {name: value})["param"] == name


def test_user_changes_nothing(caller: Caller) -> None:
    body = {"prompt": OPEN} | GREEDY
    plain, named = caller.texts(DIALECT, body, body | {"user": "u-1"})

    assert named == plain


def test_images_are_rejected_by_a_text_model(caller: Caller) -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    error = caller.refused(DIALECT, {"prompt": "What is <image>?", "images": [pixel]})

    assert error["param"] == "images"
    assert error["code"] == "unsupported_parameter"


def test_usage_counts_tokens_of_prompt_and_completion(caller: Caller) -> None:
    usage = caller.complete(DIALECT, {"prompt": OPEN, "max_tokens": 3, "ignore_eos": True})["usage"]

    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids_of(OPEN)), 3)
