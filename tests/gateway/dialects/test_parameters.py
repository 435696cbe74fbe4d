"""Types and bounds of parameters; errors name parameter, bound and value."""

from typing import Any

import pytest

from gateway.dialects.bodies import require_model
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.profile import PROFILES, ContextLengthBehavior, Profile
from gateway.dialects.wire import validate
from gateway.records.errors import MissingParameterError
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

LARGEST = 2**31 - 1
INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (-1, LARGEST),
    "max_completion_tokens": (-1, LARGEST),
    "n_predict": (-1, LARGEST),
    "min_tokens": (0, LARGEST),
    "truncate_prompt_tokens": (-1, LARGEST),
    "echo_last": (0, LARGEST),
    "prompt_logprobs": (0, 20),
    "t_max_predict_ms": (-1, LARGEST),
    "top_k": (-1, LARGEST),
    "min_keep": (0, LARGEST),
    "repeat_last_n": (-1, LARGEST),
    "dry_penalty_last_n": (-1, LARGEST),
    "dry_allowed_length": (0, LARGEST),
    "n": (1, 128),
    "n_cmpl": (1, 128),
    "best_of": (1, 128),
    "seed": (-(2**63), 2**63 - 1),
    "mirostat": (0, 2),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 1000.0),
    "dynatemp_range": (0.0, 2.0),
    "dynatemp_exponent": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 2.0),
    "repeat_penalty": (0.01, 2.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 10.0),
    "mirostat_target": (0.0, 1e6),
    "mirostat_lr": (0.0, 10.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dry_multiplier": (0.0, 1000.0),
    "dry_base": (0.0, 1000.0),
}
BOOLEANS = (
    "add_special_tokens",
    "background",
    "cache_prompt",
    "echo",
    "ignore_eos",
    "include_stop_str_in_output",
    "parallel_tool_calls",
    "perf_metrics_in_response",
    "return_token_ids",
    "return_tokens",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "stream",
    "return_progress",
    "safe_tokenization",
    "timings_per_token",
    "truncate_sequence",
)
STRINGS = ("user", "service_tier", "suffix", "prompt_cache_isolation_key", "cache_salt")
BOUNDS: dict[str, tuple[float, float]] = {**INTEGERS, **NUMBERS}
BY_HAND: dict[str, tuple[str, list[Any]]] = {
    "allowed_token_ids": ("an array", ["5", 5, True, {}]),
    "bad_words": ("an array", ["word", 5, True, {}]),
    "dry_sequence_breakers": ("an array", ["\n", 5, {}]),
    "grammar": ("a string or an object", [5, True, ["a"]]),
    "json_schema": ("a JSON schema: an object or a boolean", [5, []]),
    "logit_bias": ("an object or an array of pairs", ["5", 5, True]),
    "logprobs": ("an integer or a boolean", ["5", 1.5, [1], {}]),
    "models": ("an array", ["m", 5, True, {}]),
    "response_format": ("an object", ["json", 5, []]),
    "stop": ("a string or an array of strings", [5, True, {}, ["a", 5]]),
    "stop_token_ids": ("an array", ["5", 5, {}]),
    "structured_outputs": ("an object", ["json", 5, []]),
    "tools": ("an array", ["f", 5, {}]),
}
WRONG_TYPES: dict[str, tuple[str, list[Any]]] = {
    **dict.fromkeys(
        (*INTEGERS, "n_probs", "top_logprobs"), ("an integer", ["5", 1.5, True, [1], {}])
    ),
    **dict.fromkeys(NUMBERS, ("a number", ["0.5", True, [0.5], {}])),
    **dict.fromkeys(BOOLEANS, ("a boolean", ["true", 1, 0.0, []])),
    **dict.fromkeys(STRINGS, ("a string", [1, ["u"], True])),
    "model": ("a string", [1, ["m"], True]),
    "stream_options": ("an object", [[], "x", True]),
    "repetition_detection": ("an object", [[], "x", 5]),
    **BY_HAND,
}
SHOWN = {True: "true", "5": '"5"', "0.5": '"0.5"', "true": '"true"', "x": '"x"'}


