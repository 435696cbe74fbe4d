"""Any chat body gives a request or an error of the API, in every dialect."""

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from contract.messages import Feature
from contract.sampling import SamplingSpec
from gateway.dialects.bodies import require_model
from gateway.dialects.chat.messages import ROLES
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.effective import effective_parameters
from gateway.dialects.parameters import REJECTED_BY_CHATS, check_supported, reject_ignored
from gateway.dialects.profile import PROFILES, Profile
from gateway.dialects.request import ChatRequest, GenerationRequest
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import PNG_URI, USER, image, read_chat_body
from tests.gateway.dialects.reading import VLLM, at_once
from tests.support.cases import all_cases
from tests.support.examples import examples

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-3, 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(
        [
            *ROLES,
            "text",
            "image_url",
            "refusal",
            "function",
            "allowed_tools",
            "required",
            "enabled",
            "low",
            "{}",
            '{"a": ',
            PNG_URI,
            "http://localhost/",
        ]
    ),
)
KEYS = st.one_of(
    st.text(max_size=5),
    st.sampled_from(
        [
            "role",
            "content",
            "name",
            "type",
            "text",
            "refusal",
            "image_url",
            "url",
            "detail",
            "tool_calls",
            "tool_call_id",
            "function_call",
            "function",
            "id",
            "arguments",
            "reasoning",
            "reasoning_content",
            "partial",
            "audio",
            "parameters",
            "strict",
            "mode",
            "tools",
            "allowed_tools",
            "budget_tokens",
            "enable_thinking",
            "reasoning_effort",
        ]
    ),
)
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
NAMES = st.sampled_from(
    [*sorted(ChatCompletionRequest.model_fields), *sorted(REJECTED_BY_CHATS), "zeta"]
)
ANY_PROFILE = st.sampled_from(list(PROFILES.values()))


def read(body: dict[str, Any], profile: Profile) -> GenerationRequest | BadRequestError:
    """Read a body in a dialect."""
    try:
        require_model(body, profile)
        request = check_supported(
            read_chat_body(body, profile),
            [Feature.CHAT, Feature.TOOLS, Feature.SAMPLER_CHAIN],
        )
        reject_ignored(request.ignored_parameters)
    except BadRequestError as error:
        return error
    return request


def check(request: GenerationRequest | BadRequestError) -> None:
    """Check what later stages rely on in a request, and what clients rely on in an error."""
    if isinstance(request, BadRequestError):
        assert request.param
        assert request.content()
        assert len(request.message) < 1000
        return
    assert 1 <= request.n == request.best_of <= 128
    assert (request.prompts, request.images) == ([""], [[]])
    assert request.max_tokens >= -1
    spec = request.sampling
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=SamplingSpec) == spec
    assert msgspec.json.encode(effective_parameters(request, spec))
    assert request.chat
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


@given(ANY_PROFILE, NAMES, VALUES)
@examples(default=200, long=1500)
def test_any_value_of_a_parameter_is_read_or_refused(
    profile: Profile, name: str, value: Any
) -> None:
    check(read({"model": "m", "messages": [USER], name: value}, profile))


@given(st.lists(MESSAGES | VALUES, max_size=4))
@examples(default=200, long=2000)
def test_any_messages_are_read_or_refused(messages: list[Any]) -> None:
    check(read({"model": "m", "messages": messages}, VLLM))


@given(ANY_PROFILE, st.dictionaries(NAMES, VALUES, max_size=6), st.lists(MESSAGES, max_size=2))
@examples(default=200, long=1500)
def test_any_body_is_read_or_refused(
    profile: Profile, body: dict[str, Any], messages: list[Any]
) -> None:
    check(read({"messages": messages} | body, profile))


HUGE: dict[str, Callable[[], dict[str, Any]]] = {
    "calls": lambda: {
        "messages": [{"role": "assistant", "tool_calls": [{"type": "function"}] * 100_000}]
    },
    "extras": lambda: {"messages": [USER | {str(number): 1 for number in range(100_000)}, {}]},
    "functions": lambda: {"functions": [{}] * 100_000},
    "images": lambda: {"messages": [{"role": "user", "content": [image()] * 1_000}]},
    "kwargs": lambda: {"chat_template_kwargs": {str(number): 1 for number in range(100_000)}},
    "messages": lambda: {"messages": [{}] * 200_000},
    "metadata": lambda: {"metadata": {str(number): 1 for number in range(100_000)}},
    "parts": lambda: {"messages": [{"role": "user", "content": [{"type": "text"}] * 100_000}]},
    "tools": lambda: {"tools": [{"type": "function"}] * 100_000},
}
"""Made lazily: only the process of the test that needs it pays for it."""


@all_cases("name", HUGE)
def test_huge_value_is_refused_at_once(name: str) -> None:
    body = {"model": "m", "messages": [USER]} | HUGE[name]()
    error = at_once(lambda: read(body, VLLM), seconds=0.075)
    assert isinstance(error, BadRequestError)
    assert len(error.message) < 1000
