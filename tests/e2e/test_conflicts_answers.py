"""Conflicts of the served APIs about structure and the form of responses."""

import json
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.examples import COUNTING, ENDING, OPEN
from tests.e2e.seeds.arithmetic import begins_sentence
from tests.e2e.seeds.calling import (
    LLAMACPP,
    Body,
    Caller,
    check_usage,
    each_dialect,
    example,
    joined,
    text_of,
)
from tests.support.stack import MODEL

pytestmark = pytest.mark.e2e

SCHEMA: Body = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
BY_FIVE = ("openai", "fireworks", "fireworks-2026")


@each_dialect("most_logprobs", "has_scored_objects")
def test_conflict_11_type_of_logprobs(caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 3, "seed": 2}

    def tops(value: Any) -> list[Any] | None:
        [choice] = caller.complete(dialect, body | {"logprobs": value})["choices"]
        top: list[Any] | None = choice["logprobs"] and choice["logprobs"]["top_logprobs"]
        return top

    assert tops(None) is None
    assert tops(False) is None
    if dialect == "fireworks-2026":
        [choice] = caller.complete(dialect, body | {"logprobs": True})["choices"]
        tokens = [each["token"] for each in choice["logprobs"]["content"]]
        assert "".join(tokens).startswith(choice["text"])
    else:
        assert tops(True) == tops(1)
    assert all(tops(5) or [])
    if dialect in BY_FIVE:
        assert "5" in caller.refused(dialect, body | {"logprobs": 6})["message"]
    else:
        assert all(tops(20) or [])
        assert "20" in caller.refused(dialect, body | {"logprobs": 21})["message"]


@each_dialect()
@each_at_once(
    "grammar",
    [
        'root ::= "on" | "off"',
        {"type": "regex", "value": "on|off"},
        {"type": "lark", "value": 'start: "on" | "off"'},
    ],
)
def test_conflict_12_type_of_grammar(caller: Caller, dialect: str, grammar: Any) -> None:
    body = {"prompt": OPEN, "max_tokens": 8, "grammar": grammar}

    assert text_of(caller.complete(dialect, body)) in ("on", "off")


@each_dialect()
def test_conflict_12_grammar_inside_response_format(caller: Caller, dialect: str) -> None:
    response_format = {"type": "grammar", "grammar": 'root ::= "on" | "off"'}
    body = {"prompt": OPEN, "max_tokens": 8, "response_format": response_format}

    assert text_of(caller.complete(dialect, body)) in ("on", "off")


@each_dialect()
def test_conflict_13_single_quotes_in_grammars(caller: Caller, dialect: str) -> None:
    single = {**example("llamacpp_grammar"), "model": MODEL, "seed": 3}
    double = single | {"grammar": single["grammar"].replace("'", '"')}
    text, same = caller.texts(dialect, single, double)

    assert text
    assert begins_sentence(text)
    assert text == same


@each_dialect()
@each_at_once(
    "response_format",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
    ],
)
def test_conflict_14_schema_in_response_format(
    caller: Caller, dialect: str, response_format: Body
) -> None:
    body = {"prompt": OPEN, "max_tokens": 30, "response_format": response_format}

    jsonschema.validate(json.loads(text_of(caller.complete(dialect, body))), SCHEMA)


@each_dialect("keeps_usage_in_final_chunk")
@each_at_once("n", [1, 3])
def test_conflict_17_usage_in_streams(caller: Caller, dialect: str, n: int) -> None:
    body = {"prompt": OPEN, "max_tokens": 4, "n": n}
    *chunks, last = caller.stream(dialect, body)
    check_usage(last["usage"])
    assert last["choices"][0]["finish_reason"] is not None
    assert [chunk.get("usage") for chunk in chunks] == [None] * len(chunks)

    *chunks, extra = caller.stream(dialect, body | {"stream_options": {"include_usage": True}})
    assert extra["choices"] == []
    check_usage(extra["usage"])
    counted = [chunk for chunk in chunks if chunk["usage"] is not None]
    if dialect.startswith("fireworks"):
        assert counted == [chunks[-1]]
        assert counted[0]["usage"] == extra["usage"]
    else:
        assert counted == []


