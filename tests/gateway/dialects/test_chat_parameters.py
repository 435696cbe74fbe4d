"""Parameters of chats except messages, tools and reasoning: differences from completions."""

from typing import Any

import pytest

from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.parameters import REJECTED_BY_CHATS
from gateway.dialects.profile import ContextLengthBehavior, Profile
from gateway.dialects.request import FIT
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import USER, chat_refusal, read_chat, read_chat_body
from tests.gateway.dialects.reading import (
    EVERY_PROFILE,
    FIREWORKS,
    LLAMACPP,
    OMLX,
    OPENAI,
    VLLM,
    unsupported,
)
from tests.support.cases import all_cases

ONLY_OF_COMPLETIONS = {
    "add_special_tokens",
    "best_of",
    "echo",
    "echo_last",
    "images",
    "prompt",
    "suffix",
}


def test_chats_have_all_parameters_of_completions_except_prompt_parameters() -> None:
    of_completions = set(CompletionRequest.model_fields)
    assert of_completions - set(ChatCompletionRequest.model_fields) == ONLY_OF_COMPLETIONS


def test_chat_has_one_prompt_that_is_rendered_later() -> None:
    request = read_chat(n=3, stop="x", seed=5)
    assert (request.prompts, request.images, request.adds_special_tokens) == ([""], [[]], False)
    assert (request.n, request.best_of, request.stop, request.sampling.seed) == (3, 3, ["x"], 5)
    assert (request.echo, request.suffix) == (False, "")


@all_cases("profile", EVERY_PROFILE)
def test_default_max_tokens_is_what_fits_unless_the_dialect_has_another(profile: Profile) -> None:
    assert read_chat(profile).max_tokens == (32_768 if profile is OMLX else -1)


@all_cases("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_length_has_three_names(name: str) -> None:
    assert read_chat(**{name: 7}).max_tokens == 7
    assert read_chat(LLAMACPP, **{name: 0}).max_tokens == 0
    error = chat_refusal(VLLM, **{name: 0})
    assert error.message == f"'{name}' must be at least 1, or -1. Given: 0."


def test_names_of_the_length_must_have_equal_values() -> None:
    assert chat_refusal(max_tokens=5, max_completion_tokens=6).param == "max_completion_tokens"
    assert read_chat(LLAMACPP, max_tokens=5, n_predict=6).max_tokens == 6


def test_context_window_rule_is_that_of_the_dialect() -> None:
    assert read_chat(OPENAI).context_length_behavior is ContextLengthBehavior.ERROR
    assert read_chat(OMLX).context_length_behavior is ContextLengthBehavior.TRUNCATE
    assert read_chat(truncate_sequence=True).prompt_tokens_kept == FIT
    assert read_chat(truncate_prompt_tokens=9).prompt_tokens_kept == 9


def test_choices_are_bounded() -> None:
    body = {"model": "m", "messages": [USER], "n_cmpl": 5}
    assert read_chat_body(body, max_prompts=5).n == 5
    assert chat_refusal(n=129).message == "'n' must be at most 128. Given: 129."
    assert chat_refusal(n=0).message == "'n' must be at least 1. Given: 0."
    assert chat_refusal(n=2, n_cmpl=3).param == "n_cmpl"


def test_choices_are_bounded_like_prompts() -> None:
    wire = {"model": "m", "messages": [USER], "n": 5}
    with pytest.raises(BadRequestError, match=r"'n' must be at most 4\. Given: 5\."):
        read_chat_body(wire, max_prompts=4)


@all_cases(
    ("given", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": True, "top_logprobs": 3.0}, 3),
        ({"logprobs": 3}, 3),
        ({"logprobs": 0}, 0),
        ({"logprobs": 3, "top_logprobs": 3}, 3),
        ({"n_probs": 3}, 3),
        ({"n_probs": 3, "top_logprobs": 3}, 3),
        ({"n_probs": 0}, None),
    ],
)
def test_logprobs_are_read(given: dict[str, Any], expected: int | None) -> None:
    assert read_chat(**given).logprobs == expected


@all_cases(
    ("profile", "given", "message"),
    [
        (OPENAI, {"top_logprobs": 2}, "'top_logprobs' requires 'logprobs' true. Given: 2."),
        (
            OPENAI,
            {"logprobs": False, "top_logprobs": 2},
            "'top_logprobs' requires 'logprobs' true. Given: 2.",
        ),
        (
            OPENAI,
            {"logprobs": True, "top_logprobs": 21},
            "'top_logprobs' must be at most 20. Given: 21.",
        ),
        (
            OPENAI,
            {"logprobs": True, "top_logprobs": -1},
            "'top_logprobs' must be at least 0. Given: -1.",
        ),
        (
            FIREWORKS,
            {"logprobs": True, "top_logprobs": 6},
            "'top_logprobs' must be at most 5. Given: 6.",
        ),
        (FIREWORKS, {"logprobs": 6}, "'logprobs' must be at most 5. Given: 6."),
        (OPENAI, {"logprobs": -1}, "'logprobs' must be at least 0. Given: -1."),
        (OPENAI, {"n_probs": 21}, "'n_probs' must be at most 20. Given: 21."),
        (OPENAI, {"logprobs": "5"}, "'logprobs' must be an integer or a boolean. Given: \"5\"."),
        (OPENAI, {"logprobs": 2, "top_logprobs": 3}, "'logprobs' and 'top_logprobs' are the same"),
    ],
)
def test_logprobs_beyond_their_rules_are_refused(
    profile: Profile, given: dict[str, Any], message: str
) -> None:
    assert chat_refusal(profile, **given).message.startswith(message)


REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "chat_template": "{{ messages }}",
    "documents": [{"text": "a"}],
    "echo": True,
    "images": ["x"],
    "lora": [{"id": 0}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "a"},
    "prompt": "Hello",
    "reasoning_format": "none",
    "reasoning_history": "disabled",
    "separate_reasoning": False,
    "speculation": "a",
    "store": True,
    "suffix": "end",
    "web_search_options": {"search_context_size": "low"},
}


