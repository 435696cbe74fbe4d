"""Bodies of Anthropic's Messages: the chats they become, and the errors that name their places."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.messages import Feature
from gateway.dialects.messages.conversation import ROLES
from gateway.dialects.messages.edits import CLEARED, clear_tool_uses
from gateway.dialects.messages.request import (
    MessageRequest,
    read_counted_message,
    read_message,
)
from gateway.dialects.parameters import UNSEEN_IMAGE, check_supported
from gateway.dialects.request import (
    ChatRequest,
    GenerationRequest,
    ImageSource,
    Sealed,
    StructureKind,
    ToolMode,
)
from gateway.dialects.stream_options import AUTO_TIER
from gateway.records.errors import BadRequestError, ErrorStyle
from tests.gateway.dialects.chat_reading import PNG
from tests.gateway.dialects.reading import LLAMACPP, OPENAI, at_once
from tests.gateway.dialects.test_any_body import VALUES, check
from tests.support.cases import all_cases
from tests.support.examples import examples

HELLO = {"role": "user", "content": "Hello"}
CACHED = {"cache_control": {"type": "ephemeral"}}
PNG_SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
IMAGE = {"type": "image", "source": PNG_SOURCE}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA}


def read(**parameters: Any) -> GenerationRequest:
    """Read a plain body with these parameters."""
    body = {"model": "m", "max_tokens": 2048, "messages": [HELLO]} | parameters
    return read_message(body, OPENAI, max_prompts=1)


def chat(**parameters: Any) -> ChatRequest:
    """Return the part of such a request that only chats have."""
    request = read(**parameters)
    assert request.chat is not None
    return request.chat


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(content: str = "a") -> dict[str, Any]:
    return {"type": "text", "text": content} | CACHED


def part(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def use(number: int = 1) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {"path": "/a"}}


def result(content: Any = "b", number: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "type": "tool_result",
        "tool_use_id": f"toolu_{number}",
        "content": content,
        **CACHED,
        **more,
    }


def called(number: int = 1) -> dict[str, Any]:
    function = {"arguments": {"path": "/a"}, "name": "Read"}
    return {"id": f"toolu_{number}", "function": function, "type": "function"}


def tool(content: str = "b", number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"toolu_{number}"}


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "of another server"}
HIDDEN = {"type": "thinking", "thinking": "", "signature": "sealed"}
PLACE = "messages[1].content[0]."
THINKS = {"enable_thinking": True, "thinking": True}
REASONING = {"reasoning": "Hm.", "reasoning_content": "Hm."}

CONVERSATIONS: list[tuple[list[Any], list[dict[str, Any]]]] = [
    ([HELLO], [HELLO]),
    ([user(text())], [{"role": "user", "content": "a"}]),
    ([user(text(), text("b"))], [{"role": "user", "content": [part("a"), part("b")]}]),
    ([user()], [{"role": "user", "content": ""}]),
    ([{"role": "user", "content": ""}], [{"role": "user", "content": ""}]),
    ([user(text(""))], [{"role": "user", "content": ""}]),
    ([HELLO, user(text())], [{"role": "user", "content": [part("Hello"), part("a")]}]),
    (
        [HELLO, assistant(THOUGHT, text(), use())],
        [HELLO, {"role": "assistant", "content": "a", "tool_calls": [called()]} | REASONING],
    ),
    (
        [assistant(use()), assistant(use(2)), user(result(), result("c", 2), text())],
        [
            {"role": "assistant", "content": None, "tool_calls": [called(), called(2)]},
            tool(),
            tool("c", 2),
            {"role": "user", "content": "a"},
        ],
    ),
    ([user(text(), result())], [{"role": "user", "content": "a"}, tool()]),
    ([user(result(None))], [tool("")]),
    ([user(result([text(), text("b")]))], [tool("a\nb")]),
    ([user(result("No such file.", is_error=True))], [tool("Error: No such file.")]),
    ([user(result([{"type": "tool_reference", "tool_name": "Read"}]))], [tool("Read")]),
    (
        [user(result([text(), IMAGE]), result("c", 2), text("d"))],
        [tool("a"), tool("c", 2), {"role": "user", "content": [{"type": "image"}, part("d")]}],
    ),
    ([user(result([IMAGE]))], [tool(""), {"role": "user", "content": [{"type": "image"}]}]),
    (
        [
            user(
                {
                    "type": "document",
                    "title": "T",
                    "context": "C",
                    "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                },
                {"type": "document", "source": {"type": "content", "content": [text("E")]}},
                {"type": "search_result", "title": "F", "source": "G", "content": [text("H")]},
            )
        ],
        [{"role": "user", "content": [part(letter) for letter in "TCDEFGH"]}],
    ),
    (
        [HELLO, assistant(HIDDEN), user(text())],
        [
            HELLO,
            {"role": "assistant", "content": "", "sealed": [Sealed("sealed", PLACE + "signature")]},
            {"role": "user", "content": "a"},
        ],
    ),
    (
        [HELLO, assistant({"type": "redacted_thinking", "data": "sealed"}, THOUGHT, HIDDEN, use())],
        [
            HELLO,
            {
                "role": "assistant",
                "content": None,
                "sealed": [
                    Sealed("sealed", PLACE + "data"),
                    "Hm.",
                    Sealed("sealed", "messages[1].content[2].signature"),
                ],
                "tool_calls": [called()],
            },
        ],
    ),
    (
        [HELLO, assistant(use()), user(result()), {"role": "system", "content": [text("left: 9")]}],
        [
            HELLO,
            {"role": "assistant", "content": None, "tool_calls": [called()]},
            tool(),
            {"role": "system", "content": "left: 9"},
        ],
    ),
]


@all_cases(("messages", "expected"), CONVERSATIONS)
def test_messages_become_a_chat(messages: list[Any], expected: list[dict[str, Any]]) -> None:
    assert chat(messages=messages).messages == expected
    # The prompt of a session only grows.
    assert chat(messages=messages[:-1] or [HELLO]).messages[:1] in (expected[:1], [HELLO])


@all_cases(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief."), text("Be kind.")], [part("Be brief."), part("Be kind.")]),
        ([text("x-anthropic-billing-header: cch=1;"), text("Be brief.")], "Be brief."),
        ("x-anthropic-billing-header: cch=1;\nx-anthropic-b: 2\nBe brief.", "Be brief."),
        ("See x-anthropic-version.", "See x-anthropic-version."),
    ],
)
def test_system_prompt_comes_first_without_lines_that_differ_in_each_request(
    system: Any, expected: Any
) -> None:
    assert chat(system=system).messages == [{"role": "system", "content": expected}, HELLO]
    in_place = [HELLO, {"role": "system", "content": system}]
    assert chat(messages=in_place).messages == [HELLO, {"role": "system", "content": expected}]
    assert chat(system="x-anthropic-a: 1").messages == [HELLO]


def test_blocks_of_other_servers_tools_are_left_out_and_named() -> None:
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    request = read(messages=[HELLO, assistant(search, found, search, text()), HELLO])
    assert request.chat is not None
    assert request.chat.messages == [HELLO, {"role": "assistant", "content": "a"}, HELLO]
    assert request.ignored_parameters == (
        "messages.server_tool_use",
        "messages.web_search_tool_result",
    )


def test_images_are_read_in_the_order_of_their_parts() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    chatting = chat(messages=[user(result([url]), IMAGE, text())])
    assert chatting.messages[1]["content"] == [{"type": "image"}, {"type": "image"}, part("a")]
    at = "messages[0].content[{}]{}.source.{}"
    assert chatting.image_sources == [
        ImageSource(url="https://a.example/b.png", param=at.format(0, ".content[0]", "url")),
        ImageSource(file=PNG, param=at.format(1, "", "data")),
    ]
    # As many as Anthropic's clients send.
    assert len(chat(messages=[user(*[IMAGE] * 100)]).image_sources) == 100
    with pytest.raises(BadRequestError, match="have at most 100 images"):
        chat(messages=[user(*[IMAGE] * 101)])


@all_cases(
    ("last", "continues"),
    [
        (assistant(text()), True),
        ({"role": "assistant", "content": "a"}, True),
        ({"role": "assistant", "content": ""}, False),
        (assistant(text(), use()), False),
        (assistant(THOUGHT), False),
        (HELLO, False),
    ],
)
def test_response_continues_the_text_of_an_assistant(last: Any, continues: bool) -> None:
    assert chat(messages=[HELLO, last]).continues_last_message is continues


@all_cases(
    ("parameters", "budget", "arguments", "is_shown"),
    [
        ({}, None, {}, True),
        ({"thinking": {"type": "adaptive"}}, None, {}, True),
        ({"thinking": {"type": "between_tools"}}, None, {}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024, THINKS, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, 2048, THINKS, True),
        ({"thinking": {"type": "disabled"}}, None, dict.fromkeys(THINKS, False), False),
        ({"output_config": {"effort": "xhigh"}}, None, {"reasoning_effort": "xhigh"}, True),
    ],
)
def test_thinking_is_the_reasoning_of_a_chat(
    parameters: dict[str, Any],
    budget: int | None,
    arguments: dict[str, Any],
    is_shown: bool,
) -> None:
    request = read(**parameters)
    assert request.chat is not None
    assert request.sampling.thinking_budget == budget
    assert request.chat.template_arguments == arguments
    assert request.chat.shows_reasoning is is_shown


def test_parameters_have_anthropics_defaults_in_every_dialect() -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [HELLO]}
    request = read_message(body, LLAMACPP, max_prompts=1)
    spec = request.sampling
    assert (spec.temperature, spec.top_p, spec.top_k, spec.chain) == (1.0, 1.0, 0, None)
    assert spec.repetition_penalty == 1.0
    assert request.profile is LLAMACPP
    stops = [str(number) for number in range(9)]
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": stops, "stream": True}
    request = read(service_tier="standard_only", **asked)
    spec = request.sampling
    assert (request.service_tier, read(**asked).service_tier) == ("default", AUTO_TIER)
    assert (spec.temperature, spec.top_p, spec.top_k) == (0.5, 0.9, 5)
    assert (request.stop, request.stream, request.includes_stop) == (stops, True, False)


def test_tools_are_described_and_may_be_enforced() -> None:
    name = "mcp__" + "a" * 123
    own = {"type": "custom", "defer_loading": True, **CACHED}
    request = read(tools=[READ | own, READ | {"name": name, "strict": True}])
    use, described = request.tool_use, request.chat.tools  # type: ignore[union-attr]
    assert use is not None
    assert [(each.name, each.is_strict) for each in use.tools] == [("Read", False), (name, True)]
    assert described[0] == {
        "type": "function",
        "function": {"name": "Read", "description": "Reads a file.", "parameters": SCHEMA},
    }
    assert not request.ignored_parameters


def test_examples_of_a_tools_input_follow_its_description() -> None:
    for described, about in ((READ, ["Reads a file."]), (READ | {"description": None}, [""])):
        [shown] = chat(tools=[described | {"input_examples": [{"path": "/é"}, {}]}]).tools
        expected = [*about, "Examples of the input:", '{"path": "/é"}', "{}"]
        assert shown["function"]["description"] == "\n".join(expected)


@all_cases(
    ("choice", "mode", "is_parallel"),
    [
        (None, ToolMode.AUTO, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolMode.AUTO, False),
        ({"type": "any"}, ToolMode.REQUIRED, True),
        ({"type": "tool", "name": "Read"}, ToolMode.NAMED, True),
        ({"type": "none"}, None, True),
    ],
)
def test_tool_choice_decides_whether_the_model_calls(
    choice: Any,
    mode: ToolMode | None,
    is_parallel: bool,
) -> None:
    use = read(tools=[READ], tool_choice=choice).tool_use
    assert (use and use.mode, use is None or use.is_parallel) == (mode, is_parallel)
    assert chat(tools=[READ], tool_choice=choice).tools


@all_cases(
    "parameters",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_format_of_the_output_is_enforced(parameters: dict[str, Any]) -> None:
    structure = read(**parameters).structure
    assert structure is not None
    assert (structure.kind, structure.source) == (StructureKind.JSON_SCHEMA, SCHEMA)
    (name,) = parameters
    assert structure.place.startswith(structure.param)
    assert structure.param.partition(".")[0] == name
    forced = read(tools=[READ], tool_choice={"type": "any"}, **parameters)
    assert (forced.structure, forced.ignored_parameters) == (None, (structure.param,))


def test_what_has_no_effect_is_named() -> None:
    request = read(
        fallbacks=["m"],
        inference_geo="eu",
        speed="standard",
        anything={"a": 1},
        output_config={"task_budget": {"total": 1}},
        metadata={"user_id": "u", "b": 1},
        thinking={"type": "adaptive", "c": 2},
        messages=[HELLO | CACHED, {"role": "system", "content": "a", "b": 1} | CACHED],
        tools=[READ | {"anything": 1} | CACHED],
        **CACHED,
    )
    assert request.ignored_parameters == (
        "anything",
        "fallbacks",
        "inference_geo",
        "messages[1].b",
        "metadata.b",
        "output_config.task_budget",
        "thinking.c",
        "tools[0].anything",
    )


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
UNREAD = "[A document, which this model cannot read: application/pdf, 5 bytes]"


def test_document_that_is_no_text_is_named_to_the_model() -> None:
    document = {"type": "document", "source": PDF, "title": "Plan"}
    url = {"type": "document", "source": {"type": "url", "url": "https://a.b/c.pdf"}}
    messages = [
        user(document, {"type": "text", "text": "Sum."}),
        user(result([document])),
        user(url),
    ]
    request = read(messages=messages)
    assert request.chat is not None
    asked, shown, linked = request.chat.messages
    assert [part["text"] for part in asked["content"]] == ["Plan", UNREAD, "Sum."]
    assert shown["content"] == f"Plan\n{UNREAD}"
    assert linked["content"] == "[A document, which this model cannot read: https://a.b/c.pdf]"
    assert request.ignored_parameters == ("messages.document",)


def change(kind: str, name: Any, definition: Any = None) -> dict[str, Any]:
    tool = {"type": "tool_reference", "name": name}
    if definition is not None:
        tool = {"type": "tool_definition", "definition": definition}
    return {"type": f"tool_{kind}", "tool": tool}


def names_of(request: GenerationRequest) -> tuple[list[str], list[str], list[str]]:
    """Return the tools that may be called, those that the template describes, and `allowed`."""
    assert request.chat is not None
    use = request.tool_use
    called, allowed = ([], []) if use is None else ([each.name for each in use.tools], use.allowed)
    return called, [each["function"]["name"] for each in request.chat.tools], list(allowed)


def test_messages_change_the_tools() -> None:
    write, more = READ | {"name": "Write"}, READ | {"name": "More"}
    changes = [change("removal", "Read"), change("addition", "More", more)]
    system = {"role": "system", "content": [{"type": "text", "text": "Now."}, *changes]}
    request = read(messages=[HELLO, system, HELLO], tools=[READ, write])
    # The beginning of the prompt stays as it was.
    assert names_of(request) == (["Write", "More"], ["Read", "Write"], ["Write", "More"])
    assert request.ignored_parameters == ()
    assert request.chat is not None
    first, removal, addition = (part["text"] for part in request.chat.messages[1]["content"])
    assert (first, removal) == ("Now.", "These tools are no longer available: Read")
    assert json.loads(addition.splitlines()[1])["function"]["name"] == "More"
    again = {"role": "system", "content": [change("addition", "Read")]}
    request = read(messages=[HELLO, system, HELLO, again], tools=[READ, write])
    assert names_of(request)[0] == ["Write", "More", "Read"]
    # Without tools of the request, the template describes those that are added.
    older = {"type": "tool_addition", "tools": [more]}
    request = read(messages=[HELLO, {"role": "system", "content": [older]}, HELLO])
    assert names_of(request) == (["More"], ["More"], [])
    assert request.chat is not None
    assert [each["role"] for each in request.chat.messages] == ["user"]
    removed = {"role": "system", "content": [change("removal", "Read")]}
    assert read(messages=[HELLO, removed], tools=[READ]).tool_use is None
    for block, place in (
        (change("removal", "None"), "tool.name"),
        (change("addition", "None"), "tool.name"),
        (change("removal", []), "tool.name"),
        (change("removal", "Read", READ), "tool.type"),
        (change("addition", "", {"type": "bash_20250124"}), "tool.definition.type"),
        ({"type": "tool_addition", "tool": {"type": "mcp_tool_reference"}}, "tool.type"),
        ({"type": "tool_addition", "tools": [1]}, "tools[0]"),
    ):
        with pytest.raises(BadRequestError) as caught:
            read(messages=[HELLO, {"role": "system", "content": [block]}], tools=[READ])
        assert caught.value.param == f"messages[1].content[0].{place}"


def test_system_message_of_one_turn_is_left_out_later() -> None:
    texts = [{"type": "text", "text": "Once."}]
    for content in ("Once.", texts):
        once = {"role": "system", "content": content, "clear_at": "next_user_message"}
        now = chat(messages=[HELLO, once]).messages
        assert [each["role"] for each in now] == ["user", "system"]
        later = chat(messages=[HELLO, once, assistant(text("Yes")), HELLO]).messages
        assert [each["role"] for each in later] == ["user", "assistant", "user"]
        kept = chat(messages=[HELLO, once | {"clear_at": "never"}, HELLO]).messages
        assert [each["role"] for each in kept] == ["user", "system", "user"]


def test_results_of_tools_are_cleared_from_a_long_conversation() -> None:
    blocks = [assistant(use(1), use(2)), user(result(number=1), result(number=2))]
    messages = [HELLO, *blocks, assistant(use(3)), user(result("c", number=3)), HELLO]

    def cleared(tokens: int = 0, **edit: Any) -> tuple[int, list[Any], list[Any]]:
        given = {"edits": [{"type": "clear_tool_uses_20250919", **edit}]}
        made = chat(messages=messages, context_management=given)
        assert made.clearing is not None
        edited, number = clear_tool_uses(made, made.clearing, tokens)
        assert (edited is made) is (number == 0)
        contents = [each["content"] for each in edited.messages if each["role"] == "tool"]
        inputs = [
            call["function"]["arguments"]
            for each in edited.messages
            for call in each.get("tool_calls", ())
        ]
        assert len(edited.messages) == len(made.messages)
        return number, contents, inputs

    def at(kind: str, value: int) -> dict[str, Any]:
        return {"type": kind, "value": value}

    given = use()["input"]
    kept, gone = at("tool_uses", 1), CLEARED
    assert cleared(100_001) == (0, ["b", "b", "c"], [given] * 3)
    assert cleared(100_000, keep=kept) == (0, ["b", "b", "c"], [given] * 3)
    assert cleared(100_001, keep=kept) == (2, [gone, gone, "c"], [given] * 3)
    few = at("tool_uses", 2)
    assert cleared(trigger=few, keep=at("tool_uses", 0)) == (3, [gone] * 3, [given] * 3)
    assert cleared(trigger=at("tool_uses", 3), keep=kept)[0] == 0
    assert cleared(trigger=few, keep=kept, clear_tool_inputs=True)[2] == [{}, {}, given]
    name = use()["name"]
    for names, inputs in (([name], [{}, {}, given]), (["Other"], [given] * 3)):
        assert cleared(trigger=few, keep=kept, clear_tool_inputs=names)[2] == inputs
    assert cleared(trigger=few, keep=kept, exclude_tools=[name]) == (
        0,
        ["b", "b", "c"],
        [given] * 3,
    )
    others: list[Any] = [
        {"type": "compact_20260112"},
        {"type": "clear_thinking_20251015", "keep": "all"},
        {},
    ]
    request = read(context_management={"edits": others})
    named = ("context_management", "context_management.compact_20260112")
    assert request.ignored_parameters == named
    for edit, place in (
        ({"trigger": at("turns", 1)}, ".trigger.type"),
        ({"keep": {"type": "tool_uses"}}, ".keep.value"),
        ({"clear_at_least": at("input_tokens", -1)}, ".clear_at_least.value"),
        ({"exclude_tools": [1]}, ".exclude_tools"),
        ({"clear_tool_inputs": 1}, ".clear_tool_inputs"),
    ):
        with pytest.raises(BadRequestError) as caught:
            cleared(**edit)
        assert caught.value.param == f"context_management.edits[0]{place}"
    with pytest.raises(BadRequestError, match="must have one edit of type"):
        read(context_management={"edits": [{"type": "clear_tool_uses_20250919"}] * 2})


@all_cases("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_a"}])
def test_thread_is_refused_so_that_the_sdk_goes_on_without(thread: dict[str, str]) -> None:
    with pytest.raises(BadRequestError) as caught:
        read(thread=thread)
    body = caught.value.body(ErrorStyle.ANTHROPIC)["error"]
    assert (body["type"], body["message"]) == ("invalid_request_error", caught.value.message)
    unsupported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert body["details"] == unsupported
    assert caught.value.param == "thread"
    assert "details" not in caught.value.body()["error"]


def test_fast_messages_have_priority() -> None:
    assert read(speed="fast").service_tier == "priority"
    assert read(speed="fast", service_tier="flex").service_tier == "flex"
    assert read(speed="standard").service_tier == read().service_tier == AUTO_TIER


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"model": None}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"messages": [HELLO] * 100_001}, "messages"),
    ({"messages": ["a"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [user("a")]}, "messages[0].content[0]"),
    ({"messages": [user({})]}, "messages[0].content[0].type"),
    ({"messages": [user(use())]}, "messages[0].content[0].type"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [assistant(IMAGE)]}, "messages[0].content[0].type"),
    ({"messages": [assistant(use() | {"id": ""})]}, "messages[0].content[0].id"),
    ({"messages": [assistant(use() | {"name": None})]}, "messages[0].content[0].name"),
    ({"messages": [assistant(use() | {"input": "a"})]}, "messages[0].content[0].input"),
    ({"messages": [assistant(use() | {"input": None})]}, "messages[0].content[0].input"),
    (
        {"messages": [assistant({"type": "thinking", "signature": "a"})]},
        "messages[0].content[0].thinking",
    ),
    ({"messages": [assistant({"type": "redacted_thinking"})]}, "messages[0].content[0].data"),
    ({"messages": [user(result() | {"tool_use_id": None})]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [user(result(is_error="a"))]}, "messages[0].content[0].is_error"),
    ({"messages": [user(result([use()]))]}, "messages[0].content[0].content[0].type"),
    ({"messages": [user({"type": "image"})]}, "messages[0].content[0].source"),
    (
        {"messages": [user({"type": "image", "source": PNG_SOURCE | {"media_type": "a/b"}})]},
        "messages[0].content[0].source.media_type",
    ),
    (
        {"messages": [user({"type": "image", "source": PNG_SOURCE | {"data": "!"}})]},
        "messages[0].content[0].source.data",
    ),
    (
        {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
        "messages[0].content[0].source.type",
    ),
    (
        {"messages": [user({"type": "document", "source": {"type": "file", "file_id": "f"}})]},
        "messages[0].content[0].source.type",
    ),
    ({"container": "container_1"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"speed": "slow"}, "speed"),
    ({"messages": [HELLO | {"output_config": {"effort": "low"}}]}, "messages[0].output_config"),
    ({"messages": [{"role": "system", "content": "a", "clear_at": 5}]}, "messages[0].clear_at"),
    ({"system": 1}, "system"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"thinking": 1}, "thinking"),
    ({"thinking": {"type": "a"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "a"}}, "thinking.display"),
    ({"output_config": {"effort": "a"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "a"}}}, "output_config.format"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"service_tier": "batch"}, "service_tier"),
    ({"tools": [READ, READ]}, "tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [READ | {"name": "a" * 129}]}, "tools[0].name"),
    ({"tools": [READ | {"input_schema": None}]}, "tools[0].input_schema"),
    ({"tools": [READ], "tool_choice": {"type": "a"}}, "tool_choice.type"),
    ({"tools": [READ], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [READ], "tool_choice": {"type": "tool", "name": "a"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
]


@all_cases(("parameters", "param"), REFUSED)
def test_errors_name_the_place(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read(**parameters)
    assert caught.value.param == param
    assert param in caught.value.message


def test_counting_needs_no_max_tokens() -> None:
    thinking = {"type": "enabled", "budget_tokens": 9000}
    for max_tokens in (None, 1):
        body = {"model": "m", "messages": [HELLO], "thinking": thinking, "max_tokens": max_tokens}
        request = read_counted_message(body, OPENAI, max_prompts=1)
        assert request.chat is not None
        assert request.chat.messages == [HELLO]


KINDS = [text(), IMAGE, use(), result(), THOUGHT, HIDDEN, {"type": "search_result"}]
BLOCKS = st.sampled_from(KINDS) | st.builds(
    lambda block, name, value: block | {name: value},
    st.sampled_from(KINDS),
    st.sampled_from(["content", "data", "id", "input", "source", "text", "thinking", "title"]),
    VALUES,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES), "content": st.lists(BLOCKS, max_size=3) | VALUES}
)


def read_any(body: dict[str, Any]) -> GenerationRequest | BadRequestError:
    try:
        return check_supported(
            read_message(body, OPENAI, max_prompts=1), [Feature.CHAT, Feature.TOOLS]
        )
    except BadRequestError as error:
        return error


@given(
    st.dictionaries(st.sampled_from(sorted(MessageRequest.model_fields)), VALUES, max_size=3),
    st.lists(MESSAGES, min_size=1, max_size=3),
)
@examples(default=200, long=3000)
def test_any_body_is_read_or_refused(body: dict[str, Any], messages: list[Any]) -> None:
    check(read_any({"model": "m", "max_tokens": 9, "messages": messages} | body))


HUGE: dict[str, Callable[[], dict[str, Any]]] = {
    "blocks": lambda: {"messages": [user(*[text()] * 100_000)]},
    "calls": lambda: {"messages": [assistant(*[use()] * 1000)]},
    "tools": lambda: {"tools": [READ] * 100_000},
}


@all_cases("name", HUGE)
def test_huge_value_is_refused_at_once(name: str) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO]} | HUGE[name]()
    error = at_once(lambda: read_any(body), seconds=0.075)
    assert isinstance(error, BadRequestError)


def test_images_of_tools_are_texts_for_models_without_vision() -> None:
    features = [feature for feature in Feature if feature is not Feature.IMAGES]
    request = check_supported(read(messages=[HELLO, user(result([IMAGE, text()]))]), features)
    assert request.chat is not None
    assert request.chat.messages[-1]["content"] == [part(UNSEEN_IMAGE)]
    assert (request.chat.image_sources, request.ignored_parameters) == ([], ("messages.image",))
    # An image of the user needs a model that sees it.
    with pytest.raises(BadRequestError, match="requires a model with image input"):
        check_supported(read(messages=[user(result([IMAGE]), IMAGE)]), features)
