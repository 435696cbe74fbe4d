"""`POST /v1/completions`: rules that concern more than one value."""

from typing import Any

import msgspec
import pytest

from gateway.dialects.profile import PROFILES, Profile
from gateway.dialects.request import FIT
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import PNG_URI, chat_refusal, read_chat
from tests.gateway.dialects.reading import (
    EVERY_PROFILE,
    FIREWORKS,
    LLAMACPP,
    MISTRALRS,
    OMLX,
    OPENAI,
    VLLM,
    read,
    read_body,
    refusal,
)
from tests.support.cases import all_cases


@all_cases(
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
        ({"prompt_string": "a", "multimodal_data": []}, ["a"]),
        ([{"prompt_string": "a"}, "b", [2]], ["a", "b", [2]]),
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
        "object",
        "several-with-object",
    ],
)
def test_prompt_is_read_by_its_type(prompt: Any, expected: list[Any]) -> None:
    for profile in PROFILES.values():
        assert read(profile, prompt=prompt).prompts == expected


@all_cases(
    ("prompt", "message"),
    [
        (5, "'prompt' must be a string or an array of token ids. Given: 5."),
        ({"a": 1}, "'prompt' must have only the text 'prompt_string'. Given: {\"a\":1}."),
        (True, "'prompt' must be a string or an array of token ids. Given: true."),
        ([], "'prompt' must not be empty."),
        ([[]], "'prompt[0]' must not be empty."),
        ([[1], []], "'prompt[1]' must not be empty."),
        ([1.5], "'prompt[0]' must be a token id or a string. Given: 1.5."),
        ([True], "'prompt[0]' must be a token id or a string. Given: true."),
        ([1, None], "'prompt[1]' must be a token id or a string. Given: null."),
        ([{"a": 1}], "'prompt[0]' must have only the text 'prompt_string'. Given: {\"a\":1}."),
        (
            ["a", {"prompt_string": 5}],
            "'prompt[1]' must have only the text 'prompt_string'. Given: {\"prompt_string\":5}.",
        ),
        (
            {"prompt_string": "a", "b": 1},
            (
                "'prompt' must have only the text 'prompt_string'. Given: "
                '{"prompt_string":"a","b":1}.'
            ),
        ),
        (
            {"prompt_string": "a", "multimodal_data": ["x"]},
            "'prompt.multimodal_data' is not supported. Use 'images' (in chats 'messages').",
        ),
        ([[1], 5], "'prompt[1]' must be a string or an array of token ids. Given: 5."),
        ([[1], [2, [3]]], "'prompt[1][1]' must be a token id or a string. Given: [3]."),
    ],
)
def test_prompt_of_a_wrong_type_is_refused_naming_the_place(prompt: Any, message: str) -> None:
    error = refusal(prompt=prompt)
    assert error.message == message
    assert (error.param or "").partition(".")[0] == "prompt"


def test_more_prompts_than_allowed_are_refused() -> None:
    body = {"model": "m", "prompt": ["a"] * 5}
    assert len(read_body(body, max_prompts=5).prompts) == 5
    with pytest.raises(BadRequestError, match=r"at most 4 prompts.*Given: 5 prompts"):
        read_body(body, max_prompts=4)


@all_cases("fan_out", [{"n": 3}, {"best_of": 3}, {"n_cmpl": 3}])
def test_sequences_count_like_prompts(fan_out: dict[str, int]) -> None:
    body = {"model": "m", "prompt": ["a"] * 2, **fan_out}
    assert read_body(body, max_prompts=6)
    with pytest.raises(BadRequestError, match="best_of 3"):
        read_body(body, max_prompts=5)


def test_best_of_is_n_unless_given() -> None:
    assert read(n=3).best_of == 3
    assert read(n=2, best_of=5).best_of == 5


def test_best_of_below_n_is_refused() -> None:
    error = refusal(n=3, best_of=2)
    assert (error.message, error.param) == (
        "'best_of' must be at least n (3). Given: 2.",
        "best_of",
    )


def test_best_of_above_n_cannot_be_streamed() -> None:
    assert read(n=3, best_of=3, stream=True).stream
    error = refusal(n=2, best_of=3, stream=True)
    assert error.message == "'best_of' must equal n (2) if 'stream' is true. Given: 3."
    assert error.param == "best_of"


