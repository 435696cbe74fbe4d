"""Members of the objects in bodies: read, without effect, named or refused, at every place."""

import copy
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel

from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.embeddings import EmbeddingRequest
from gateway.dialects.lengths import RepetitionDetectionParameters
from gateway.dialects.messages.request import MessageRequest, read_message
from gateway.dialects.native import read_native_infill
from gateway.dialects.parameters import PARAMETERS, REJECTED_BY_MESSAGES, ROWS, Endpoints
from gateway.dialects.request import GenerationRequest
from gateway.dialects.responses.request import REJECTED, ResponseRequest, read_response
from gateway.dialects.speech import REFUSED, SpeechParameters, TranscriptionRequest
from gateway.dialects.stream_options import StreamOptions
from gateway.dialects.unknown_members import OBJECTS
from gateway.records.errors import BadRequestError
from tests.clients.member_types import ROOTS, collect
from tests.e2e.clients.environments import PROGRAMS, PYTHON
from tests.gateway.dialects.chat_reading import PNG_URI, image, read_chat_body, text
from tests.gateway.dialects.reading import LLAMACPP, OPENAI, read_body
from tests.support.cases import all_cases

BOTH, COMPLETIONS, CHATS = Endpoints.BOTH, Endpoints.COMPLETIONS, Endpoints.CHATS
RESPONSES, MESSAGES = Endpoints.RESPONSES, Endpoints.MESSAGES

SCHEMA: Final = {"type": "object"}
FUNCTION: Final = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ALLOWED: Final = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}
FILE: Final = {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0="}}
CHAT: Final = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [text(), image(), FILE]},
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


GRAMMAR: Final = {"syntax": "lark", "definition": "start: /a/"}
TEXT_TOOL: Final = {
    "type": "custom",
    "custom": {"name": "q", "format": {"type": "grammar", "grammar": GRAMMAR}},
}
TO_TEXT: Final = {"type": "custom", "custom": {"name": "q"}}
TEXT_CALL: Final = {"id": "c", "type": "custom", "custom": {"name": "q", "input": "a"}}


def chat_with(**parameters: Any) -> dict[str, Any]:
    return {"model": "m", "messages": CHAT["messages"], "tools": [FUNCTION]} | parameters