@all_cases("name", REFUSED)
def test_unsupported_value_that_would_change_the_response_is_refused(name: str) -> None:
    error = chat_refusal(**{name: REFUSED[name]})
    assert error.message == unsupported(name, REFUSED[name], REJECTED_BY_CHATS[name])
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_refusal_names_the_served_values() -> None:
    error = chat_refusal(modalities=["text", "audio"])
    assert error.message == (
        '\'modalities\' must be ["text"]; other values are not supported. Given: ["text","audio"]. '
        "Models return only text."
    )


@all_cases(
    "given",
    [
        {"store": False},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"reasoning_format": "auto"},
        {"suffix": ""},
        {"separate_reasoning": True},
        dict.fromkeys(REFUSED),
    ],
)
def test_unsupported_parameter_at_its_neutral_value_is_accepted(given: dict[str, Any]) -> None:
    assert read_chat(**given).ignored_parameters == ()


def test_labels_have_no_effect() -> None:
    request = read_chat(
        user="u", metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k", session_id="x"
    )
    assert request.ignored_parameters == ("session_id",)


@all_cases(
    ("metadata", "message"),
    [
        ([], "'metadata' must be an object. Given: []."),
        ({str(n): "" for n in range(17)}, "'metadata' must have at most 16 entries. Given: 17."),
        (
            {"a" * 65: ""},
            "'metadata' must have keys of at most 64 characters. Given: 65 characters.",
        ),
        ({"a": 5}, "'metadata.a' must be a string of at most 512 characters. Given: 5."),
        ({"a": "b" * 513}, "'metadata.a' must be a string of at most 512 characters. Given: "),
    ],
)
def test_metadata_out_of_bounds_are_refused(metadata: Any, message: str) -> None:
    assert chat_refusal(metadata=metadata).message.startswith(message)


def test_parameters_without_effect_are_named() -> None:
    request = read_chat(zeta=1, stream=True, stream_options={"x": 1}, alpha=2)
    assert request.ignored_parameters == ("alpha", "stream_options.x", "zeta")


def test_model_is_needed_where_the_dialect_needs_one() -> None:
    assert chat_refusal(OPENAI, model=None).code == "missing_required_parameter"
    assert read_chat(VLLM, model=None).model is None