@all_cases("name", WRONG_TYPES)
def test_wrong_type_is_refused_naming_parameter_type_and_value(name: str) -> None:
    expected, values = WRONG_TYPES[name]
    for value in values:
        error = refusal(**{name: value})
        assert error.param == name, value
        assert error.code == "invalid_value", value
        assert error.message.startswith(f"'{name}' must be {expected}. Given: "), value
        if value is True or value in ("5", "0.5", "true", "x"):
            assert error.message.endswith(f"Given: {SHOWN[value]}.")


def test_wrong_types_cover_every_parameter() -> None:
    by_other_tests = {"prompt", "images", "samplers", "tool_choice", "grammar_syntax"}
    by_other_tests |= {"context_length_exceeded_behavior", "truncation_side"}
    assert set(WRONG_TYPES) | by_other_tests == set(CompletionRequest.model_fields)


def companions(name: str) -> dict[str, Any]:
    """Return the other parameters that the bounds of a parameter require."""
    return {"echo": True, "max_tokens": -1} if name == "min_tokens" else {"echo": True}


def test_values_on_the_bounds_are_accepted() -> None:
    for name, (lowest, highest) in BOUNDS.items():
        for value in (1.0 if name == "mirostat_target" else lowest, highest):
            assert read(**companions(name) | {name: value}), (name, value)


@all_cases("name", BOUNDS)
def test_value_out_of_bounds_is_refused_naming_parameter_bound_and_value(name: str) -> None:
    lowest, highest = BOUNDS[name]
    for value, rule in ((lowest - 1, f"at least {lowest}"), (highest + 1, f"at most {highest}")):
        error = refusal(**{name: value})
        assert error.message == f"'{name}' must be {rule}. Given: {value}."
        assert error.param == name


def test_integral_number_counts_as_an_integer() -> None:
    for name in INTEGERS:
        wire = validate(CompletionRequest, {"model": "m", "prompt": "x", name: 1.0})
        value = wire.model_dump()[name]
        assert (value, type(value)) == (1, int), name


def test_integer_counts_as_a_number() -> None:
    for name in NUMBERS:
        assert read(**{name: 1}), name


@all_cases("profile", EVERY_PROFILE)
def test_null_is_the_same_as_absent(profile: Profile) -> None:
    absent = read(profile, seed=1)
    for name in CompletionRequest.model_fields.keys() - {"model", "prompt", "seed"}:
        assert read(profile, **{name: None, "seed": 1}) == absent, name


@all_cases("seed", [None, -1], ids=["absent", "minus-one"])
def test_conflict_22_seed_minus_one_is_random(seed: int | None) -> None:
    specs = [read(seed=seed).sampling for _ in range(20)]
    assert len({spec.seed for spec in specs}) == 20
    assert all(0 <= spec.seed < 2**62 for spec in specs)
    assert not any(spec.is_seed_requested for spec in specs)


def test_equal_parameters_with_another_prompt_are_another_request() -> None:
    first, second = (read(VLLM, prompt=prompt, n=2) for prompt in ("one", "two"))
    assert (first.prompts, second.prompts) == (["one"], ["two"])
    assert first.sampling.seed != second.sampling.seed
    assert refusal(VLLM, n=True, prompt="three").param == "n"  # Equal to 1 in Python.
    assert read(VLLM, n=1, prompt="three").n == 1


def test_seed_of_the_client_is_kept() -> None:
    spec = read(seed=7).sampling
    assert (spec.seed, spec.is_seed_requested) == (7, True)


@all_cases("profile", [FIREWORKS, LLAMACPP, MISTRALRS, OMLX, VLLM])
@all_cases("body", [{"model": "m"}, {"model": "m", "prompt": None}])
def test_missing_prompt_is_refused(profile: Profile, body: dict[str, Any]) -> None:
    with pytest.raises(MissingParameterError) as caught:
        read_body(body, profile)
    assert caught.value.message == "Missing required parameter: 'prompt'."
    assert (caught.value.param, caught.value.code) == ("prompt", "missing_required_parameter")