def call(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": kind, **more}


def of_type(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def input_of(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


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
    of_type("input_file", file_url="https://a.b/c.pdf"),
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
SYSTEM: Final = [
    of_type("tool_removal", tool=of_type("tool_reference", name="f")),
    of_type("tool_addition", tool=of_type("tool_reference", name="f")),
]
CLEARING: Final = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 9},
    "keep": {"type": "tool_uses", "value": 1},
    "clear_at_least": {"type": "input_tokens", "value": 1},
}
MESSAGE: Final = {
    "model": "m",
    "max_tokens": 9,
    "messages": [
        {"role": "assistant", "content": OF_ASSISTANT},
        {"role": "user", "content": BLOCKS},
        {"role": "system", "content": SYSTEM},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "context_management": {"edits": [CLEARING]},
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
        "prompt_cache_options": (
            read_completion,
            {"prompt_cache_options": {"mode": "implicit"}},
            "prompt_cache_options",
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
        **{
            f"tools[].custom{inner}": (
                read_chat_body,
                {**chat_with(), "tools": [TEXT_TOOL]},
                f"tools[0].custom{inner}",
            )
            for inner in ("", ".format", ".format.grammar")
        },
        "tool_choice.custom": (
            read_chat_body,
            {**chat_with(tool_choice=TO_TEXT), "tools": [TEXT_TOOL]},
            "tool_choice.custom",
        ),
        **{
            f"tool_choice.{outer}tools[].custom": (
                read_chat_body,
                {**chat_with(tool_choice=choice), "tools": [TEXT_TOOL]},
                f"tool_choice.{outer}tools[0].custom",
            )
            for outer, choice in (
                ("", {"type": "allowed_tools", "mode": "auto", "tools": [TO_TEXT]}),
                (
                    "allowed_tools.",
                    {
                        "type": "allowed_tools",
                        "allowed_tools": {"mode": "auto", "tools": [TO_TEXT]},
                    },
                ),
            )
        },
        "messages[]:assistant.tool_calls[].custom": (
            read_chat_body,
            {**CHAT, "messages": [{"role": "assistant", "tool_calls": [TEXT_CALL]}]},
            "messages[0].tool_calls[0].custom",
        ),
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
        "content[]:file": (read_chat_body, CHAT, "messages[0].content[2]"),
        "content[]:file.file": (read_chat_body, CHAT, "messages[0].content[2].file"),
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
        "prompt_cache_options": (
            read_a_response,
            {"prompt_cache_options": {}},
            "prompt_cache_options",
        ),
        "text": (read_a_response, {"text": {"verbosity": "low"}}, "text"),
        "text.format": (read_a_response, {"text": {"format": of_type("text")}}, "text.format"),
        "reasoning": (read_a_response, {"reasoning": {"effort": "low"}}, "reasoning"),
    },
    MESSAGES: {
        **by_types("content[]", "messages[0].content", OF_ASSISTANT, read_a_message, MESSAGE),
        **by_types("content[]", "messages[1].content", BLOCKS, read_a_message, MESSAGE),
        **by_types("content[]", "messages[2].content", SYSTEM, read_a_message, MESSAGE),
        **{
            f"content[]:{each['type']}.tool": (
                read_a_message,
                MESSAGE,
                f"messages[2].content[{index}].tool",
            )
            for index, each in enumerate(SYSTEM)
        },
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
        "diagnostics": (read_a_message, MESSAGE | {"diagnostics": {}}, "diagnostics"),
        "context_management": (read_a_message, MESSAGE, "context_management"),
        **{
            f"context_management.edits[]{inner}": (
                read_a_message,
                MESSAGE,
                f"context_management.edits[0]{inner}",
            )
            for inner in ("", ".trigger", ".keep", ".clear_at_least")
        },
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


LABELS: Final = {name: row for name, row in PARAMETERS.items() if not row.endpoints}
BODIES: Final[dict[str, tuple[type[BaseModel], Mapping[str, Any]]]] = {
    "completions": (CompletionRequest, PARAMETERS),
    "chats": (ChatCompletionRequest, PARAMETERS),
    "responses": (ResponseRequest, {**PARAMETERS, **REJECTED}),
    "messages": (MessageRequest, {**LABELS, **REJECTED_BY_MESSAGES}),
    "embeddings": (EmbeddingRequest, {}),
    "transcriptions": (TranscriptionRequest, REFUSED),
    "translations": (SpeechParameters, {}),
}
"""The parameters of each endpoint: those that are read, and those that have a row of their own."""
IN_HEADERS: Final = {"betas", "user_profile_id", "workspace_id"}
"""Parameters that Anthropic's package sends as headers."""
SAME_PLACES: Final = {
    r"^system\[\]": "content[]",
    r"^response_format:json_schema\.json_schema": "response_format:wrapper",
    r"^content\[\]:tool_addition\.tool:tool_definition\.definition": "tools[]",
    r"^input\[\]:\w+\.(output|summary)\[\]": "content[]",
    r"^(tools\[\]:namespace|input\[\]:(additional_tools|tool_search_output))\.tools\[\]": "tools[]",
}
"""Places whose objects are read as those of another place."""
ANY_MEMBERS: Final = {
    "tools[].input_schema",
    "input[]:local_shell_call.action",
    "input[]:shell_call.action",
    "cache_control",
    "chunking_strategy",
}
"""Objects whose members are not read one by one."""
READ_TYPES: Final = {
    "content[]:document.source": {"base64", "text", "content", "url"},
    "content[]:image.source": {"base64", "url"},
    "context_management.edits[]": {"clear_tool_uses_20250919"},
    "content[]:tool_addition.tool": {"tool_reference", "tool_definition"},
    "content[]:tool_removal.tool": {"tool_reference"},
    "tools[]": {"custom", "function"},
    "tool_choice": {"allowed_tools", "any", "auto", "custom", "function", "none", "tool"},
}
"""The types of objects that are read where others are refused or left out as a whole."""


def unclassified(endpoint: str, found: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Return the members that clients can send and the tables lack, by their places."""
    body, rows = BODIES[endpoint]
    fields = {field.alias or name for name, field in body.model_fields.items()}
    read = fields | {name.removesuffix("[]") for name in fields}
    lacking = {"": {*found[""]} - read - rows.keys() - IN_HEADERS}
    key = Endpoints.__members__.get(endpoint.upper(), Endpoints.NONE)
    objects = {**OBJECTS[BOTH], **OBJECTS.get(key, {})}
    for given in found:
        moves = (re.sub(pattern, other, given) for pattern, other in SAME_PLACES.items())
        place = next((moved for moved in moves if moved != given), given)
        name, is_read = "", True
        for step in place.split(".") if place else ():
            plain, _, kind = step.partition(":")
            member = plain.removesuffix("[]")
            held = objects[name].read if name else (*fields, "content")
            outer = f"{name}.{plain}".removeprefix(".")
            is_read = member in held and outer not in ANY_MEMBERS
            is_read &= kind in READ_TYPES.get(outer, {kind})
            typed = f"{outer}:{kind}"
            by_type = any(each.startswith(f"{outer}:") for each in objects)
            name = typed if typed in objects else outer
            # An object of an unknown type is refused or left out as a whole.
            if not is_read or (name not in objects and by_type):
                break
            if name not in objects:
                lacking[outer] = {*found[given]}
                break
        else:
            if name:
                lacking[given] = {*found[given]} - objects[name].known - objects[name].rows.keys()
    return {place: members for place, members in lacking.items() if members}


@pytest.mark.parametrize("environment", ["dev", pytest.param("clients", marks=PYTHON.skip)])
def test_every_member_that_clients_can_send_is_classified(environment: str, tmp_path: Path) -> None:
    """The newest `openai` is among the tools for development, the newest `anthropic` is not."""
    given: Mapping[str, Mapping[str, Collection[str]]]
    if environment == "dev":
        given = {name: collect(roots) for name, roots in ROOTS.items()}
    else:
        given = json.loads(PYTHON.run(["python", str(PROGRAMS / "member_types.py")], tmp_path))
    assert given.keys() == BODIES.keys()
    lacking = {endpoint: unclassified(endpoint, found) for endpoint, found in given.items()}
    assert not {endpoint: each for endpoint, each in lacking.items() if each}
    # What the check would find.
    thinking = {"thinking:enabled": ["type", "zeta"], "zeta[]": ["a"], "": ["model", "zeta"]}
    assert unclassified("messages", thinking) == {"": {"zeta"}, "thinking:enabled": {"zeta"}}
