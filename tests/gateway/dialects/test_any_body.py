"""Any body gives a request or an error of the API, in every dialect."""

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from contract.messages import Feature
from contract.sampling import SamplingSpec
from gateway.dialects.bodies import require_model
from gateway.dialects.completions import CompletionRequest, read_completion, to_generation_request
from gateway.dialects.parameters import REJECTED, check_supported, reject_ignored
from gateway.dialects.profile import PROFILES, Dialect, Profile
from gateway.dialects.request import GenerationRequest
from gateway.dialects.wire import validate
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.reading import at_once
from tests.support.cases import all_cases
from tests.support.examples import examples

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-3, 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 2),
    st.text(max_size=8),
    st.sampled_from(
        [
            "<image>",
            "data:image/gif;base64,R0lGODlh",
            "json_object",
            "function",
            "required",
            "regex",
        ]
    ),
)
KEYS = st.one_of(
    st.text(max_size=5),
    st.sampled_from(
        [
            "type",
            "value",
            "schema",
            "json_schema",
            "json",
            "regex",
            "choice",
            "grammar",
            "function",
            "name",
            "parameters",
            "strict",
            "max_pattern_size",
            "min_count",
            "include_usage",
        ]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(KEYS, children, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*sorted(CompletionRequest.model_fields), *sorted(REJECTED), "zeta"])
PLAUSIBLE = st.fixed_dictionaries(
    {"model": st.just("m"), "prompt": st.sampled_from(["x", "<image>", ["a", "b"], [1, 2]])}
)


def read(body: dict[str, Any], profile: Profile) -> GenerationRequest | BadRequestError:
    """Read a body in a dialect."""
    try:
        require_model(body, profile)
        request = read_completion(body, profile, max_prompts=1024)
        afresh = to_generation_request(validate(CompletionRequest, body), profile, max_prompts=1024)
        assert seeded(request) == seeded(afresh)
        check_supported(request, [Feature.SAMPLER_CHAIN], has_infill=False, has_tools=False)
        reject_ignored(request.ignored_parameters)
    except BadRequestError as error:
        return error
    return request


def seeded(request: GenerationRequest) -> GenerationRequest:
    """Return the request with a fixed seed if it has a random one."""
    sampling = request.sampling
    seed = sampling.seed if sampling.is_seed_requested else 0
    return replace(request, sampling=replace(sampling, seed=seed))


def check(request: GenerationRequest | BadRequestError) -> None:
    """Check what later stages rely on in a request, and what clients rely on in an error."""
    if isinstance(request, BadRequestError):
        assert request.param
        assert request.content()
        assert len(request.message) < 1000
        return
    assert 1 <= request.n <= request.best_of <= 128
    assert len(request.images) == len(request.prompts) >= 1
    assert request.max_tokens >= -1
    assert request.echo or request.echo_last is None
    spec = request.sampling
    assert 0 < spec.top_p <= 1
    assert spec.top_k >= 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=SamplingSpec) == spec


@given(st.sampled_from(list(PROFILES.values())), PLAUSIBLE, NAMES, VALUES)
@examples(default=200, long=1500)
def test_any_value_of_a_parameter_is_read_or_refused(
    profile: Profile, body: dict[str, Any], name: str, value: Any
) -> None:
    check(read(body | {name: value}, profile))


@given(st.sampled_from(list(PROFILES.values())), st.dictionaries(NAMES, VALUES, max_size=6))
@examples(default=200, long=1500)
def test_any_body_is_read_or_refused(profile: Profile, body: dict[str, Any]) -> None:
    check(read(body, profile))


HUGE: dict[str, Callable[[], Any]] = {
    "allowed_token_ids": lambda: [1] * 200_000,
    "bad_words": lambda: ["a"] * 200_000,
    "dry_sequence_breakers": lambda: [5] * 200_000,
    "grammar": lambda: {"type": [{}] * 200_000},
    "images": lambda: ["x"] * 200_000,
    "json_schema": lambda: [1] * 200_000,
    "logit_bias": lambda: {str(token): "x" for token in range(100_000)},
    "prompt": lambda: [[1]] * 200_000,
    "samplers": lambda: "k" * 800_000,
    "stop": lambda: ["a"] * 200_000,
    "stop_token_ids": lambda: ["a"] * 200_000,
    "structured_outputs": lambda: {"choice": ["a"] * 200_000},
    "tools": lambda: [{"type": "function"}] * 100_000,
}
"""Made lazily: only the process of the test that needs it pays for it."""


@all_cases("name", HUGE)
def test_huge_value_is_refused_at_once(name: str) -> None:
    body = {"model": "m", "prompt": "x"} | {name: HUGE[name]()}
    error = at_once(lambda: read(body, PROFILES[Dialect.VLLM]), seconds=0.05)
    assert isinstance(error, BadRequestError)
    assert len(error.message) < 1000


def test_huge_prompt_of_token_ids_is_read_at_once() -> None:
    body = {"model": "m", "prompt": [1] * 200_000}
    request = at_once(lambda: read(body, PROFILES[Dialect.VLLM]), seconds=0.05)
    assert isinstance(request, GenerationRequest)


def test_entries_without_effect_are_named_up_to_a_bound() -> None:
    options = {f"o{number}": 1 for number in range(100_000)}
    body = {"model": "m", "prompt": "x", "stream": True, "stream_options": options}
    request = to_generation_request(
        validate(CompletionRequest, body), PROFILES[Dialect.VLLM], max_prompts=1
    )
    assert len(request.ignored_parameters) == 32