@all_cases(
    ("stop", "expected"),
    [(None, []), ("x", ["x"]), ([], []), (["a", "b", "c", "\n"], ["a", "b", "c", "\n"])],
)
def test_stop_is_one_string_or_a_list(stop: Any, expected: list[str]) -> None:
    assert read(stop=stop).stop == expected


@all_cases(
    ("profile", "most"),
    [(OPENAI, 4), (FIREWORKS, 64), (LLAMACPP, 64), (MISTRALRS, 64), (OMLX, 64), (VLLM, 64)],
)
def test_number_of_stop_strings_is_bounded_by_the_dialect(profile: Profile, most: int) -> None:
    assert len(read(profile, stop=["a"] * most).stop) == most
    error = refusal(profile, stop=["a"] * (most + 1))
    if profile is OPENAI:
        assert error.message == (
            "'stop' must have at most 4 strings in dialect openai. Given: 5. Other dialects allow "
            "64: select one by the header X-Api-Dialect, or ask the operator for another default."
        )
    else:
        assert error.message == f"'stop' must have at most {most} strings. Given: {most + 1}."


@all_cases(
    ("stop", "message"),
    [
        (5, "'stop' must be a string or an array of strings. Given: 5."),
        (["a", 5], "'stop' must be a string or an array of strings. Given: [\"a\",5]."),
        ("", "'stop' must have strings of 1 to 512 characters. Given: 0 characters."),
        (["a", ""], "'stop' must have strings of 1 to 512 characters. Given: 0 characters."),
        ("x" * 513, "'stop' must have strings of 1 to 512 characters. Given: 513 characters."),
    ],
    ids=["number", "mixed", "empty", "empty-in-list", "long"],
)
def test_invalid_stop_is_refused(stop: Any, message: str) -> None:
    error = refusal(stop=stop)
    assert (error.message, error.param) == (message, "stop")


@all_cases("profile", [OPENAI, FIREWORKS, MISTRALRS, OMLX, VLLM])
def test_no_tokens_are_allowed_with_echo_only(profile: Profile) -> None:
    assert read(profile, max_tokens=0, echo=True).max_tokens == 0
    assert read(profile, max_tokens=0, echo_last=2).max_tokens == 0
    error = refusal(profile, max_tokens=0)
    assert error.message == "'max_tokens' must be at least 1, unless 'echo' is true. Given: 0."
    assert refusal(profile, max_tokens=0, echo=True, echo_last=0).param == "max_tokens"
    assert refusal(profile, n_predict=0).param == "n_predict"


def test_no_tokens_are_allowed_without_echo_in_llamacpp() -> None:
    assert read(LLAMACPP, max_tokens=0).max_tokens == 0


@all_cases("profile", EVERY_PROFILE)
def test_max_tokens_may_be_all_that_fit_in_every_dialect(profile: Profile) -> None:
    assert read(profile, max_tokens=-1).max_tokens == -1


@all_cases(
    ("given", "expected"),
    [
        ({}, (False, None)),
        ({"echo": True}, (True, None)),
        ({"echo": True, "echo_last": 3}, (True, 3)),
        ({"echo_last": 3}, (True, 3)),
        ({"echo": True, "echo_last": 0}, (False, None)),
    ],
)
def test_echo_and_echo_last_are_read(
    given: dict[str, Any], expected: tuple[bool, int | None]
) -> None:
    request = read(**given)
    assert (request.echo, request.echo_last) == expected


@all_cases(
    ("given", "expected"),
    [
        ({}, None),
        ({"truncate_sequence": False}, None),
        ({"truncate_sequence": True}, FIT),
        ({"truncate_prompt_tokens": -1}, FIT),
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate_prompt_tokens": 7, "truncate_sequence": True}, 7),
    ],
)
def test_conflict_03_prompt_is_cut_on_request_only(
    given: dict[str, Any], expected: int | None
) -> None:
    for profile in PROFILES.values():
        assert read(profile, **given).prompt_tokens_kept == expected


