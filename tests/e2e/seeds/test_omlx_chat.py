"""The chat document of oMLX, replayed."""

import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from contract.dialect import Dialect
from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.chat.tools import PARIS, WEATHER, named
from tests.e2e.seeds.calling import (
    CHATS,
    FOLDER,
    Body,
    Caller,
    check_like,
    check_usage,
    documented_answer,
    finishes,
)
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.e2e

DIALECT = "omlx"
WINDOW = 2048
CURL = (FOLDER / "bodies" / "omlx_chat_curl.sh").read_text()
REQUEST: Body = json.loads(CURL.partition("-d '")[2].rstrip().removesuffix("'"))
COUNT: Body = {"messages": [{"role": "user", "content": "Count from 1 to 10."}], "temperature": 0}
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
STORY: Body = {"messages": [{"role": "user", "content": "Write a short story."}]}
OPEN: Body = {"messages": [{"role": "user", "content": "Describe a person as JSON."}]}
"""Its answer has many likely variants."""
SUM: Body = {"messages": [{"role": "user", "content": "What is 27 + 35?"}], "temperature": 0}
THOUGHT = "\n20 + 30 = 50, 7 + 5 = 12, 50 + 12 = 62\n"
SCHEMA: Body = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}


def chat(caller: Caller, body: Body) -> Body:
    """Return a whole response."""
    return caller.complete(DIALECT, body, CHATS)


def message_of(answer: Body) -> Body:
    """Return the message of a response with one choice."""
    [choice] = answer["choices"]
    message: Body = choice["message"]
    return message


def text_for(caller: Caller, body: Body) -> str:
    """Return the text of the response to a request."""
    text: str = message_of(chat(caller, body))["content"]
    return text


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_example_for_curl_gets_the_answer_example(stack: Stack, tmp_path: Path) -> None:
    key = stack.key("documents", allowed_models=(MODEL,), dialect=Dialect.OMLX)
    # The command runs unchanged: curl reads the server's address and the key from a file.
    address = stack.url.removeprefix("http://")
    lines = [
        f'connect-to = "localhost:8000:{address}"',
        f'header = "Authorization: Bearer {key}"',
        'noproxy = "*"',
        "silent",
    ]
    (tmp_path / ".curlrc").write_text("\n".join(lines))
    process = subprocess.run(
        ["bash", "-c", CURL],
        env={"CURL_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=120,
        check=True,
    )

    check_answer_example(json.loads(process.stdout))


def test_example_gets_the_answer_example(caller: Caller) -> None:
    check_answer_example(chat(caller, REQUEST))
    assert text_for(caller, REQUEST | {"temperature": 0}) == "The capital of France is Paris."


def check_answer_example(answer: Body) -> None:
    documented = documented_answer("omlx_chat_response")
    check_like(documented, answer)
    assert message_of(answer).keys() >= message_of(documented).keys()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "your-model"
    assert message_of(answer)["reasoning_content"] is None
    assert message_of(answer)["tool_calls"] is None
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 20
    check_usage(answer["usage"])


def test_stream_ends_with_done(caller: Caller) -> None:
    chunks = caller.stream(DIALECT, COUNT, CHATS)

    first, *others = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert first == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in others) == COUNTED
    assert finishes(chunks) == [(0, "stop")]


def test_stream_options_add_usage(caller: Caller) -> None:
    body = COUNT | {"stream_options": {"include_usage": True}}
    *chunks, extra = caller.stream(DIALECT, body, CHATS)

    assert extra["choices"] == []
    check_usage(extra["usage"])
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    # Without a stream they have no effect, and are no error.
    check_usage(chat(caller, body)["usage"])


@each_at_once("name", ["temperature", "top_p", "min_p"])
def test_sampling_can_be_narrowed_to_the_likeliest_token(caller: Caller, name: str) -> None:
    value = {"temperature": 0, "top_p": 0.000001, "min_p": 1.0}[name]
    body = STORY | {"max_tokens": 20, "seed": 4}

    narrow, greedy = at_once(
        lambda: text_for(caller, body | {name: value}),
        lambda: text_for(caller, body | {"top_k": 1}),
    )
    assert narrow == greedy


def test_max_tokens_default_is_the_rest_of_the_window(caller: Caller) -> None:
    response = caller.post(DIALECT, COUNT, CHATS)

    prompt_tokens = response.json()["usage"]["prompt_tokens"]
    assert response.headers["x-max-tokens-applied"] == str(WINDOW - prompt_tokens)


