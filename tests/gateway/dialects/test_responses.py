"""Bodies of OpenAI's Responses: items, tools, and what has no effect."""

import json
import time
from typing import Any

import pytest

from contract.dialect import Dialect
from gateway.dialects.profile import PROFILES
from gateway.dialects.request import GenerationRequest, Sealed, StructureKind, ToolMode
from gateway.dialects.responses.items import item_id, listed_items, place_of, read_input
from gateway.dialects.responses.request import read_response
from gateway.dialects.responses.tools import Toolbox
from gateway.records.errors import BadRequestError
from tests.gateway.dialects.chat_reading import PNG_URI
from tests.support.cases import all_cases

LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits.", "format": LARK}
NAMESPACE = {
    "type": "namespace",
    "name": "mcp",
    "description": "A server.",
    "tools": [{"type": "function", "name": "look", "description": "Looks."}],
}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "ok"}


def read(body: dict[str, Any] | None = None, **parameters: Any) -> GenerationRequest:
    given = {"model": "m", "input": "Hello"} | (body or {}) | parameters
    return read_response(given, PROFILES[Dialect.OPENAI], max_prompts=1)


def messages_of(items: list[Any], **parameters: Any) -> list[dict[str, Any]]:
    request = read(input=items, **parameters)
    assert request.chat is not None
    return request.chat.messages


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(each["name"], each["arguments"]) for each in functions]


def test_parameters_of_chats_are_named_and_types_are_strict() -> None:
    ignored = read(
        {"return_token_ids": True, "stream_options": {}, "n": 1.0, "logprobs": False},
        text={"format": {"type": "text", "x": 1}},
        tools=[{**FUNCTION, "x": 1}],
        tool_choice={"type": "function", "name": "f", "x": 1},
    )
    names = ("return_token_ids", "text.format.x", "tool_choice.x", "tools[0].x")
    assert ignored.ignored_parameters == names
    for name, value in (("n", True), ("n_cmpl", 2), ("tools", [{"type": {}}])):
        with pytest.raises(BadRequestError) as caught:
            read({name: value})
        assert caught.value.param == name


