"""The document of mistral.rs, replayed: its example byte for byte, then each of its guarantees."""

import json
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.examples import COUNTING, LONG, OPEN, ids_of
from tests.e2e.seeds.calling import (
    Body,
    Caller,
    check_usage,
    example,
    example_bytes,
    finishes,
    joined,
    text_of,
    texts_of,
)

pytestmark = pytest.mark.e2e

DIALECT = "mistralrs"
WINDOW = 2048

SCHEMA: Body = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["age", "ok"],
    "additionalProperties": False,
}


def test_example_is_streamed_to_its_stop_string(caller: Caller) -> None:
    chunks = caller.stream(DIALECT, example_bytes("mistralrs_request"))

    # The regex allows one text only, and the stop string is that text: nothing is left of it.
    assert joined(chunks) == ""
    assert finishes(chunks) == [(0, "stop")]
    assert {chunk["model"] for chunk in chunks} == {"mistral"}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    usage = chunks[-1]["usage"]
    check_usage(usage)
    assert usage["prompt_tokens"] == len(ids_of("Say this is a test."))
    assert 0 < usage["completion_tokens"] <= 16


def test_example_ignores_only_user(caller: Caller) -> None:
    response = caller.post(DIALECT, example_bytes("mistralrs_request"))

    ignored = set(response.headers.get("x-ignored-params", "").split(",")) - {""}
    # `user` is for abuse tracking: it has no effect on the response.
    assert ignored <= {"user"}


def test_example_without_stop_matches_its_regex(caller: Caller) -> None:
    body = example("mistralrs_request") | {"stop": None, "stream": False}

    assert text_of(caller.complete(DIALECT, body)) == "example"


def test_model_default_is_the_only_model(caller: Caller) -> None:
    answer = caller.complete(
        DIALECT, {"model": "default", "prompt": COUNTING, "max_tokens": 8, "temperature": 0}
    )

    assert text_of(answer).startswith(" 5, 6,")


def test_max_tokens_may_be_absent(caller: Caller) -> None:
    body = {"prompt": [5] * (WINDOW - 30), "ignore_eos": True}

    assert caller.complete(DIALECT, body)["usage"]["completion_tokens"] == 30


