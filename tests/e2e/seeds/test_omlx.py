"""The completions document of oMLX, and its chat document as far as completions share it."""

import json
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.examples import COUNTING, ENDING, LONG, OPEN, ids_of
from tests.e2e.seeds.calling import (
    Body,
    Caller,
    check_like,
    check_usage,
    documented_answer,
    example,
    example_bytes,
    finishes,
    joined,
    text_of,
    texts_by_seed,
    texts_of,
)
from tests.support.stack import MODEL

pytestmark = pytest.mark.e2e

DIALECT = "omlx"
WINDOW = 2048
SCHEMA: Body = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


def test_example_gets_the_answer_example(caller: Caller) -> None:
    answer = caller.complete(DIALECT, example_bytes("omlx_request"))

    check_like(documented_answer("omlx_response"), answer)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "your-model"
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert answer["usage"]["prompt_tokens"] == len(ids_of("The quick brown fox"))
    assert answer["usage"]["completion_tokens"] <= 50


def test_example_completes_the_sentence(caller: Caller) -> None:
    answer = caller.complete(DIALECT, example("omlx_request") | {"temperature": 0})

    assert text_of(answer).startswith(" jumps over the lazy dog")


def test_models_are_listed(caller: Caller) -> None:
    listed = caller.get("/v1/models").json()

    [model] = listed["data"]
    assert model["id"] == MODEL
    assert "your-model" in model["aliases"]
    assert caller.get("/v1/models/your-model").json() == model


def test_list_of_prompts_is_completed_independently(caller: Caller) -> None:
    options = {"max_tokens": 10, "temperature": 0}
    prompts = [LONG.prompt, COUNTING]
    answer, alone = at_once(
        lambda: caller.complete(DIALECT, {"prompt": prompts} | options),
        lambda: caller.texts(DIALECT, *({"prompt": prompt} | options for prompt in prompts)),
    )

    assert texts_of(answer) == alone


def test_stream_ends_with_done(caller: Caller) -> None:
    chunks = caller.stream(DIALECT, {"prompt": COUNTING, "max_tokens": 8, "temperature": 0})

    assert joined(chunks).startswith(" 5, 6,")
    assert finishes(chunks) == [(0, "length")]


def test_stream_options_add_usage(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, extra = caller.stream(DIALECT, body)

    assert extra["choices"] == []
    check_usage(extra["usage"])
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    # Without a stream they have no effect, and are no error.
    check_usage(caller.complete(DIALECT, body)["usage"])


def test_max_tokens_default_is_the_rest_of_the_window(caller: Caller) -> None:
    response = caller.post(DIALECT, {"prompt": [5] * (WINDOW - 25), "ignore_eos": True})

    assert response.headers["x-max-tokens-applied"] == "25"


@each_at_once("name", ["temperature", "top_p", "min_p"])
def test_sampling_can_be_narrowed_to_the_likeliest_token(caller: Caller, name: str) -> None:
    value = {"temperature": 0, "top_p": 0.000001, "min_p": 1.0}[name]
    # At every token of this text one is clearly the likeliest.
    body = {"prompt": LONG.prompt, "max_tokens": 20, "seed": 4}
    greedy, narrow = caller.texts(DIALECT, body | {"top_k": 1}, body | {name: value})

    assert narrow == greedy


@each_at_once("stop", [" 8", [" never", " 8"]])
def test_stop_halts_generation(caller: Caller, stop: Any) -> None:
    body = {"prompt": COUNTING, "max_tokens": 40, "temperature": 0, "stop": stop}

    assert text_of(caller.complete(DIALECT, body)) == " 5, 6, 7,"


def test_seed_makes_generation_reproducible(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 24, "temperature": 1.5}
    first, second, other = texts_by_seed(caller, DIALECT, body, (1, 1, 2))

    assert first == second != other


@each_at_once("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_change_what_repeats(caller: Caller, name: str) -> None:
    body = {"prompt": COUNTING, "max_tokens": 24, "temperature": 0}

    plain, penalized = caller.texts(DIALECT, body, body | {name: 2.0})
    assert penalized != plain


def test_xtc_excludes_top_choices(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 30, "logprobs": 1, "seed": 3, "temperature": 1}
    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.05}

    def tops(answer: Body) -> float:
        logprobs = answer["choices"][0]["logprobs"]
        chosen = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        hits = [float(value) >= max(top.values()) for value, top in chosen]
        return float(sum(hits)) / len(hits)

    without, on, off = at_once(
        lambda: caller.complete(DIALECT, body),
        lambda: caller.complete(DIALECT, body | xtc),
        lambda: caller.complete(DIALECT, body | xtc | {"xtc_probability": 0.0}),
    )
    assert tops(on) < tops(without)
    assert text_of(off) == text_of(without)


def test_xtc_threshold_above_a_half_is_refused(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 2, "xtc_probability": 0.5, "xtc_threshold": 0.6}

    assert caller.refused(DIALECT, body)["param"] == "xtc_threshold"


def test_finish_reason_reports_how_the_text_ended(caller: Caller) -> None:
    body = {"temperature": 0, "max_tokens": 100}
    ended, cut = at_once(
        lambda: caller.complete(DIALECT, body | {"prompt": ENDING.prompt}),
        lambda: caller.complete(DIALECT, body | {"prompt": COUNTING, "max_tokens": 2}),
    )

    assert ended["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["finish_reason"] == "length"


@each_at_once(
    "structure, pattern",
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["red", "blue"]}, "red|blue"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json": SCHEMA}, r'\{"age": ?-?\d+\}'),
    ],
)
def test_structured_outputs_hold(caller: Caller, structure: Body, pattern: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 40, "structured_outputs": structure, "seed": 1}

    assert re.fullmatch(pattern, text_of(caller.complete(DIALECT, body)))


@each_at_once(
    "response_format",
    [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}],
)
def test_response_format_gives_json(caller: Caller, response_format: Body) -> None:
    body = {"prompt": "A person:\n", "max_tokens": 400, "response_format": response_format}
    answer = caller.complete(DIALECT, body | {"temperature": 0})

    assert answer["choices"][0]["finish_reason"] == "stop"
    value = json.loads(text_of(answer))
    assert isinstance(value, dict)
    if "json_schema" in response_format:
        jsonschema.validate(value, SCHEMA)


def test_usage_has_times_in_seconds(caller: Caller) -> None:
    usage = caller.complete(DIALECT, {"prompt": OPEN, "max_tokens": 4})["usage"]

    times = {"time_to_first_token", "total_time", "prompt_eval_duration", "generation_duration"}
    rates = {"prompt_tokens_per_second", "generation_tokens_per_second"}
    assert times | rates | {"cached_tokens"} <= set(usage)
    assert 0 < usage["time_to_first_token"] <= usage["total_time"] < 60
