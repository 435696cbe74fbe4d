"""Each parameter's type and bounds; the message names the parameter, what it must be, and the value."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.completions import (
    CompletionRequest,
    require_model,
    to_generation_request,
)
from gateway.dialects.request import ContextLengthBehavior, GenerationRequest
from gateway.dialects.wire import validate
from gateway.errors import (
    BadRequestError,
    InvalidParameterError,
    MissingParameterError,
)


def read(**parameters: Any) -> GenerationRequest:
    """Take a body through the dialect."""
    body = {"model": "m", "prompt": "x"} | parameters
    return to_generation_request(validate(CompletionRequest, body), max_prompts=1024)


def refusal(**parameters: Any) -> InvalidParameterError:
    """Return why a body is refused."""
    with pytest.raises(InvalidParameterError) as caught:
        read(**parameters)
    assert type(caught.value) is InvalidParameterError
    return caught.value


INTEGERS = {
    "max_tokens": (-1, None),
    "top_k": (-1, 2**31 - 1),
    "n": (1, 128),
    "best_of": (1, 128),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, 5),
}
NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 2.0),
}
BOUNDS: dict[str, tuple[float, float | None]] = {**INTEGERS, **NUMBERS}
WRONG_TYPES: dict[str, tuple[str, list[Any]]] = {
    **dict.fromkeys(INTEGERS, ("an integer", ["5", 1.5, True, [1], {}])),
    **dict.fromkeys(NUMBERS, ("a number", ["0.5", True, [0.5], {}])),
    **dict.fromkeys(("stream", "echo", "ignore_eos"), ("a boolean", ["true", 1, 0.0, []])),
    "user": ("a string", [1, ["u"]]),
    "model": ("a string", [1, ["m"], True]),
    "logit_bias": ("an object", [[[1, 2]], "5", 5]),
    "stream_options": ("an object", [[], "x", True]),
}
SHOWN = {True: "true", "5": '"5"', "0.5": '"0.5"', "true": '"true"', "x": '"x"'}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        pytest.param(name, value, expected, id=f"{name}-{value}")
        for name, (expected, values) in WRONG_TYPES.items()
        for value in values
    ],
)
def test_wrong_type_is_refused_naming_parameter_type_and_value(
    name: str, value: Any, expected: str
) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert error.code == "invalid_value"
    assert error.message.startswith(f"'{name}' must be {expected}. Given: ")
    if isinstance(value, str) or value is True:
        assert error.message.endswith(f"Given: {SHOWN[value]}.")


@pytest.mark.parametrize("name", BOUNDS)
def test_values_on_the_bounds_are_accepted(name: str) -> None:
    lowest, highest = BOUNDS[name]
    assert read(**{name: lowest})
    if highest is not None:
        assert read(**{name: highest})


@pytest.mark.parametrize("name", BOUNDS)
def test_value_below_the_bound_is_refused_naming_parameter_bound_and_value(name: str) -> None:
    bound = BOUNDS[name][0]
    value = bound - 1
    error = refusal(**{name: value})
    assert error.message == f"'{name}' must be >= {bound}. Given: {value}."
    assert error.param == name


@pytest.mark.parametrize("name", [name for name, (_, high) in BOUNDS.items() if high is not None])
def test_value_above_the_bound_is_refused_naming_parameter_bound_and_value(name: str) -> None:
    bound = BOUNDS[name][1]
    assert bound is not None
    value = bound + 1
    error = refusal(**{name: value})
    assert error.message == f"'{name}' must be <= {bound}. Given: {value}."
    assert error.param == name


@pytest.mark.parametrize("name", INTEGERS)
def test_integral_number_counts_as_an_integer(name: str) -> None:
    assert validate(CompletionRequest, {"model": "m", "prompt": "x", name: 5.0}).model_dump()[
        name
    ] == (5)


@pytest.mark.parametrize("name", [*NUMBERS])
def test_integer_counts_as_a_number(name: str) -> None:
    assert read(**{name: 1})


@pytest.mark.parametrize(
    "name", sorted(set(CompletionRequest.model_fields) - {"model", "prompt", "seed"})
)
def test_null_is_the_same_as_absent(name: str) -> None:
    assert read(**{name: None, "seed": 1}) == read(seed=1)


@pytest.mark.parametrize("seed", [None, -1])
def test_no_seed_gets_one_of_ours_each_time(seed: int | None) -> None:
    specs = [read(seed=seed).sampling for _ in range(3)]
    assert len({spec.seed for spec in specs}) == 3
    assert not any(spec.is_seed_requested for spec in specs)


def test_seed_of_the_client_is_kept() -> None:
    spec = read(seed=7).sampling
    assert (spec.seed, spec.is_seed_requested) == (7, True)


@pytest.mark.parametrize("body", [{"model": "m"}, {"model": "m", "prompt": None}])
def test_missing_prompt_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(MissingParameterError) as caught:
        validate(CompletionRequest, body)
    assert caught.value.message == "Missing required parameter: 'prompt'."
    assert (caught.value.param, caught.value.code) == ("prompt", "missing_required_parameter")


@pytest.mark.parametrize("body", [{}, {"model": None}])
def test_missing_model_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(MissingParameterError, match="'model'"):
        require_model(body)


def test_model_that_is_no_string_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"'model' must be a string\. Given: 5"):
        require_model({"model": 5})


def test_defaults_are_those_of_the_documentation() -> None:
    request = read()
    assert request.max_tokens == 16
    assert request.context_length_behavior is ContextLengthBehavior.TRUNCATE
    assert (request.n, request.best_of, request.stop) == (1, 1, [])
    assert (request.logprobs, request.echo, request.stream) == (None, False, False)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert not sampling.ignore_eos


@pytest.mark.parametrize("value", ["trim", 5, True])
def test_unknown_context_behavior_is_refused_naming_the_choices(value: Any) -> None:
    error = refusal(context_length_exceeded_behavior=value)
    assert error.message.startswith(
        "'context_length_exceeded_behavior' must be one of 'truncate' or 'error'. Given: "
    )


def test_context_behavior_error_is_read() -> None:
    request = read(context_length_exceeded_behavior="error")
    assert request.context_length_behavior is ContextLengthBehavior.ERROR


def test_long_value_is_shortened_in_the_message() -> None:
    error = refusal(n="9" * 10_000)
    assert len(error.message) < 200
    assert error.message.endswith("....")


def test_long_key_is_shortened_in_the_message() -> None:
    error = refusal(logit_bias={"k" * 10_000: "x"})
    assert len(error.message) < 400


@pytest.mark.parametrize("given", [None, -1], ids=["absent", "minus-one"])
def test_seed_is_drawn_for_a_request_without_one(given: int | None) -> None:
    seeds = {read(seed=given).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_given_seed_is_kept() -> None:
    assert read(seed=7).sampling.seed == 7


def test_top_p_zero_keeps_only_the_likeliest_token() -> None:
    assert 0 < read(top_p=0).sampling.top_p < 1e-5


@pytest.mark.parametrize("value", [-1, 0])
def test_top_k_without_effect_is_zero(value: int) -> None:
    assert read(top_k=value).sampling.top_k == 0


def test_logit_bias_is_read_by_token_id() -> None:
    bias = read(logit_bias={"5": 1, "007": -100, "2047": 0.5}).sampling.logit_bias
    assert bias == {5: 1.0, 7: -100.0, 2047: 0.5}


@pytest.mark.parametrize("token", ["", "x", "-1", "1.0", " 7", "1_0", "٣", "1" * 5000])
def test_logit_bias_key_that_is_no_token_id_is_refused(token: str) -> None:
    error = refusal(logit_bias={token: 1})
    assert error.param == "logit_bias"
    assert error.message.startswith("'logit_bias' must have token ids as keys. Given: ")
    assert len(error.message) < 200


@pytest.mark.parametrize("value", [-100.5, 100.5])
def test_logit_bias_beyond_its_range_is_refused(value: float) -> None:
    error = refusal(logit_bias={"5": value})
    assert error.message == (
        f"'logit_bias' must have values from -100 to 100. Given: {value} for token 5."
    )


@pytest.mark.parametrize("value", [True, "1", None])
def test_logit_bias_of_a_wrong_type_is_refused(value: Any) -> None:
    assert refusal(logit_bias={"5": value}).message.startswith("'logit_bias.5' must be a number.")


def test_too_many_logit_biases_are_refused_with_the_limit() -> None:
    assert read(logit_bias={str(token): 1 for token in range(1024)})
    error = refusal(logit_bias={str(token): 1 for token in range(1025)})
    assert error.message == "'logit_bias' must have at most 1024 entries. Given: 1025."


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=5), SCALARS, max_size=3),
)


@given(st.dictionaries(st.sampled_from(sorted(CompletionRequest.model_fields)), VALUES))
def test_any_body_is_read_or_refused_with_400(body: dict[str, Any]) -> None:
    refused = None
    try:
        require_model(body)
        assert to_generation_request(validate(CompletionRequest, body), max_prompts=1024)
    except BadRequestError as error:
        refused = error
    if refused is not None:
        assert str(refused.param).partition(".")[0] in CompletionRequest.model_fields
        assert refused.content()