def test_items_of_one_turn_are_one_message() -> None:
    parts = [{"type": "output_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    messages = messages_of(
        [
            user("a"),
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed"},
            {"type": "message", "role": "assistant", "phase": "commentary", "content": parts},
            CALL,
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
            {**CALL, "call_id": "c3", "name": "look", "namespace": "mcp"},
            OUTPUT,
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
            {**OUTPUT, "call_id": "c3", "output": [{"type": "input_text", "text": "seen"}]},
        ]
    )
    first, turn, *outputs = messages
    assert first == user("a")
    assert turn["sealed"] == [Sealed("sealed", "input[1].encrypted_content")]
    assert [part["text"] for part in turn["content"]] == ["b", "c"]
    expected = [("f", {"a": 1}), ("patch", {"input": "*** Begin"}), ("mcp__look", {"a": 1})]
    assert calls_of(turn) == expected
    assert [each["content"] for each in outputs] == ["ok", "ok", "seen"]


def test_calls_and_outputs_without_each_other_are_left_out() -> None:
    request = read(
        input=[OUTPUT, user("a"), CALL, {**CALL, "call_id": "c2"}, OUTPUT, OUTPUT, user("b")]
    )
    assert request.chat is not None
    _, turn, output, last = request.chat.messages
    assert [call["id"] for call in turn["tool_calls"]] == ["c1"]
    assert (output["role"], last) == ("tool", user("b"))
    assert {"input.output_without_call", "input.calls_without_output"} <= set(
        request.ignored_parameters
    )
    # Nothing of an output that is left out remains.
    shown = [{"type": "input_image", "image_url": PNG_URI}]
    request = read(input=[{**OUTPUT, "output": shown}, user("a")])
    assert request.chat is not None
    assert (request.chat.messages, request.chat.image_sources) == ([user("a")], [])
    # A turn that was nothing but an interrupted call.
    assert messages_of([user("a"), CALL, user("b")]) == [user("a"), user("b")]


def test_items_of_other_servers_are_left_out_and_named() -> None:
    kinds = ["web_search_call", "image_generation_call", "compaction", "context_compaction", "new"]
    request = read(input=[user("a"), *({"type": kind, "id": "x"} for kind in kinds)])
    assert request.chat is not None
    assert request.chat.messages == [user("a")]
    assert set(request.ignored_parameters) == {f"input.{kind}" for kind in kinds}


def test_file_is_named_to_the_model() -> None:
    data = {
        "type": "input_file",
        "filename": "a.pdf",
        "file_data": "data:application/pdf;base64,AAAA",
    }
    url = {"type": "input_file", "file_url": "https://a.b/c.pdf"}
    request = read(input=[{"role": "user", "content": [data, url]}])
    assert request.chat is not None
    start = "[A document, which this model cannot read: "
    texts = [part["text"] for part in request.chat.messages[0]["content"]]
    assert texts == [f"{start}a.pdf, application/pdf, 3 bytes]", f"{start}https://a.b/c.pdf]"]
    assert request.ignored_parameters == ("input.input_file",)


def test_messages_keep_their_places() -> None:
    messages = messages_of(
        [
            {"role": "developer", "content": "b"},
            user("c"),
            {"role": "developer", "content": "d"},
            {
                "type": "agent_message",
                "author": "x",
                "content": [{"type": "input_text", "text": "e"}],
            },
        ],
        instructions="a",
    )
    assert [each["role"] for each in messages] == ["system", "user", "developer", "user"]
    assert [part["text"] for part in messages[0]["content"]] == ["a", "b"]


def test_reasoning_is_read_from_its_text_or_sealed() -> None:
    texts = {
        "content": [{"type": "reasoning_text", "text": "r"}],
        "summary": [{"type": "summary_text", "text": "s"}],
    }
    answer = {"role": "assistant", "content": "b"}
    for item, reasoning, sealed in (
        (texts, "r", None),
        ({"summary": texts["summary"]}, "s", None),
        (
            {"summary": texts["summary"], "encrypted_content": "x"},
            None,
            [Sealed("x", "input[1].encrypted_content")],
        ),
        ({"summary": []}, None, None),
    ):
        reasoning_item = {"type": "reasoning", **item}
        message = messages_of([user("a"), reasoning_item, answer])[1]
        if sealed:
            # Several items of one turn stay in order.
            both = messages_of([user("a"), reasoning_item, {"type": "reasoning", **texts}, answer])[
                1
            ]
            assert both["sealed"] == [*sealed, "r"]
        assert message.get("reasoning") == message.get("reasoning_content") == reasoning
        assert message.get("sealed") == sealed


def test_calls_of_shells_and_searches_are_calls_of_functions() -> None:
    shell = {"type": "local_shell_call", "id": "x", "action": {"type": "exec", "command": ["ls"]}}
    search = {"type": "tool_search_call", "call_id": "y", "arguments": {"query": "a"}}
    found = {"type": "tool_search_output", "call_id": "y", "tools": [NAMESPACE]}
    more = {"type": "additional_tools", "role": "developer", "tools": [CUSTOM]}
    output = {"type": "local_shell_call_output", "id": "x", "output": "{}"}
    request = read(input=[user("a"), shell, search, output, found, more], tools=[SEARCH])
    assert request.chat is not None
    _, turn, _, listed, described = request.chat.messages
    assert calls_of(turn) == [("local_shell", {"command": ["ls"]}), ("tool_search", {"query": "a"})]
    assert json.loads(listed["content"])["function"]["name"] == "mcp__look"
    assert (described["role"], '"patch"' in described["content"]) == ("developer", True)
    # The model may call these tools, too, but the template describes only the request's.
    assert request.tool_use is not None
    assert [tool.name for tool in request.tool_use.tools] == ["tool_search", "mcp__look", "patch"]
    assert [tool["function"]["name"] for tool in request.chat.tools] == ["tool_search"]


def test_tools_are_functions_for_the_model() -> None:
    kinds = ["web_search", "image_generation", "file_search", "mcp", "code_interpreter", "other"]
    request = read(tools=[FUNCTION, CUSTOM, NAMESPACE, SEARCH, *({"type": each} for each in kinds)])
    assert request.chat is not None
    assert request.tool_use is not None
    names = ["f", "patch", "mcp__look", "tool_search"]
    assert [tool["function"]["name"] for tool in request.chat.tools] == names
    assert request.ignored_parameters == tuple(sorted(f"tools.{each}" for each in kinds))
    strict, patch, look, _ = request.tool_use.tools
    assert (strict.is_strict, look.is_strict) == (True, False)
    assert patch.grammar is not None
    assert (patch.grammar.kind, patch.grammar.source) == (StructureKind.LARK, "start: /a+/")
    assert patch.grammar.place == "tools[1].format.definition"
    described = {tool["function"]["name"]: tool["function"] for tool in request.chat.tools}
    assert described["mcp__look"]["description"] == "A server.\nLooks."
    assert "start: /a+/" in described["patch"]["description"]
    assert read(tools=[], tool_choice="auto").tool_use is None


@all_cases(
    ("choice", "mode", "name"),
    [
        ("auto", ToolMode.AUTO, None),
        ("required", ToolMode.REQUIRED, None),
        ({"type": "function", "name": "f"}, ToolMode.NAMED, "f"),
        ({"type": "function", "name": "look", "namespace": "mcp"}, ToolMode.NAMED, "mcp__look"),
        # OpenAI's type of a choice has no namespace.
        ({"type": "function", "name": "look"}, ToolMode.NAMED, "mcp__look"),
        ({"type": "namespace", "name": "mcp"}, ToolMode.NAMED, "mcp__look"),
        ({"type": "custom", "name": "patch"}, ToolMode.NAMED, "patch"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}],
            },
            ToolMode.REQUIRED,
            None,
        ),
    ],
)
def test_choices_of_tools(choice: Any, mode: ToolMode, name: str | None) -> None:
    request = read(tools=[FUNCTION, CUSTOM, NAMESPACE], tool_choice=choice)
    assert request.tool_use is not None
    assert (request.tool_use.mode, request.tool_use.name) == (mode, name)
    assert request.ignored_parameters == ()
    schema = {"format": {"type": "json_schema", "name": "o", "schema": {}}}
    request = read(tools=[FUNCTION, CUSTOM, NAMESPACE], tool_choice=choice, text=schema)
    is_free = mode is ToolMode.AUTO
    assert (request.structure is not None) is is_free
    assert request.ignored_parameters == (() if is_free else ("text.format",))