def test_missing_prompt_starts_from_nothing_in_openai() -> None:
    assert read_body({"model": "m"}, OPENAI).prompts == [""]


@all_cases("body", [{}, {"model": None}])
@all_cases("profile", [OPENAI, FIREWORKS, OMLX])
def test_conflict_24_missing_model_is_refused(profile: Profile, body: dict[str, Any]) -> None:
    with pytest.raises(MissingParameterError, match="'model'"):
        require_model(body, profile)
    with pytest.raises(MissingParameterError, match="'model'"):
        read_body({"prompt": "x", **body}, profile)


@all_cases("profile", [LLAMACPP, MISTRALRS, VLLM])
def test_conflict_24_missing_model_means_the_default_model(profile: Profile) -> None:
    assert require_model({}, profile) is None
    assert read_body({"prompt": "x"}, profile).model is None
    assert require_model({"model": "m"}, profile) == "m"


def test_model_that_is_no_string_is_refused() -> None:
    assert refusal(model=5).message == "'model' must be a string. Given: 5."


def test_defaults_are_those_of_the_documentation() -> None:
    request = read()
    assert request.max_tokens == 16
    assert (request.n, request.best_of, request.stop) == (1, 1, [])
    assert (request.logprobs, request.echo, request.stream) == (None, False, False)
    assert (request.suffix, request.images, request.structure) == ("", [[]], None)
    assert (request.prompt_tokens_kept, request.max_predict_ms) == (None, 0)
    assert (request.adds_special_tokens, request.reads_prefix_cache) == (True, True)
    assert not request.shows_special_tokens
    assert request.ignored_parameters == ()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.bad_words) == (0, [], [])
    assert not sampling.ignore_eos


@all_cases("value", ["trim", 5, True])
def test_unknown_choice_is_refused_naming_the_choices(value: Any) -> None:
    for name, choices in (
        ("context_length_exceeded_behavior", "'truncate' or 'error'"),
        ("truncation_side", "'left' or 'right'"),
    ):
        error = refusal(**{name: value})
        assert error.message.startswith(f"'{name}' must be one of {choices}. Given: ")


@all_cases("behavior", list(ContextLengthBehavior))
def test_context_behavior_of_the_request_overrides_the_default(
    behavior: ContextLengthBehavior,
) -> None:
    for profile in PROFILES.values():
        request = read(profile, context_length_exceeded_behavior=behavior.value)
        assert request.context_length_behavior is behavior


def test_long_value_is_shortened_in_the_message() -> None:
    error = refusal(n="9" * 10_000)
    assert len(error.message) < 200
    assert error.message.endswith("....")


def test_long_key_is_shortened_in_the_message() -> None:
    error = refusal(logit_bias={"k" * 10_000: "x"})
    assert len(error.message) < 400
    assert error.param == "logit_bias"


def test_top_p_zero_keeps_only_the_likeliest_token() -> None:
    assert 0 < read(top_p=0).sampling.top_p < 1e-5


@all_cases("value", [-1, 0])
def test_top_k_without_effect_is_zero(value: int) -> None:
    assert read(LLAMACPP, top_k=value).sampling.top_k == 0


def test_parameters_of_length_and_text_reach_the_request() -> None:
    request = read(
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5, 6.0],
        bad_words=["no", " never"],
        allowed_token_ids=[1, 2],
        t_max_predict_ms=500,
        add_special_tokens=False,
        skip_special_tokens=False,
    )
    assert request.sampling.min_tokens == 2
    assert request.sampling.ignore_eos
    assert request.sampling.stop_token_ids == [5, 6]
    assert request.sampling.bad_words == ["no", " never"]
    assert request.sampling.allowed_token_ids == [1, 2]
    assert request.max_predict_ms == 500
    assert not request.adds_special_tokens
    assert request.shows_special_tokens


def test_time_limit_of_minus_one_is_none() -> None:
    assert read(t_max_predict_ms=-1).max_predict_ms == 0


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert read(min_tokens=5, max_tokens=5).sampling.min_tokens == 5
    assert read(min_tokens=5, max_tokens=-1).sampling.min_tokens == 5
    error = refusal(min_tokens=6, max_tokens=5)
    assert error.message == "'min_tokens' must be at most max_tokens (5). Given: 6."
    assert error.param == "min_tokens"