def test_side_of_truncation_is_read_and_named_if_nothing_is_truncated() -> None:
    for given, keeps_start, ignored in (
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, False, ()),
        ({"truncate_prompt_tokens": 7, "truncation_side": "right"}, True, ()),
        ({"truncate_sequence": True, "truncation_side": "right"}, True, ()),
        ({"truncation_side": "left"}, False, ()),
        ({"truncation_side": "right"}, True, ("truncation_side",)),
    ):
        for read_any in (read, read_chat):
            request = read_any(**given)
            assert (request.keeps_prompt_start, request.ignored_parameters) == (
                keeps_start,
                ignored,
            )


def test_prompt_logprobs_of_streams_and_images_are_refused() -> None:
    chat_image = {"role": "user", "content": [{"type": "image_url", "image_url": PNG_URI}]}
    for reader, refusing, image in (
        (read, refusal, {"prompt": "<image>", "images": [PNG_URI]}),
        (read_chat, chat_refusal, {"messages": [chat_image]}),
    ):
        assert reader(prompt_logprobs=0, stream=True).prompt_logprobs == 0
        assert reader(prompt_logprobs=20).prompt_logprobs == 20
        error = refusing(prompt_logprobs=1, stream=True)
        assert error.message == "'prompt_logprobs' must be 0 if 'stream' is true. Given: 1."
        assert "prompt_logprobs" in refusing(prompt_logprobs=0, **image).message


def test_truncation_to_no_prompt_token_is_refused() -> None:
    error = refusal(truncate_prompt_tokens=0)
    assert error.message == "'truncate_prompt_tokens' must be at least 1, or -1. Given: 0."
    assert error.param == "truncate_prompt_tokens"


@all_cases("profile", EVERY_PROFILE)
def test_both_rules_for_a_full_context_window_compose(profile: Profile) -> None:
    request = read(profile, truncate_sequence=True, context_length_exceeded_behavior="truncate")
    assert request.prompt_tokens_kept == FIT
    assert request.context_length_behavior == "truncate"


def test_infill_needs_text_and_refuses_echo() -> None:
    assert read(suffix="end").suffix == "end"
    assert read(suffix="").suffix == ""
    assert read(suffix="", echo=True, prompt=[1]).suffix == ""
    assert refusal(suffix="end", echo=True).message == "'suffix' cannot be combined with 'echo'."
    assert refusal(suffix="end", echo_last=1).param == "suffix"
    for prompt in ([1, 2], [["a", 1]], [[1], "a"]):
        error = refusal(suffix="end", prompt=prompt)
        assert error.message == "'suffix' requires prompts of text, not of token ids."
        assert error.param == "suffix"


def test_literal_suffix_combines_with_everything() -> None:
    request = read(MISTRALRS, suffix="end", echo=True, prompt=[1, 2])
    assert request.suffix == "end"


ALIASES: list[tuple[str, str, Any, Any]] = [
    ("max_tokens", "max_completion_tokens", 5, 6),
    ("max_tokens", "n_predict", 5, 6),
    ("max_completion_tokens", "n_predict", 5, 6),
    ("n", "n_cmpl", 2, 3),
    ("logprobs", "n_probs", 2, 3),
    ("repetition_penalty", "repeat_penalty", 1.2, 1.3),
    ("prompt_cache_isolation_key", "cache_salt", "a", "b"),
]


@all_cases(("name", "other", "value", "unequal"), ALIASES)
def test_names_of_one_parameter_mean_the_same_and_must_agree(
    name: str, other: str, value: Any, unequal: Any
) -> None:
    for profile in PROFILES.values():
        expected, second, both, neither = (
            # Only errors call the maximum of tokens by the client's name.
            msgspec.structs.replace(read(profile, seed=1, **given), max_tokens_param="")
            for given in ({name: value}, {other: value}, {name: value, other: value}, {})
        )
        assert second == both == expected
        assert expected != neither
        if other == "n_predict" and profile.prefers_n_predict:
            continue
        error = refusal(profile, **{name: value, other: unequal})
        assert f"'{name}' and '{other}' are the same parameter and must be equal." in error.message
        assert error.param == other


