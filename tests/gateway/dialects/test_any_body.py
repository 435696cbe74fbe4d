"""Any body of a completion or chat gives a request or an error of the API, in every dialect."""

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from contract.messages import Feature
from contract.sampling import SamplingSpec
from gateway.dialects.bodies import require_model
from gateway.dialects.chat.messages import ROLES
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest, read_completion, to_generation_request
from gateway.dialects.estimate_parameters import effective_parameters
from gateway.dialects.parameters import (
    REJECTED,
    REJECTED_BY_CHATS,
    check_supported,
    reject_ignored,
)
from gateway.dialects.profile import PROFILES, Profile
from gateway.dialects.request import ChatRequest, GenerationRequest
from gateway.dialects.wire import validate
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import PNG_URI, USER, image, read_chat_body
from tests.gateway.dialects.reading import VLLM, at_once
from tests.support.cases import all_cases
from tests.support.examples import examples

WORDS = [
    "<image>",
    "data:image/gif;base64,R0lGODlh",
    "json_object",
    "function",
    "required",
    "regex",
    *ROLES,
    "text",
    "image_url",
    "refusal",
    "allowed_tools",
    "enabled",
    "low",
    "{}",
    '{"a": ',
    PNG_URI,
    "http://localhost/",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-3, 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 2),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
MEMBERS = """
type value schema json_schema json regex choice grammar function name parameters strict
max_pattern_size min_count include_usage role content text refusal image_url url detail tool_calls
tool_call_id function_call id arguments reasoning reasoning_content partial audio mode tools
allowed_tools budget_tokens enable_thinking reasoning_effort
"""
KEYS = st.one_of(st.text(max_size=5), st.sampled_from(MEMBERS.split()))
VALUES = st.recursive(
    SCALARS,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(KEYS, children, max_size=4),
    max_leaves=12,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "refusal"])},
    optional={
        "text": st.text(max_size=5) | SCALARS,
        "refusal": st.text(max_size=5) | SCALARS,
        "image_url": VALUES | st.just({"url": PNG_URI}),
    },
)
CALLS = st.fixed_dictionaries(
    {"id": st.just("a") | SCALARS},
    optional={"type": st.just("function") | SCALARS, "function": VALUES | st.just({"name": "f"})},
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from([*ROLES, "critic"])},
    optional={
        "content": st.text(max_size=5) | st.lists(PARTS, max_size=3) | VALUES,
        "name": st.just("Ada") | SCALARS,
        "tool_call_id": st.just("a") | SCALARS,
        "tool_calls": st.lists(CALLS, max_size=3) | VALUES,
        "function_call": st.just({"name": "f", "arguments": "{}"}) | VALUES,
        "reasoning": SCALARS,
        "reasoning_content": SCALARS,
        "partial": st.booleans() | SCALARS,
    },
)
NAMES = st.sampled_from([*sorted(CompletionRequest.model_fields), *sorted(REJECTED), "zeta"])
NAMES_OF_CHATS = st.sampled_from(
    [*sorted(ChatCompletionRequest.model_fields), *sorted(REJECTED_BY_CHATS), "zeta"]
)
ANY_PROFILE = st.sampled_from(list(PROFILES.values()))
PLAUSIBLE = st.fixed_dictionaries(
    {"model": st.just("m"), "prompt": st.sampled_from(["x", "<image>", ["a", "b"], [1, 2]])}
)


def read(body: dict[str, Any], profile: Profile) -> GenerationRequest | BadRequestError:
    """Read a body in a dialect: a chat if it has messages."""
    try:
        require_model(body, profile)
        if "messages" in body:
            request = read_chat_body(body, profile)
            features = [Feature.CHAT, Feature.TOOLS, Feature.SAMPLER_CHAIN]
            request = check_supported(request, features)
            assert request.chat
        else:
            request = read_completion(body, profile, max_prompts=1024)
            wire = validate(CompletionRequest, body)
            afresh = to_generation_request(wire, profile, max_prompts=1024)
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
    assert msgspec.json.encode(effective_parameters(request, spec))
    if request.chat:
        assert request.n == request.best_of
        assert (request.prompts, request.images) == ([""], [[]])
        check_chat(request.chat)


def check_chat(chat: ChatRequest) -> None:
    """Check what a template relies on in a chat."""
    assert chat.messages
    images = 0
    for message in chat.messages:
        assert message["role"] in {"system", "developer", "user", "assistant", "tool", "critic"}
        content = message["content"]
        assert content is None or isinstance(content, str | list)
        assert content is not None or message["role"] == "assistant"
        parts = content if isinstance(content, list) else []
        assert all(set(part) in ({"type", "text"}, {"type"}) for part in parts)
        images += sum(part["type"] == "image" for part in parts)
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], dict)
            assert isinstance(call["function"]["name"], str)
            assert isinstance(call["id"], str)
    assert images == len(chat.image_sources)
    assert chat.template_arguments.keys() == chat.argument_params.keys()
    encoded = msgspec.msgpack.encode(chat)
    assert msgspec.msgpack.decode(encoded, type=ChatRequest) == chat