LISTS: list[tuple[str, Any, str]] = [
    ("stop_token_ids", [1] * 129, "'stop_token_ids' must have at most 128 entries. Given: 129."),
    ("allowed_token_ids", [1] * 1025, "'allowed_token_ids' must have at most 1024 entries."),
    ("bad_words", ["a"] * 129, "'bad_words' must have at most 128 entries. Given: 129."),
    ("dry_sequence_breakers", ["a"] * 17, "'dry_sequence_breakers' must have at most 16 entries."),
    (
        "stop_token_ids",
        [-1],
        "'stop_token_ids' must have token ids, which are non-negative integers.",
    ),
    (
        "stop_token_ids",
        [2**31],
        "'stop_token_ids' must have token ids, which are non-negative integers.",
    ),
    (
        "stop_token_ids",
        [True],
        "'stop_token_ids' must have token ids, which are non-negative integers.",
    ),
    ("allowed_token_ids", ["5"], "'allowed_token_ids' must have token ids"),
    ("allowed_token_ids", [], "'allowed_token_ids' must have at least one token id. Given: []."),
    ("bad_words", [5], "'bad_words' must be an array of strings. Given: 5 in it."),
    ("bad_words", [""], "'bad_words' must have strings of 1 to 128 characters. Given: 0"),
    ("bad_words", ["x" * 129], "'bad_words' must have strings of 1 to 128 characters. Given: 129"),
    ("bad_words", [" \n"], "'bad_words' must have words with visible characters. Given: "),
    ("dry_sequence_breakers", ["x" * 41], "'dry_sequence_breakers' must have strings of 1 to 40"),
]


@all_cases(("name", "value", "message"), LISTS)
def test_invalid_list_is_refused(name: str, value: Any, message: str) -> None:
    error = refusal(**{name: value})
    assert error.message.startswith(message)
    assert error.param == name


@all_cases(
    ("given", "expected"),
    [
        ({}, None),
        ({"max_pattern_size": 0, "min_count": 5}, None),
        ({"max_pattern_size": None}, None),
        ({"max_pattern_size": 8, "min_count": 3}, (8, 1, 3)),
        ({"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 2}, (8, 2, 2)),
    ],
)
def test_repetition_detection_is_read(
    given: dict[str, Any], expected: tuple[int, int, int] | None
) -> None:
    found = read(repetition_detection=given).sampling.repetition_detection
    sizes = found and (found.max_pattern_size, found.min_pattern_size, found.min_count)
    assert sizes == expected


@all_cases(
    ("given", "param", "message"),
    [
        ({"max_pattern_size": 129}, "max_pattern_size", "must be at most 128. Given: 129."),
        ({"max_pattern_size": "8"}, "max_pattern_size", 'must be an integer. Given: "8".'),
        ({"max_pattern_size": 8}, "min_count", "must be at least 2. Given: 0."),
        (
            {"max_pattern_size": 8, "min_count": 1025},
            "min_count",
            "must be at most 1024. Given: 1025.",
        ),
        (
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            "min_pattern_size",
            "must be at most max_pattern_size (2). Given: 3.",
        ),
    ],
)
def test_invalid_repetition_detection_is_refused(
    given: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(repetition_detection=given)
    assert error.message == f"'repetition_detection.{param}' {message}"
    assert error.param == f"repetition_detection.{param}"


def test_every_parameter_is_described_with_its_type() -> None:
    schema = CompletionRequest.model_json_schema()
    for name, described in schema["properties"].items():
        assert described.get("description"), name
        kinds = described.get("anyOf", [described])
        assert all({"type", "enum", "$ref"} & kind.keys() for kind in kinds), name


def test_ranges_of_the_documentation_are_those_enforced() -> None:
    properties = CompletionRequest.model_json_schema()["properties"]
    for name, bounds in BOUNDS.items():
        number = properties[name]["anyOf"][0]
        assert (number["minimum"], number["maximum"]) == bounds, name
