"""Members of the objects in bodies: read, without effect, named or refused, at every place."""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, get_type_hints

import anthropic.types as of_anthropic
import openai.types.chat as of_chats
import openai.types.responses as of_responses
import openai.types.shared_params as of_openai
import pytest
from anthropic.types.beta import BetaOutputConfigParam
from openai.types.responses import response_input_param as of_items

from gateway.dialects.lengths import RepetitionDetectionParameters
from gateway.dialects.members import OBJECTS
from gateway.dialects.messages.request import read_message
from gateway.dialects.native import read_native_infill
from gateway.dialects.parameters import ROWS, Endpoints
from gateway.dialects.request import GenerationRequest
from gateway.dialects.responses.request import read_response
from gateway.dialects.stream_options import StreamOptions
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import PNG_URI, image, read_chat_body, text
from tests.gateway.dialects.reading import LLAMACPP, OPENAI, read_body
from tests.support.cases import all_cases

BOTH, COMPLETIONS, CHATS = Endpoints.BOTH, Endpoints.COMPLETIONS, Endpoints.CHATS
RESPONSES, MESSAGES = Endpoints.RESPONSES, Endpoints.MESSAGES

SCHEMA: Final = {"type": "object"}
FUNCTION: Final = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ALLOWED: Final = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}
CHAT: Final = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [text(), image()]},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}],
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "a"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
    ],
    "thinking": {"type": "enabled"},
    "reasoning": {"enabled": True},
}


LEGACY: Final = {
    "model": "m",
    "messages": CHAT["messages"],
    "functions": [FUNCTION["function"]],
    "function_call": {"name": "f"},
}


def chat_with(**parameters: Any) -> dict[str, Any]:
    return {"model": "m", "messages": CHAT["messages"], "tools": [FUNCTION]} | parameters