def test_namespace_of_several_tools_is_chosen_as_a_whole() -> None:
    both = {**NAMESPACE, "tools": [FUNCTION, *NAMESPACE["tools"]]}
    other = {**NAMESPACE, "name": "db"}
    tools, names = [FUNCTION, both, other], ["mcp__f", "mcp__look"]
    to_all = {"type": "namespace", "name": "mcp"}
    for choice, mode in (
        (to_all, ToolMode.REQUIRED),
        ({"type": "allowed_tools", "mode": "auto", "tools": [to_all]}, ToolMode.AUTO),
    ):
        use = read(tools=tools, tool_choice=choice).tool_use
        assert use is not None
        assert (use.mode, use.name, sorted(use.allowed)) == (mode, None, names)
        assert [tool.name for tool in use.tools] == names
    # A tool outside of namespaces has the name alone.
    use = read(tools=tools, tool_choice={"type": "function", "name": "f"}).tool_use
    assert use is not None
    assert use.name == "f"
    with pytest.raises(BadRequestError, match="'tool_choice' must have a 'namespace'"):
        read(tools=tools, tool_choice={"type": "function", "name": "look"})


def test_body_of_codex_is_taken() -> None:
    request = read(
        instructions="x",
        tools=[FUNCTION],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "high", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        service_tier="priority",
        text={
            "verbosity": "low",
            "format": {"type": "json_schema", "name": "o", "schema": {}, "strict": True},
        },
        stream_options={"include_obfuscation": False},
        prompt_cache_options={"a": 1},
    )
    assert request.chat is not None
    assert request.chat.template_arguments["reasoning_effort"] == "high"
    assert request.chat.template_arguments["verbosity"] == "low"
    assert request.chat.argument_params["verbosity"] == "text.verbosity"
    assert request.structure is not None
    assert request.structure.place == "text.format.schema"
    assert (request.max_tokens, request.stream) == (-1, True)
    # The maximum of other clients.
    assert read(max_output_tokens=5, truncation="auto", metadata={}).max_tokens == 5


@all_cases(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [user("a")] * 100_001}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
        ({"input": [{**CALL, "name": ""}]}, "input[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": "resp_1", "input": [OUTPUT]}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"container": "c"}, "container"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "x"}, "include"),
        ({"truncation": "some"}, "truncation"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "huge"}}, "text.verbosity"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**FUNCTION, "strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [{**CUSTOM, "format": {"type": "x"}}]}, "tools[0].format.type"),
        ({"tools": [{**CUSTOM, "format": {**LARK, "syntax": "x"}}]}, "tools[0].format.syntax"),
        (
            {"tools": [{**CUSTOM, "format": {"type": "grammar", "grammar": "x"}}]},
            "tools[0].format.grammar",
        ),
        ({"tools": [{**NAMESPACE, "tools": [{}]}]}, "tools[0].tools[0].type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_errors_name_the_place(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read(body)
    assert caught.value.param == param
    assert param in caught.value.message


def test_outputs_alone_are_refused_by_what_they_lack() -> None:
    with pytest.raises(BadRequestError, match="'previous_response_id'") as caught:
        read(input=[OUTPUT])
    assert caught.value.param == "input"


@all_cases(
    "item",
    [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a" * 20}]},
        {"role": "developer", "content": "a"},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
    ],
)
def test_many_items_take_linear_time(item: dict[str, Any]) -> None:
    began = time.process_time()
    messages_of([*[item] * 90_000, user("a")])
    assert time.process_time() - began < 5


def test_listed_items_have_ids_of_their_own_and_are_the_same_conversation() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "id": "fc_1"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "b", "id": None},
        {"role": "developer", "content": [{"type": "input_text", "text": "c"}], "id": "msg_2"},
    ]
    response_id = "resp_" + "a" * 26
    listed = listed_items(items, response_id)
    own = {index: item_id("msg_", response_id, f"in{index}") for index in (0, 2, 3)}
    assert [each["id"] for each in listed] == [own[0], "fc_1", own[2], own[3], "msg_2"]
    assert [place_of(each["id"]) for each in listed[:2]] == [("a" * 26, True), None]
    both = (read_input(each, None, Toolbox()) for each in (items, listed))
    assert next(both).messages == next(both).messages
    assert listed_items(listed, response_id) == listed