@each_at_once("best_of", [1, 2, 4])
def test_best_of_keeps_the_likeliest_choices(caller: Caller, best_of: int) -> None:
    # Few tokens: batches that are sampled at another time may round differently.
    body = {"prompt": OPEN, "n": 4, "max_tokens": 3, "seed": 3, "logprobs": 0}
    whole, answer = at_once(
        lambda: caller.complete(DIALECT, body),
        lambda: caller.complete(DIALECT, body | {"best_of": best_of}),
    )
    everything = whole["choices"]

    likeliest = sorted(everything, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert texts_of(answer) == [choice["text"] for choice in likeliest[:best_of]]
    assert len(texts_of(answer)) == best_of


def test_best_of_may_not_exceed_n(caller: Caller) -> None:
    error = caller.refused(DIALECT, {"prompt": OPEN, "n": 2, "best_of": 3, "max_tokens": 2})

    assert error["param"] == "best_of"


def test_dry_ends_a_repetition(caller: Caller) -> None:
    body = {"prompt": "a b a b a b a b a b", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    dry = {"dry_multiplier": 5.0, "dry_base": 1.75, "dry_allowed_length": 2}
    plain, penalized, off = caller.texts(
        DIALECT, body, body | dry, body | dry | {"dry_multiplier": 0}
    )

    assert penalized != plain
    assert off == plain


def test_dry_does_not_reach_across_a_breaker(caller: Caller) -> None:
    body = {"prompt": f"{COUNTING} 5, 6, 7.\n{COUNTING}", "max_tokens": 12, "temperature": 0}
    dry = {"dry_multiplier": 5.0, "dry_allowed_length": 1}
    breakers = {"dry_sequence_breakers": [" ", ",", *"0123456789"]}
    plain, broken, penalized = caller.texts(DIALECT, body, body | dry | breakers, body | dry)

    assert broken == plain
    assert penalized != plain


def test_echo_returns_the_prompt_with_the_completion(caller: Caller) -> None:
    body = {"prompt": LONG.prompt, "max_tokens": 5, "temperature": 0}
    plain, echoed = caller.texts(DIALECT, body, body | {"echo": True})

    assert echoed == LONG.prompt + plain


@each_at_once("name", ["frequency_penalty", "presence_penalty"])
def test_penalties_favor_new_tokens(caller: Caller, name: str) -> None:
    body = {"prompt": COUNTING, "max_tokens": 24, "temperature": 0}
    plain, penalized, off = caller.texts(DIALECT, body, body | {name: 2.0}, body | {name: 0.0})

    assert penalized != plain
    assert off == plain


def test_repetition_penalty_of_one_is_off(caller: Caller) -> None:
    body = {"prompt": COUNTING, "max_tokens": 24, "temperature": 0}
    plain, off, penalized = caller.texts(
        DIALECT, body, *(body | {"repetition_penalty": penalty} for penalty in (1.0, 1.8))
    )

    assert off == plain
    assert penalized != plain


@each_at_once(
    "grammar, pattern",
    [
        ({"type": "regex", "value": "[0-9]{2}-[a-f]"}, "[0-9]{2}-[a-f]"),
        ({"type": "lark", "value": 'start: "left" | "right"'}, "left|right"),
        ({"type": "llguidance", "value": {"grammars": [{"lark_grammar": 'start: "ok"'}]}}, "ok"),
    ],
)
@each_at_once("stream", [False, True])
def test_grammar_of_each_type_holds(
    caller: Caller, grammar: Body, pattern: str, stream: bool
) -> None:
    body = {"prompt": OPEN, "max_tokens": 20, "grammar": grammar}
    text = (
        joined(caller.stream(DIALECT, body)) if stream else text_of(caller.complete(DIALECT, body))
    )

    assert re.fullmatch(pattern, text), text


def test_grammar_of_type_json_schema_holds(caller: Caller) -> None:
    body = {"prompt": OPEN, "max_tokens": 60, "grammar": {"type": "json_schema", "value": SCHEMA}}
    answer = caller.complete(DIALECT, body)

    assert answer["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text_of(answer)), SCHEMA)


def test_logit_bias_moves_the_choice(caller: Caller) -> None:
    [wanted] = ids_of("z")
    body = {"prompt": OPEN, "max_tokens": 3, "temperature": 0, "logit_bias": {str(wanted): 100}}

    assert text_of(caller.complete(DIALECT, body)) == "zzz"


@each_at_once("count", [1, 5, 20])
def test_logprobs_report_so_many_tokens(caller: Caller, count: int) -> None:
    answer = caller.complete(DIALECT, {"prompt": OPEN, "max_tokens": 4, "logprobs": count})

    for top in answer["choices"][0]["logprobs"]["top_logprobs"]:
        assert 1 <= len(top) <= count + 1


def test_min_p_of_one_leaves_the_likeliest_token(caller: Caller) -> None:
    # At every token of this text one is clearly the likeliest.
    body = {"prompt": LONG.prompt, "max_tokens": 20, "seed": 2}
    narrow: list[Body] = [{"temperature": 0}, {"min_p": 1.0}, {"top_k": 1}, {"top_p": 0.000001}]
    greedy, *others = caller.texts(DIALECT, *(body | each for each in narrow))

    assert others == [greedy] * 3


@each_at_once("stop", [" 8", [" 8"], [" 9", " 8"]])
def test_stop_is_a_string_or_several(caller: Caller, stop: Any) -> None:
    body = {"prompt": COUNTING, "max_tokens": 40, "temperature": 0, "stop": stop}

    assert text_of(caller.complete(DIALECT, body)) == " 5, 6, 7,"


@each_at_once("n", [1, 2])
def test_suffix_is_appended_to_the_completion(caller: Caller, n: int) -> None:
    body = {"prompt": COUNTING, "max_tokens": 8, "temperature": 0, "n": n}
    ending = body | {"suffix": " THE END"}
    plain, answer, chunks = at_once(
        lambda: caller.complete(DIALECT, body),
        lambda: caller.complete(DIALECT, ending),
        lambda: caller.stream(DIALECT, ending),
    )
    expected = [text + " THE END" for text in texts_of(plain)]

    assert texts_of(answer) == expected
    assert [joined(chunks, index) for index in range(n)] == expected


TOOL: Body = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_named_tool_is_called_with_arguments_that_match(caller: Caller) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {"prompt": "What is the weather in Paris?\n", "tools": [TOOL], "tool_choice": choice}
    answer = caller.complete(DIALECT, body | {"max_tokens": 100, "temperature": 0})

    [call] = answer["choices"][0]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_choice_none_calls_nothing(caller: Caller) -> None:
    body = {"prompt": COUNTING, "max_tokens": 8, "temperature": 0}
    plain, answer = at_once(
        lambda: caller.complete(DIALECT, body),
        lambda: caller.complete(DIALECT, body | {"tools": [TOOL], "tool_choice": "none"}),
    )

    assert text_of(answer) == text_of(plain)
    assert not answer["choices"][0].get("tool_calls")


def test_truncate_sequence_cuts_the_prompt_instead_of_refusing_it(caller: Caller) -> None:
    prompt = [5] * WINDOW + ids_of(COUNTING)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    response = caller.post(DIALECT, body | {"truncate_sequence": True})

    assert response.status_code == 200
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == WINDOW - 8
    assert response.headers["x-prompt-truncated"] == str(len(prompt) - (WINDOW - 8))
    # The beginning is cut off: the completion continues the end of the prompt.
    assert text_of(response.json()).startswith(" 5")
    assert caller.refused(DIALECT, body)["code"] == "context_length_exceeded"


def test_usage_has_rates(caller: Caller) -> None:
    usage = caller.complete(DIALECT, {"prompt": OPEN, "max_tokens": 4})["usage"]

    names = {"avg_tok_per_sec", "avg_prompt_tok_per_sec", "avg_compl_tok_per_sec"}
    times = {"total_time_sec", "total_prompt_time_sec", "total_completion_time_sec"}
    assert names | times <= set(usage)
    assert usage["total_time_sec"] > 0