def call(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": kind, **more}


def of_type(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def input_of(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


GRAMMAR: Final = {"syntax": "lark", "definition": "start: /a/"}
ITEMS: Final = [
    of_type("message", role="user", content="a"),
    of_type("agent_message", author="b", content="c"),
    of_type("reasoning", summary=[], content=[of_type("reasoning_text", text="a")]),
    call("function_call", name="f", arguments="{}"),
    call("custom_tool_call", name="patch", input="a"),
    call("local_shell_call", action={"command": ["ls"]}),
    call("shell_call", action={"commands": ["ls"]}),
    call("tool_search_call", arguments="{}"),
    of_type("function_call_output", call_id="function_call", output="a"),
    of_type("custom_tool_call_output", call_id="custom_tool_call", output="a"),
    of_type("local_shell_call_output", call_id="local_shell_call", output="a"),
    of_type("shell_call_output", call_id="shell_call", output="a"),
    of_type("tool_search_output", call_id="tool_search_call", tools=[]),
    of_type("additional_tools", tools=[]),
]
PARTS: Final = [
    *(of_type(kind, text="a") for kind in ("input_text", "output_text", "text")),
    *(of_type(kind, text="a") for kind in ("summary_text", "reasoning_text")),
    of_type("refusal", refusal="a"),
    of_type("input_image", image_url=PNG_URI),
]
RESPONSE_TOOLS: Final = [
    of_type("function", name="f", parameters=SCHEMA),
    of_type("custom", name="patch", format=of_type("grammar", **GRAMMAR)),
    of_type("namespace", name="n", tools=[]),
    of_type("tool_search", execution="client"),
    of_type("local_shell"),
    of_type("shell"),
]
IN_GRAMMAR: Final = [of_type("custom", name="p", format=of_type("grammar", grammar=GRAMMAR))]
BASE64: Final = PNG_URI.partition(",")[2]
SOURCE: Final = {"type": "base64", "media_type": "image/png", "data": BASE64}
BLOCKS: Final = [
    text(),
    of_type("image", source=SOURCE),
    of_type("document", source={"type": "text", "data": "a"}),
    of_type("search_result", source="s", title="t", content=[text()]),
    of_type("tool_result", tool_use_id="c", content=[of_type("tool_reference", tool_name="f")]),
]
OF_ASSISTANT: Final = [
    of_type("thinking", thinking="a"),
    of_type("redacted_thinking", data="a"),
    of_type("tool_use", id="c", name="f", input={}),
]
MESSAGE: Final = {
    "model": "m",
    "max_tokens": 9,
    "messages": [
        {"role": "assistant", "content": OF_ASSISTANT},
        {"role": "user", "content": BLOCKS},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "metadata": {"user_id": "u"},
}


def read_completion(body: dict[str, Any]) -> GenerationRequest:
    return read_body({"model": "m", "prompt": "a"} | body)


def read_infill(body: dict[str, Any]) -> GenerationRequest:
    given = {"input_prefix": "a", "input_suffix": "b"} | body
    return read_native_infill(given, LLAMACPP, max_prompts=1)


def read_a_response(body: dict[str, Any]) -> GenerationRequest:
    return read_response({"model": "m", "input": "a"} | body, OPENAI, max_prompts=1)


def read_a_message(body: dict[str, Any]) -> GenerationRequest:
    return read_message(body, OPENAI, max_prompts=1)


Reader = Callable[[dict[str, Any]], GenerationRequest]
Place = tuple[Reader, Mapping[str, Any], str]


def by_types(place: str, at: str, values: list[Any], reader: Reader, body: Any) -> dict[str, Place]:
    return {
        f"{place}:{each['type']}": (reader, body, f"{at}[{index}]")
        for index, each in enumerate(values)
    }


CUSTOM: Final = "tools[]:custom.format"
TO_TOOLS: Final = {"type": "allowed_tools", **ALLOWED}
TO_ALLOWED: Final = {"type": "allowed_tools", "allowed_tools": ALLOWED}
TO_FUNCTION: Final = {"tools": [FUNCTION], "tool_choice": FUNCTION | {"function": {"name": "f"}}}
PLACES: Final[dict[Endpoints, dict[str, Place]]] = {
    BOTH: {
        "stream_options": (read_completion, STREAMED, "stream_options"),
        "repetition_detection": (
            read_completion,
            {"repetition_detection": {"max_pattern_size": 0}},
            "repetition_detection",
        ),
        "grammar": (read_completion, {"grammar": {"type": "regex", "value": "a"}}, "grammar"),
        "response_format": (
            read_completion,
            {"response_format": {"type": "text"}},
            "response_format",
        ),
        "response_format:wrapper": (
            read_completion,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
        ),
        "structured_outputs": (
            read_completion,
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
    },
    COMPLETIONS: {
        "tool_choice": (read_completion, TO_FUNCTION, "tool_choice"),
        "tool_choice.function": (read_completion, TO_FUNCTION, "tool_choice.function"),
        "tools[]": (read_completion, {"tools": [FUNCTION]}, "tools[0]"),
        "tools[].function": (read_completion, {"tools": [FUNCTION]}, "tools[0].function"),
        "input_extra[]": (read_infill, {"input_extra": [{"text": "a"}]}, "input_extra[0]"),
    },
    CHATS: {
        "tools[]": (read_chat_body, chat_with(), "tools[0]"),
        "tools[].function": (read_chat_body, chat_with(), "tools[0].function"),
        "functions[]": (read_chat_body, LEGACY, "functions[0]"),
        "tool_choice": (read_chat_body, chat_with(tool_choice=TO_TOOLS), "tool_choice"),
        "tool_choice.function": (
            read_chat_body,
            chat_with(tool_choice=TO_FUNCTION["tool_choice"]),
            "tool_choice.function",
        ),
        "tool_choice.tools[]": (
            read_chat_body,
            chat_with(tool_choice=TO_TOOLS),
            "tool_choice.tools[0]",
        ),
        "tool_choice.tools[].function": (
            read_chat_body,
            chat_with(tool_choice=TO_TOOLS),
            "tool_choice.tools[0].function",
        ),
        "tool_choice.allowed_tools": (
            read_chat_body,
            chat_with(tool_choice=TO_ALLOWED),
            "tool_choice.allowed_tools",
        ),
        "tool_choice.allowed_tools.tools[]": (
            read_chat_body,
            chat_with(tool_choice=TO_ALLOWED),
            "tool_choice.allowed_tools.tools[0]",
        ),
        "tool_choice.allowed_tools.tools[].function": (
            read_chat_body,
            chat_with(tool_choice=TO_ALLOWED),
            "tool_choice.allowed_tools.tools[0].function",
        ),
        "messages[]:user": (read_chat_body, CHAT, "messages[0]"),
        "messages[]:assistant": (read_chat_body, CHAT, "messages[1]"),
        "messages[]:tool": (read_chat_body, CHAT, "messages[2]"),
        "messages[]:assistant.tool_calls[]": (read_chat_body, CHAT, "messages[1].tool_calls[0]"),
        "messages[]:assistant.tool_calls[].function": (
            read_chat_body,
            CHAT,
            "messages[1].tool_calls[0].function",
        ),
        "messages[]:assistant.function_call": (read_chat_body, CHAT, "messages[3].function_call"),
        "content[]:text": (read_chat_body, CHAT, "messages[0].content[0]"),
        "content[]:image_url": (read_chat_body, CHAT, "messages[0].content[1]"),
        "content[]:image_url.image_url": (read_chat_body, CHAT, "messages[0].content[1].image_url"),
        "content[]:refusal": (read_chat_body, CHAT, "messages[1].content[0]"),
        "thinking": (read_chat_body, CHAT, "thinking"),
        "reasoning": (read_chat_body, CHAT, "reasoning"),
        "function_call": (read_chat_body, LEGACY, "function_call"),
    },
    RESPONSES: {
        **by_types("input[]", "input", ITEMS, read_a_response, {"input": ITEMS}),
        **by_types(
            "content[]", "input[0].content", PARTS, read_a_response, {"input": input_of(*PARTS)}
        ),
        **by_types("tools[]", "tools", RESPONSE_TOOLS, read_a_response, {"tools": RESPONSE_TOOLS}),
        CUSTOM: (read_a_response, {"tools": RESPONSE_TOOLS}, "tools[1].format"),
        f"{CUSTOM}.grammar": (read_a_response, {"tools": IN_GRAMMAR}, "tools[0].format.grammar"),
        "tool_choice": (
            read_a_response,
            {"tools": RESPONSE_TOOLS, "tool_choice": of_type("function", name="f")},
            "tool_choice",
        ),
        "tool_choice.tools[]": (
            read_a_response,
            {
                "tools": RESPONSE_TOOLS,
                "tool_choice": of_type("allowed_tools", tools=[of_type("function", name="f")]),
            },
            "tool_choice.tools[0]",
        ),
        "text": (read_a_response, {"text": {"verbosity": "low"}}, "text"),
        "text.format": (read_a_response, {"text": {"format": of_type("text")}}, "text.format"),
        "reasoning": (read_a_response, {"reasoning": {"effort": "low"}}, "reasoning"),
    },
    MESSAGES: {
        **by_types("content[]", "messages[0].content", OF_ASSISTANT, read_a_message, MESSAGE),
        **by_types("content[]", "messages[1].content", BLOCKS, read_a_message, MESSAGE),
        "content[]:tool_reference": (
            read_a_message,
            MESSAGE,
            "messages[1].content[4].content[0]",
        ),
        "content[]:image.source": (read_a_message, MESSAGE, "messages[1].content[1].source"),
        "content[]:document.source": (read_a_message, MESSAGE, "messages[1].content[2].source"),
        "messages[]": (read_a_message, MESSAGE, "messages[1]"),
        "tools[]": (read_a_message, MESSAGE, "tools[0]"),
        **{
            path: (read_a_message, MESSAGE, path)
            for path in ("tool_choice", "thinking", "metadata", "output_format")
        },
        "output_config": (read_a_message, MESSAGE, "output_config"),
        "output_config.format": (read_a_message, MESSAGE, "output_config.format"),
    },
}
"""How each object is read, in which body, and where it is there."""
OF_PROMPTS: Final = (COMPLETIONS, "prompt")
"""An object with one member: others are refused, and tested with prompts."""
NOTHING: Final[list[Any]] = [None, "", [], {}, False]
ALL: Final = [(each, name) for each, places in PLACES.items() for name in places]


def body_with(endpoints: Endpoints, name: str, member: str, value: Any) -> tuple[Reader, Any, str]:
    """Return a reader, a body in which an object has a member, and the path of the member."""
    reader, body, path = PLACES[endpoints][name]
    changed: Any = copy.deepcopy(dict(body))
    place = changed
    for step in re.findall(r"\w+", path):
        place = place[int(step) if step.isdigit() else step]
    place[member] = value
    return reader, changed, f"{path}.{member}"


def test_every_object_has_a_place() -> None:
    objects = {(each, name) for each, named in OBJECTS.items() for name in named}
    assert objects - {OF_PROMPTS} == set(ALL)


@all_cases(("endpoints", "name"), ALL)
def test_unknown_member_is_named_by_its_path(endpoints: Endpoints, name: str) -> None:
    reader, body, path = body_with(endpoints, name, "zeta", 1)
    assert path in reader(body).ignored_parameters
    for nothing in NOTHING:
        reader, body, path = body_with(endpoints, name, "zeta", nothing)
        assert path not in reader(body).ignored_parameters


@all_cases(("endpoints", "name"), ALL)
def test_member_of_a_history_is_neither_named_nor_refused(endpoints: Endpoints, name: str) -> None:
    for member in OBJECTS[endpoints][name].without_effect:
        reader, body, path = body_with(endpoints, name, member, "completed")
        assert path not in reader(body).ignored_parameters


@all_cases(("endpoints", "name"), ALL)
def test_member_that_would_change_the_response_is_refused_by_its_path(
    endpoints: Endpoints, name: str
) -> None:
    for member, row in OBJECTS[endpoints][name].rows.items():
        for value in row.accepted:
            reader, body, path = body_with(endpoints, name, member, value)
            assert path not in reader(body).ignored_parameters
        other = "low" if member == "detail" else {"enabled": True}
        reader, body, path = body_with(endpoints, name, member, other)
        if not row.endpoints:
            assert path in reader(body).ignored_parameters
            continue
        with pytest.raises(BadRequestError) as caught:
            reader(body)
        assert (caught.value.param, caught.value.code) == (path, "unsupported_parameter")
        assert row.reason in caught.value.message


def test_every_row_of_a_member_is_that_of_an_object() -> None:
    found = {
        f"{name}.{member}"
        for named in OBJECTS.values()
        for name, members in named.items()
        for member in members.rows
        if member not in members.known
    }
    assert {name for name, _ in ROWS if "." in name} == found


def test_objects_that_are_validated_by_fields_have_these_members() -> None:
    for name, fields in (
        ("stream_options", StreamOptions),
        ("repetition_detection", RepetitionDetectionParameters),
    ):
        assert OBJECTS[BOTH][name].known == fields.model_fields.keys()


OF_CLIENTS: Final[list[tuple[Endpoints, str, list[Any], set[str]]]] = [
    (BOTH, "stream_options", [of_chats.ChatCompletionStreamOptionsParam], set()),
    (BOTH, "response_format", [of_openai.ResponseFormatJSONSchema], set()),
    (
        BOTH,
        "response_format:wrapper",
        [get_type_hints(of_openai.ResponseFormatJSONSchema)["json_schema"]],
        {"description"},
    ),
    (CHATS, "tool_choice", [of_chats.ChatCompletionNamedToolChoiceParam], set()),
    (CHATS, "tool_choice", [of_chats.ChatCompletionAllowedToolChoiceParam], set()),
    (CHATS, "tool_choice.allowed_tools", [of_chats.ChatCompletionAllowedToolsParam], set()),
    (CHATS, "tools[]", [of_chats.ChatCompletionFunctionToolParam], set()),
    (CHATS, "tools[].function", [of_openai.FunctionDefinition], set()),
    (CHATS, "messages[]:user", [of_chats.ChatCompletionUserMessageParam], set()),
    (CHATS, "messages[]:assistant", [of_chats.ChatCompletionAssistantMessageParam], set()),
    # What a client has from the response.
    (CHATS, "messages[]:assistant", [of_chats.ChatCompletionMessage], set()),
    (CHATS, "messages[]:tool", [of_chats.ChatCompletionToolMessageParam], set()),
    (
        CHATS,
        "messages[]:assistant.tool_calls[]",
        [of_chats.ChatCompletionMessageFunctionToolCallParam],
        set(),
    ),
    (
        CHATS,
        "content[]:text",
        [of_chats.ChatCompletionContentPartTextParam],
        {"prompt_cache_breakpoint"},
    ),
    (
        CHATS,
        "content[]:image_url",
        [of_chats.ChatCompletionContentPartImageParam],
        {"prompt_cache_breakpoint"},
    ),
    (
        CHATS,
        "content[]:image_url.image_url",
        [get_type_hints(of_chats.ChatCompletionContentPartImageParam)["image_url"]],
        set(),
    ),
    (CHATS, "content[]:refusal", [of_chats.ChatCompletionContentPartRefusalParam], set()),
    (
        RESPONSES,
        "input[]:message",
        [of_items.Message, of_responses.EasyInputMessageParam, of_responses.ResponseOutputMessage],
        set(),
    ),
    (RESPONSES, "input[]:reasoning", [of_responses.ResponseReasoningItem], set()),
    (RESPONSES, "input[]:function_call", [of_responses.ResponseFunctionToolCallParam], set()),
    (RESPONSES, "input[]:function_call_output", [of_items.FunctionCallOutput], set()),
    (RESPONSES, "input[]:custom_tool_call", [of_responses.ResponseCustomToolCallParam], set()),
    (
        RESPONSES,
        "input[]:custom_tool_call_output",
        [of_responses.ResponseCustomToolCallOutputParam],
        set(),
    ),
    (RESPONSES, "input[]:local_shell_call", [of_items.LocalShellCall], set()),
    (RESPONSES, "input[]:local_shell_call_output", [of_items.LocalShellCallOutput], set()),
    (RESPONSES, "input[]:shell_call", [of_items.ShellCall], set()),
    (RESPONSES, "input[]:shell_call_output", [of_items.ShellCallOutput], set()),
    (RESPONSES, "input[]:tool_search_call", [of_items.ToolSearchCall], set()),
    (RESPONSES, "input[]:additional_tools", [of_items.AdditionalTools], set()),
    (
        RESPONSES,
        "content[]:input_text",
        [of_responses.ResponseInputTextParam],
        {"prompt_cache_breakpoint"},
    ),
    (
        RESPONSES,
        "content[]:input_image",
        [of_responses.ResponseInputImageParam],
        {"prompt_cache_breakpoint"},
    ),
    (RESPONSES, "content[]:output_text", [of_responses.ResponseOutputText], set()),
    (RESPONSES, "content[]:refusal", [of_responses.ResponseOutputRefusal], set()),
    (RESPONSES, "tools[]:function", [of_responses.FunctionToolParam], {"async", "output_schema"}),
    (RESPONSES, "tools[]:custom", [of_responses.CustomToolParam], {"async"}),
    (RESPONSES, "tools[]:namespace", [of_responses.NamespaceToolParam], set()),
    (RESPONSES, "tools[]:tool_search", [of_responses.ToolSearchToolParam], set()),
    (RESPONSES, "tools[]:shell", [of_responses.FunctionShellToolParam], set()),
    (RESPONSES, "tool_choice", [of_responses.ToolChoiceAllowedParam], set()),
    (RESPONSES, "text", [of_responses.ResponseTextConfigParam], set()),
    (
        RESPONSES,
        "text.format",
        [of_responses.ResponseFormatTextJSONSchemaConfigParam],
        {"description"},
    ),
    (RESPONSES, "reasoning", [of_openai.Reasoning], set()),
    (
        MESSAGES,
        "messages[]",
        [of_anthropic.UserMessageParam, of_anthropic.AssistantMessageParam],
        set(),
    ),
    (MESSAGES, "content[]:text", [of_anthropic.TextBlockParam, of_anthropic.TextBlock], set()),
    (MESSAGES, "content[]:image", [of_anthropic.ImageBlockParam], set()),
    (MESSAGES, "content[]:document", [of_anthropic.DocumentBlockParam], set()),
    (MESSAGES, "content[]:search_result", [of_anthropic.SearchResultBlockParam], set()),
    (MESSAGES, "content[]:tool_reference", [of_anthropic.ToolReferenceBlockParam], set()),
    (
        MESSAGES,
        "content[]:tool_use",
        [of_anthropic.ToolUseBlockParam, of_anthropic.ToolUseBlock],
        set(),
    ),
    (MESSAGES, "content[]:tool_result", [of_anthropic.ToolResultBlockParam], set()),
    (MESSAGES, "content[]:thinking", [of_anthropic.ThinkingBlock], set()),
    (MESSAGES, "content[]:redacted_thinking", [of_anthropic.RedactedThinkingBlock], set()),
    (
        MESSAGES,
        "content[]:image.source",
        [of_anthropic.Base64ImageSourceParam, of_anthropic.URLImageSourceParam],
        set(),
    ),
    (
        MESSAGES,
        "content[]:document.source",
        [of_anthropic.PlainTextSourceParam, of_anthropic.ContentBlockSourceParam],
        set(),
    ),
    (MESSAGES, "tools[]", [of_anthropic.ToolParam], set()),
    (MESSAGES, "tool_choice", [of_anthropic.ToolChoiceToolParam], set()),
    (
        MESSAGES,
        "thinking",
        [of_anthropic.ThinkingConfigEnabledParam, of_anthropic.ThinkingConfigAdaptiveParam],
        set(),
    ),
    # The budget is advisory: Anthropic's API shows it to the model, and it limits nothing.
    (MESSAGES, "output_config", [BetaOutputConfigParam], {"task_budget"}),
    (MESSAGES, "output_config.format", [of_anthropic.JSONOutputFormatParam], set()),
    (MESSAGES, "metadata", [of_anthropic.MetadataParam], set()),
]
"""Types of OpenAI's and Anthropic's libraries, and their members that are only named."""


@all_cases(("endpoints", "name", "types", "named"), OF_CLIENTS)
def test_every_member_that_clients_can_send_is_classified(
    endpoints: Endpoints, name: str, types: list[Any], named: set[str]
) -> None:
    members = OBJECTS[endpoints][name]
    documented = {member for each in types for member in each.__annotations__}
    assert documented
    assert documented - members.known - members.rows.keys() == named
