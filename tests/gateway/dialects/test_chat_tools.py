"""Tools of a chat, in OpenAI's newer and older form."""

from typing import Any

from gateway.dialects.profile import Profile
from gateway.dialects.request import StructureKind, Tool, ToolMode, ToolUse
from tests.gateway.dialects.chat_reading import chat, chat_refusal, read_chat
from tests.gateway.dialects.reading import EVERY_PROFILE, VLLM, read, refusal
from tests.support.cases import all_cases

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
TIME = {"name": "time"}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]

READ_WEATHER = Tool("weather", SCHEMA, is_strict=False)
READ_TIME = Tool("time", {"type": "object", "properties": {}}, is_strict=False)
READ = [READ_WEATHER, READ_TIME]

NAMED = {"type": "function", "function": {"name": "time"}}


LARK = {"syntax": "lark", "definition": "start: /[0-9]+/"}
QUERY = {"name": "query", "description": "Asks.", "format": {"type": "grammar", "grammar": LARK}}
TEXT = {"type": "custom", "custom": QUERY}


def allowed(*names: str, mode: Any = "auto") -> dict[str, Any]:
    """Return a choice among some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@all_cases("profile", EVERY_PROFILE)
def test_empty_values_are_refused_in_dialect_vllm_only(profile: Profile) -> None:
    if profile is VLLM:
        refused = chat_refusal(VLLM, tools=[])
        assert refused.message == "'tools' must have at least one tool in this dialect. Given: []."
        for error in (chat_refusal(VLLM, cache_salt=""), refusal(VLLM, cache_salt="")):
            assert error.message == "'cache_salt' must not be empty in this dialect. Given: \"\"."
    else:
        assert read_chat(profile, tools=[], cache_salt="").tool_use is None
        assert read(profile, cache_salt="").cache_isolation_key == ""
    # vLLM's completions have no tools.
    assert read(profile, tools=[]).tool_use is None


@all_cases(
    ("choice", "use"),
    [
        (None, ToolUse(READ, ToolMode.AUTO)),
        ("auto", ToolUse(READ, ToolMode.AUTO)),
        ("required", ToolUse(READ, ToolMode.REQUIRED)),
        (NAMED, ToolUse(READ, ToolMode.NAMED, "time")),
        ("none", None),
    ],
)
def test_template_gets_the_tools_whatever_the_choice(choice: Any, use: ToolUse | None) -> None:
    request = read_chat(tools=TOOLS, tool_choice=choice)
    assert request.tool_use == use
    assert request.chat
    assert request.chat.tools == TOOLS
    assert not request.chat.uses_legacy_functions


@all_cases(("mode", "read"), [("auto", ToolMode.AUTO), ("required", ToolMode.REQUIRED)])
def test_tools_that_are_not_allowed_are_described_only(mode: str, read: ToolMode) -> None:
    request = read_chat(tools=TOOLS, tool_choice=allowed("time", mode=mode))
    assert request.tool_use == ToolUse([READ_TIME], read, allowed=("time",))
    assert request.tool_use.is_constraint
    assert request.chat
    assert request.chat.tools == TOOLS
    # The form of mistral.rs.
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "time"}]}
    assert read_chat(tools=TOOLS, tool_choice=flat).tool_use == request.tool_use
    # Nothing is restricted if all are allowed.
    everything = read_chat(tools=TOOLS, tool_choice=allowed("time", "weather", mode=mode))
    assert everything.tool_use == ToolUse(READ, read)


def test_one_call_at_most_constrains_the_response() -> None:
    use = read_chat(tools=TOOLS, parallel_tool_calls=False).tool_use
    assert use == ToolUse(READ, ToolMode.AUTO, is_parallel=False)
    assert use.is_constraint


@all_cases(
    ("choice", "mode", "name"),
    [
        (None, ToolMode.AUTO, None),
        ("auto", ToolMode.AUTO, None),
        ({"name": "time"}, ToolMode.NAMED, "time"),
    ],
)
def test_functions_are_tools_of_which_one_is_called(
    choice: Any, mode: ToolMode, name: str | None
) -> None:
    request = read_chat(functions=[WEATHER, TIME], function_call=choice)
    assert request.tool_use == ToolUse(READ, mode, name, is_parallel=False)
    assert request.chat
    assert request.chat.tools == TOOLS
    assert request.chat.uses_legacy_functions


def test_functions_may_be_described_and_not_called() -> None:
    request = read_chat(functions=[TIME], function_call="none")
    assert request.tool_use is None
    assert chat(functions=[TIME], function_call="none").tools == TOOLS[1:]


@all_cases(
    "nothing",
    [
        {},
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"functions": []},
        {"function_call": "none"},
        {"functions": [], "function_call": "auto"},
    ],
)
def test_tool_choice_without_tools_calls_nothing(nothing: dict[str, Any]) -> None:
    request = read_chat(**nothing)
    assert request.tool_use is None
    assert request.chat
    assert (request.chat.tools, request.chat.uses_legacy_functions) == ([], False)


@all_cases(
    ("given", "param", "message"),
    [
        ({"tools": TOOLS * 65}, "tools", "'tools' must have at most 128 entries. Given: 130."),
        ({"tools": TOOLS + TOOLS}, "tools", "'tools' must have functions with different names."),
        (
            {"tools": [{"type": "other"}]},
            "tools",
            "'tools[0]' must be an object of type function.",
        ),
        ({"tool_choice": "required"}, "tool_choice", "'tool_choice' requires 'tools'."),
        (
            {"tools": TOOLS, "tool_choice": "tool"},
            "tool_choice",
            "'tool_choice' must be none, auto,",
        ),
        (
            {"tools": TOOLS[:1], "tool_choice": NAMED},
            "tool_choice",
            "'tool_choice' must name one of the tools. Given: \"time\".",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("clock")},
            "tool_choice.allowed_tools.tools[0]",
            (
                "'tool_choice.allowed_tools.tools[0]' must be an object of type function or custom "
                "that names one"
            ),
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed()},
            "tool_choice.allowed_tools.tools",
            "'tool_choice.allowed_tools.tools' must have at least one tool. Given: [].",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("time", mode="none")},
            "tool_choice.allowed_tools.mode",
            "'tool_choice.allowed_tools.mode' must be auto or required. Given: \"none\".",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": 5}},
            "tool_choice.allowed_tools",
            "'tool_choice.allowed_tools' must be an object. Given: 5.",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "tool_choice.tools",
            "'tool_choice.tools' must have at least one tool. Given: null.",
        ),
        ({"functions": 5}, "functions", "'functions' must be an array. Given: 5."),
        ({"functions": [5]}, "functions", "'functions[0]' must be an object. Given: 5."),
        (
            {"functions": [{"name": "a b"}]},
            "functions",
            "'functions[0].name' must have 1 to 64 letters",
        ),
        (
            {"functions": [TIME, TIME]},
            "functions",
            "'functions' must have functions with different",
        ),
        (
            {"function_call": {"name": "time"}},
            "function_call",
            "'function_call' requires 'functions'. Given: ",
        ),
        (
            {"functions": [TIME], "function_call": {"name": "clock"}},
            "function_call",
            "'function_call' must name one of the functions. Given: \"clock\".",
        ),
        (
            {"functions": [TIME], "function_call": "required"},
            "function_call",
            "'function_call' must be none, auto, or an object with the name of a function. Given: ",
        ),
        (
            {"functions": [TIME], "tools": TOOLS},
            "functions",
            "'functions' cannot be combined with 'tools'.",
        ),
        (
            {"functions": [TIME], "tool_choice": "auto"},
            "functions",
            "'functions' cannot be combined with 'tool_choice'.",
        ),
        (
            {"function_call": "auto", "tools": TOOLS},
            "function_call",
            "'function_call' cannot be combined with 'tools'.",
        ),
    ],
)
def test_invalid_tools_are_refused(given: dict[str, Any], param: str, message: str) -> None:
    error = chat_refusal(**given)
    assert error.message.startswith(message)
    assert error.param == param


@all_cases(
    "forced",
    [
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": NAMED},
        {"tools": TOOLS, "tool_choice": allowed("time", mode="required")},
        {"functions": [TIME], "function_call": {"name": "time"}},
    ],
)
def test_forced_call_wins_over_a_structure_of_the_text(forced: dict[str, Any]) -> None:
    for name, value in {
        "response_format": {"type": "json_object"},
        "grammar": 'root ::= "a"',
    }.items():
        request = read_chat(**forced, **{name: value})
        assert request.structure is None
        assert request.tool_use
        assert request.ignored_parameters == (name,)


@all_cases("strict", [True, False])
def test_response_may_be_a_call_or_match_a_structure(*, strict: bool) -> None:
    tools = [{"type": "function", "function": TIME | {"strict": strict}}]
    request = read_chat(tools=tools, response_format={"type": "json_object"})
    assert request.structure
    assert request.tool_use


@all_cases("name", ["ignore_eos", "min_tokens", "allowed_token_ids"])
@all_cases(
    ("given", "constraint"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "tools"),
        ({"functions": [TIME]}, "functions"),
        ({"json_schema": {}}, "json_schema"),
    ],
)
def test_constrained_response_ends_where_its_structure_does(
    name: str, given: dict[str, Any], constraint: str
) -> None:
    value = {"ignore_eos": True, "min_tokens": 3, "allowed_token_ids": [1]}[name]
    error = chat_refusal(**given | {name: value})
    assert error.message.startswith(f"'{name}' cannot be combined with '{constraint}': ")


def test_custom_tools_get_texts() -> None:
    to_query = {"type": "custom", "custom": {"name": "query"}}
    for choice, mode, names in (
        (None, ToolMode.AUTO, ["weather", "time", "query"]),
        (to_query, ToolMode.NAMED, ["query"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [to_query, NAMED]},
            },
            ToolMode.REQUIRED,
            ["time", "query"],
        ),
    ):
        request = read_chat(tools=[*TOOLS, TEXT], tool_choice=choice)
        use = request.tool_use
        assert use is not None
        assert (use.mode, use.texts, request.ignored_parameters) == (mode, ("query",), ())
        assert [tool.name for tool in use.callable_tools] == names
        grammar = use.tools[-1].grammar
        assert grammar is not None
        assert (grammar.kind, grammar.source) == (StructureKind.LARK, LARK["definition"])
        assert grammar.place == "tools[2].custom.format.grammar.definition"
        assert request.chat
        function = request.chat.tools[2]["function"]
        assert function["parameters"]["required"] == ["input"]
        assert function["description"].startswith("Asks.\n'input' is a free text.")
    call = {"id": "c", "type": "custom", "custom": {"name": "query", "input": "5"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    request = read_chat(messages=messages, tools=[TEXT])
    assert request.chat
    [read_call] = request.chat.messages[1]["tool_calls"]
    assert read_call["function"] == {"arguments": {"input": "5"}, "name": "query"}
    for tools, param in (
        ([{"type": "custom"}], "tools[0].custom"),
        ([{"type": "custom", "custom": {"name": "a b"}}], "tools[0].custom.name"),
        ([TEXT, TEXT], "tools"),
        (
            [{"type": "custom", "custom": QUERY | {"format": {"type": "x"}}}],
            "tools[0].custom.format.type",
        ),
    ):
        assert chat_refusal(tools=tools).param == param
    # Completions have no prompt that describes the text.
    assert refusal(tools=[TEXT]).param == "tools"