@given(ANY_PROFILE, PLAUSIBLE, NAMES, VALUES)
@examples(default=200, long=1500)
def test_any_value_of_a_parameter_is_read_or_refused(
    profile: Profile, body: dict[str, Any], name: str, value: Any
) -> None:
    check(read(body | {name: value}, profile))


@given(ANY_PROFILE, st.dictionaries(NAMES, VALUES, max_size=6))
@examples(default=200, long=1500)
def test_any_body_is_read_or_refused(profile: Profile, body: dict[str, Any]) -> None:
    check(read(body, profile))


@given(ANY_PROFILE, NAMES_OF_CHATS, VALUES)
@examples(default=200, long=1500)
def test_any_value_of_a_chats_parameter_is_read_or_refused(
    profile: Profile, name: str, value: Any
) -> None:
    check(read({"model": "m", "messages": [USER], name: value}, profile))


@given(st.lists(MESSAGES | VALUES, max_size=4))
@examples(default=200, long=2000)
def test_any_messages_are_read_or_refused(messages: list[Any]) -> None:
    check(read({"model": "m", "messages": messages}, VLLM))


@given(
    ANY_PROFILE, st.dictionaries(NAMES_OF_CHATS, VALUES, max_size=6), st.lists(MESSAGES, max_size=2)
)
@examples(default=200, long=1500)
def test_any_chat_is_read_or_refused(
    profile: Profile, body: dict[str, Any], messages: list[Any]
) -> None:
    check(read({"messages": messages} | body, profile))


def many() -> dict[str, int]:
    """Return a hundred thousand members."""
    return {str(number): 1 for number in range(100_000)}


HUGE: dict[str, Callable[[], dict[str, Any]]] = {
    "allowed_token_ids": lambda: {"allowed_token_ids": [1] * 200_000},
    "bad_words": lambda: {"bad_words": ["a"] * 200_000},
    "dry_sequence_breakers": lambda: {"dry_sequence_breakers": [5] * 200_000},
    "grammar": lambda: {"grammar": {"type": [{}] * 200_000}},
    "images": lambda: {"images": ["x"] * 200_000},
    "json_schema": lambda: {"json_schema": [1] * 200_000},
    "logit_bias": lambda: {"logit_bias": {str(token): "x" for token in range(100_000)}},
    "prompt": lambda: {"prompt": [[1]] * 200_000},
    "samplers": lambda: {"samplers": "k" * 800_000},
    "stop": lambda: {"stop": ["a"] * 200_000},
    "stop_token_ids": lambda: {"stop_token_ids": ["a"] * 200_000},
    "structured_outputs": lambda: {"structured_outputs": {"choice": ["a"] * 200_000}},
    "tools": lambda: {"tools": [{"type": "function"}] * 100_000},
    "calls": lambda: {
        "messages": [{"role": "assistant", "tool_calls": [{"type": "function"}] * 100_000}]
    },
    "extras": lambda: {"messages": [USER | many(), {}]},
    "functions": lambda: {"messages": [USER], "functions": [{}] * 100_000},
    "images of a message": lambda: {"messages": [{"role": "user", "content": [image()] * 1_000}]},
    "kwargs": lambda: {
        "messages": [USER],
        "chat_template_kwargs": many(),
    },
    "messages": lambda: {"messages": [{}] * 200_000},
    "metadata": lambda: {
        "messages": [USER],
        "metadata": many(),
    },
    "parts": lambda: {"messages": [{"role": "user", "content": [{"type": "text"}] * 100_000}]},
    "tools of a chat": lambda: {"messages": [USER], "tools": [{"type": "function"}] * 100_000},
}
"""Made lazily: only the process of the test that needs it pays for it."""


@all_cases("name", HUGE)
def test_huge_value_is_refused_at_once(name: str) -> None:
    given = HUGE[name]()
    plain = {} if "messages" in given else {"prompt": "x"}
    error = at_once(
        lambda: read({"model": "m"} | plain | given, VLLM), seconds=0.05 if plain else 0.075
    )
    assert isinstance(error, BadRequestError)
    assert len(error.message) < 1000


def test_huge_prompt_of_token_ids_is_read_at_once() -> None:
    body = {"model": "m", "prompt": [1] * 200_000}
    request = at_once(lambda: read(body, VLLM), seconds=0.05)
    assert isinstance(request, GenerationRequest)


def test_entries_without_effect_are_named_up_to_a_bound() -> None:
    options = {f"o{number}": 1 for number in range(100_000)}
    body = {"model": "m", "prompt": "x", "stream": True, "stream_options": options}
    request = to_generation_request(validate(CompletionRequest, body), VLLM, max_prompts=1)
    assert len(request.ignored_parameters) == 32