@each_dialect("error_style")
def test_conflict_18_body_of_errors(caller: Caller, dialect: str) -> None:
    error = caller.refused(dialect, {"prompt": OPEN, "temperature": 3})

    assert "temperature" in error["message"]
    if dialect in LLAMACPP:
        assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    elif dialect == "vllm":
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert error["param"] == "temperature"
    else:
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
        assert error["param"] == "temperature"


@each_dialect("takes_any_model_name", "error_style")
def test_conflict_18_unknown_model(caller: Caller, dialect: str) -> None:
    # With two models, another name means neither.
    response = caller.post(dialect, {"prompt": OPEN, "model": "nobody/nothing", "max_tokens": 1})

    if dialect in LLAMACPP:
        assert response.status_code == 200
    else:
        assert response.status_code == 404
        code = response.json()["error"]["code"]
        assert code == (404 if dialect == "vllm" else "model_not_found")


@each_dialect()
def test_conflict_19_reasoning_stays_in_the_text(caller: Caller, dialect: str) -> None:
    """A completion is the raw text: no part of it becomes a separate field."""
    prompt = "<|user|>Think: what is 27 + 35?\n<|assistant|>"
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "repetition_penalty": 1.0}
    answer, chunks = at_once(
        lambda: caller.complete(dialect, body), lambda: caller.stream(dialect, body)
    )

    assert text_of(answer).startswith("<think>")
    assert "</think>" in text_of(answer)
    assert not [name for name in answer["choices"][0] if name.startswith("reasoning")]
    assert joined(chunks) == text_of(answer)


def timings_of(dialect: str, answer: Body) -> set[str]:
    """Return the names of the times in a response, wherever the dialect has them."""
    places: dict[str, Any] = {
        "fireworks": answer.get("perf_metrics"),
        "llamacpp": answer.get("timings"),
        "mistralrs": answer["usage"],
        "omlx": answer["usage"],
        "vllm": answer.get("metrics"),
    }
    return set(places.get(dialect.removesuffix("-2026")) or {})


TIMES = {
    "fireworks": {"server-time-to-first-token", "server-processing-time", "prompt-tokens"},
    "llamacpp": {"prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "predicted_per_second"},
    "mistralrs": {"avg_tok_per_sec", "total_time_sec", "total_prompt_time_sec"},
    "omlx": {"time_to_first_token", "total_time", "generation_tokens_per_second"},
    "vllm": {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms"},
}


@each_dialect("timing")
def test_conflict_20_times(caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 4, "perf_metrics_in_response": True}
    expected = TIMES.get(dialect.removesuffix("-2026"), set())

    assert expected <= timings_of(dialect, caller.complete(dialect, body))
    *chunks, last = caller.stream(dialect, body)
    assert expected <= timings_of(dialect, last)
    for name in ("timings", "perf_metrics", "metrics"):
        assert not [chunk for chunk in chunks if chunk.get(name)]


def test_conflict_20_fireworks_headers(caller: Caller) -> None:
    headers = caller.post("fireworks", {"prompt": OPEN, "max_tokens": 4}).headers

    assert re.fullmatch(r"\d+", headers["fireworks-prompt-tokens"])
    assert float(headers["fireworks-server-time-to-first-token"]) > 0


@each_dialect("uses_sampler_chain")
def test_answers_of_every_dialect_are_the_same_text(caller: Caller, dialect: str) -> None:
    """A dialect changes defaults and forms, never the meaning of a fully specified request."""
    body = {"prompt": ENDING.prompt, "max_tokens": 40, "temperature": 0, "repetition_penalty": 1.0}
    [reference], [text] = at_once(
        lambda: caller.texts("openai", body), lambda: caller.texts(dialect, body)
    )

    assert text == reference
    assert reference == ENDING.completion
    assert COUNTING not in reference