@each_at_once("stop", [" 8", [" never", " 8"]])
def test_stop_halts_generation(caller: Caller, stop: Any) -> None:
    assert text_for(caller, COUNT | {"stop": stop}) == "1, 2, 3, 4, 5, 6, 7,"


def test_seed_makes_generation_reproducible(caller: Caller) -> None:
    body = STORY | {"max_tokens": 24, "temperature": 1.5}
    first, second, other = at_once(
        *(partial(text_for, caller, body | {"seed": seed}) for seed in (1, 1, 2))
    )

    assert first == second != other


@each_at_once("choice", [None, "auto", named(WEATHER), "none"])
def test_tools_are_called(caller: Caller, choice: Any) -> None:
    body: Body = {"messages": [{"role": "user", "content": PARIS}], "temperature": 0}
    asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 60}
    message = message_of(chat(caller, body | asked))

    if choice == "none":
        assert message["tool_calls"] is None
        return
    [call] = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


@each_at_once(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    ],
)
def test_response_format_gives_json(caller: Caller, response_format: Body) -> None:
    body = OPEN | {"temperature": 0, "response_format": response_format}
    answer = chat(caller, body | {"max_tokens": 400})

    assert answer["choices"][0]["finish_reason"] == "stop"
    value = json.loads(message_of(answer)["content"])
    assert isinstance(value, dict)
    if "json_schema" in response_format:
        jsonschema.validate(value, SCHEMA)


@each_at_once(
    "structure, pattern",
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["red", "blue"]}, "red|blue"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json": SCHEMA}, r'\{"age": ?\d+\}'),
    ],
)
def test_structured_outputs_hold(caller: Caller, structure: Body, pattern: str) -> None:
    body = STORY | {"max_tokens": 40, "structured_outputs": structure, "seed": 1}

    assert re.fullmatch(pattern, text_for(caller, body))


def test_template_receives_enable_thinking(caller: Caller) -> None:
    message = message_of(chat(caller, SUM | {"chat_template_kwargs": {"enable_thinking": True}}))

    assert message["reasoning_content"] == THOUGHT
    assert message["content"].strip() == "27 + 35 = 62"


def test_argument_unused_by_the_template_is_reported(caller: Caller) -> None:
    body = SUM | {"chat_template_kwargs": {"reasoning_effort": "low"}, "max_tokens": 4}
    response = caller.post(DIALECT, body, CHATS)

    assert response.status_code == 200
    ignored = response.headers["x-ignored-params"]
    assert ignored == "chat_template_kwargs.reasoning_effort"


@each_at_once("budget", [None, 10])
def test_thinking_budget_bounds_reasoning(caller: Caller, budget: int | None) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": budget}
    reasoning = message_of(chat(caller, SUM | {"max_tokens": 100} | thinking))["reasoning_content"]

    assert THOUGHT.startswith(reasoning)
    assert (reasoning == THOUGHT) is (budget is None)


@each_at_once("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_change_what_repeats(caller: Caller, name: str) -> None:
    body = STORY | {"max_tokens": 40, "temperature": 1.5, "seed": 3}
    penalized, plain = at_once(
        lambda: text_for(caller, body | {name: 2.0}), lambda: text_for(caller, body)
    )

    assert penalized != plain


def test_xtc_excludes_top_choices(caller: Caller) -> None:
    body = OPEN | {"max_tokens": 40, "logprobs": True, "top_logprobs": 1, "seed": 3}
    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.05}

    def tops(answer: Body) -> float:
        tokens = answer["choices"][0]["logprobs"]["content"]
        hits = [token["logprob"] >= token["top_logprobs"][0]["logprob"] for token in tokens]
        return float(sum(hits)) / len(hits)

    on, off = at_once(lambda: chat(caller, body | xtc), lambda: chat(caller, body))
    assert tops(on) < tops(off)


def test_usage_has_times_in_seconds(caller: Caller) -> None:
    usage = chat(caller, COUNT)["usage"]

    times = {"time_to_first_token", "total_time", "prompt_eval_duration", "generation_duration"}
    rates = {"prompt_tokens_per_second", "generation_tokens_per_second"}
    assert times | rates | {"cached_tokens"} <= set(usage)
    assert 0 < usage["time_to_first_token"] <= usage["total_time"] < 60