def test_n_predict_wins_in_llamacpp() -> None:
    assert read(LLAMACPP, n_predict=5, max_tokens=6).max_tokens == 5
    assert read(LLAMACPP, n_predict=5, max_tokens=6, max_completion_tokens=7).max_tokens == 5
    assert refusal(LLAMACPP, max_tokens=6, max_completion_tokens=7).param == "max_completion_tokens"


def test_either_name_of_token_ids_requests_them() -> None:
    assert read(return_tokens=True).return_token_ids
    assert read(return_token_ids=True).return_token_ids
    assert not read(return_tokens=False, return_token_ids=False).return_token_ids


@all_cases(
    ("options", "expected"),
    [
        (None, set()),
        ({}, set()),
        ({"include_usage": None}, set()),
        ({"include_usage": False}, {"hides_usage"}),
        ({"include_usage": True}, {"include_usage"}),
        ({"include_obfuscation": True}, {"include_obfuscation"}),
        ({"continuous_usage_stats": False}, set()),
        ({"continuous_usage_stats": True}, {"continuous_usage"}),
    ],
)
def test_stream_options_are_read(options: dict[str, Any] | None, expected: set[str]) -> None:
    request = read(stream=True, stream_options=options)
    names = ("include_usage", "hides_usage", "continuous_usage", "include_obfuscation")
    assert {name for name in names if getattr(request, name)} == expected
    assert request.ignored_parameters == ()


def test_usage_in_every_chunk_has_no_effect_for_a_client_that_declines_usage() -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    request = read(stream=True, stream_options=options)
    assert request.hides_usage
    assert request.ignored_parameters == ("stream_options.continuous_usage_stats",)


def test_stream_option_of_a_wrong_type_is_refused() -> None:
    error = refusal(stream=True, stream_options={"include_usage": 1})
    assert error.message == "'stream_options.include_usage' must be a boolean. Given: 1."
    assert error.param == "stream_options.include_usage"


@all_cases("profile", [OPENAI, MISTRALRS, VLLM])
def test_stream_options_without_stream_are_refused(profile: Profile) -> None:
    error = refusal(profile, stream_options={"include_usage": True})
    assert error.message == "'stream_options' is only allowed when 'stream' is true."


@all_cases("profile", [FIREWORKS, LLAMACPP, OMLX])
def test_stream_options_without_stream_are_ignored_in_older_profiles(
    profile: Profile,
) -> None:
    request = read(profile, stream_options={"include_usage": True, "include_obfuscation": True})
    assert (request.include_usage, request.include_obfuscation) == (False, False)


@all_cases("value", [None, True])
def test_cached_work_is_reused_unless_forbidden(value: bool | None) -> None:
    assert read(cache_prompt=value).reads_prefix_cache
    assert not read(cache_prompt=False).reads_prefix_cache


def test_cache_isolation_key_is_bounded() -> None:
    assert read(cache_salt="k" * 256).cache_isolation_key == "k" * 256
    error = refusal(cache_salt="k" * 257)
    assert error.message == "'cache_salt' must have at most 256 characters. Given: 257 characters."
    assert refusal(prompt_cache_isolation_key="k" * 257).param == "prompt_cache_isolation_key"


def test_times_are_returned_on_request() -> None:
    request = read(perf_metrics_in_response=True)
    assert (request.wants_timings, request.timings_per_token) == (True, False)
    request = read(timings_per_token=True)
    assert (request.wants_timings, request.timings_per_token) == (False, True)
    assert not read().wants_timings


@all_cases("name", ["ignore_eos", "min_tokens"])
@all_cases(
    ("constraint", "structure"),
    [
        ("grammar", {"grammar": 'root ::= "a"'}),
        ("json_schema", {"json_schema": {}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a+"}}),
        (
            "tools",
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
        ),
    ],
)
def test_structure_and_ignore_eos_are_refused_together(
    name: str, constraint: str, structure: dict[str, Any]
) -> None:
    error = refusal(**structure, **{name: True if name == "ignore_eos" else 2})
    assert error.message.startswith(f"'{name}' cannot be combined with '{constraint}'")
    assert error.param == name
    assert read(**structure, **{name: False if name == "ignore_eos" else 0})
