"""`POST /v1/completions`: rules that concern more than one value."""

import itertools
from typing import Any

import pytest

from gateway.dialects.completions import (
    REFUSED,
    CompletionRequest,
    UnsupportedParameterError,
    to_generation_request,
)
from gateway.dialects.request import GenerationRequest
from gateway.dialects.wire import validate
from gateway.errors import InvalidParameterError


def read(**parameters: Any) -> GenerationRequest:
    """Take a body through the dialect, with room for `max_prompts` prompts."""
    max_prompts = parameters.pop("max_prompts", 1024)
    body = {"model": "m", "prompt": "x"} | parameters
    return to_generation_request(validate(CompletionRequest, body), max_prompts=max_prompts)


def refusal(**parameters: Any) -> InvalidParameterError:
    """Return why a body is refused."""
    with pytest.raises(InvalidParameterError) as caught:
        read(**parameters)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        ("", [""]),
        (["a", "b", ""], ["a", "b", ""]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1, "a", 2], [[1, "a", 2]]),
        (["a", 1], [["a", 1]]),
        ([[1, "a"], "b", [2]], [[1, "a"], "b", [2]]),
    ],
    ids=[
        "text",
        "empty-text",
        "texts",
        "token-ids",
        "several-token-ids",
        "mixed",
        "mixed-text-first",
        "several-mixed",
    ],
)
def test_prompt_is_taken_by_its_shape(prompt: Any, expected: list[Any]) -> None:
    assert read(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "'prompt' must be a string or an array. Given: 5."),
        ({"a": 1}, "'prompt' must be a string or an array. Given: {\"a\":1}."),
        (True, "'prompt' must be a string or an array. Given: true."),
        ([], "'prompt' must not be empty."),
        ([[]], "'prompt[0]' must not be empty."),
        ([[1], []], "'prompt[1]' must not be empty."),
        ([1.5], "'prompt[0]' must be a token id or a string. Given: 1.5."),
        ([True], "'prompt[0]' must be a token id or a string. Given: true."),
        ([1, None], "'prompt[1]' must be a token id or a string. Given: null."),
        ([{"a": 1}], "'prompt[0]' must be a token id or a string. Given: {\"a\":1}."),
        ([[1], 5], "'prompt[1]' must be a string or an array of token ids. Given: 5."),
        ([[1], [2, [3]]], "'prompt[1][1]' must be a token id or a string. Given: [3]."),
    ],
)
def test_prompt_of_another_shape_is_refused_naming_the_place(prompt: Any, message: str) -> None:
    error = refusal(prompt=prompt)
    assert (error.message, error.param) == (message, "prompt")


def test_more_prompts_than_allowed_are_refused() -> None:
    assert len(read(prompt=["a"] * 4, max_prompts=4).prompts) == 4
    error = refusal(prompt=["a"] * 5, max_prompts=4)
    assert error.message.startswith("'prompt' must have at most 4 prompts")
    assert "5 prompts" in error.message


@pytest.mark.parametrize("fan_out", [{"n": 3}, {"best_of": 3}])
def test_sequences_count_like_prompts(fan_out: dict[str, int]) -> None:
    assert read(prompt=["a"] * 2, max_prompts=6, **fan_out)
    assert "best_of 3" in refusal(prompt=["a"] * 2, max_prompts=5, **fan_out).message


def test_best_of_is_n_unless_given() -> None:
    assert read(n=3).best_of == 3
    assert read(n=2, best_of=5).best_of == 5


def test_best_of_below_n_is_refused() -> None:
    error = refusal(n=3, best_of=2)
    assert (error.message, error.param) == ("'best_of' must be >= n (3). Given: 2.", "best_of")


def test_best_of_above_n_cannot_be_streamed() -> None:
    assert read(n=3, best_of=3, stream=True).stream
    error = refusal(n=2, best_of=3, stream=True)
    assert error.message == "'best_of' larger than n (2) cannot be streamed. Given: 3."
    assert error.param == "best_of"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, []), ("x", ["x"]), ([], []), (["a", "b", "c", "\n"], ["a", "b", "c", "\n"])],
)
def test_stop_is_one_string_or_up_to_four(stop: Any, expected: list[str]) -> None:
    assert read(stop=stop).stop == expected


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (5, "'stop' must be a string or an array of strings. Given: 5."),
        (["a", 5], "'stop' must be a string or an array of strings. Given: [\"a\",5]."),
        (["a"] * 5, "'stop' must have at most 4 strings. Given: 5."),
        ("", "'stop' must have strings of 1 to 512 characters. Given: 0 characters."),
        (["a", ""], "'stop' must have strings of 1 to 512 characters. Given: 0 characters."),
        ("x" * 513, "'stop' must have strings of 1 to 512 characters. Given: 513 characters."),
    ],
    ids=["number", "mixed", "five", "empty", "empty-in-list", "long"],
)
def test_stop_beyond_its_rules_is_refused(stop: Any, message: str) -> None:
    error = refusal(stop=stop)
    assert (error.message, error.param) == (message, "stop")


def test_no_tokens_are_allowed_with_echo_only() -> None:
    assert read(max_tokens=0, echo=True).max_tokens == 0
    error = refusal(max_tokens=0)
    assert error.message == "'max_tokens' must be >= 1, unless 'echo' is true. Given: 0."


def test_stream_options_need_a_stream() -> None:
    error = refusal(stream_options={"include_usage": True})
    assert error.message == "'stream_options' is only allowed when 'stream' is true."
    assert error.param == "stream_options"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": None}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
        ({"include_usage": True, "include_obfuscation": True}, True),
    ],
)
def test_include_usage_is_read(options: dict[str, Any] | None, expected: bool) -> None:
    assert read(stream=True, stream_options=options).include_usage is expected


def test_include_usage_of_a_wrong_type_is_refused() -> None:
    error = refusal(stream=True, stream_options={"include_usage": 1})
    assert error.message == "'stream_options.include_usage' must be a boolean. Given: 1."


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_parameter_that_would_constrain_the_answer_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        read(**{name: "something"})
    assert caught.value.message == f"'{name}' is not supported."
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


NEUTRAL: list[tuple[str, Any]] = [
    *itertools.product(sorted(REFUSED), ([], {}, "", False)),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("response_format", {"type": "text"}),
]


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_refused_parameter_that_asks_for_nothing_is_ignored(name: str, value: Any) -> None:
    assert read(**{name: value}).ignored_parameters == (name,)


def test_unknown_parameters_are_ignored_and_named_in_order() -> None:
    request = read(zeta=1, alpha={"b": 2}, model_config=1, absent=None)
    assert request.ignored_parameters == ("alpha", "model_config", "zeta")
