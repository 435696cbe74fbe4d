"""Tools, and whether the model must call one."""

from typing import Any

from gateway.dialects.request import Tool, ToolMode, ToolUse
from tests.gateway.dialects.reading import MISTRALRS, read, refusal
from tests.support.cases import all_cases

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    """Return the definition of a tool."""
    return {"type": "function", "function": {"name": name, **function}}


WEATHER = Tool("weather", SCHEMA, is_strict=False)


def test_tools_are_read() -> None:
    given = [
        tool(parameters=SCHEMA, description="Tells the weather.", strict=True),
        tool("time"),
        tool("other.tool-1", parameters=None, strict=None),
    ]
    assert read(MISTRALRS, tools=given).tool_use == ToolUse(
        [
            Tool("weather", SCHEMA, is_strict=True),
            Tool("time", NO_ARGUMENTS, is_strict=False),
            Tool("other.tool-1", NO_ARGUMENTS, is_strict=False),
        ],
        ToolMode.AUTO,
    )


@all_cases(
    ("choice", "expected"),
    [
        (None, ToolUse([WEATHER], ToolMode.AUTO)),
        ("auto", ToolUse([WEATHER], ToolMode.AUTO)),
        ("none", None),
        ("required", ToolUse([WEATHER], ToolMode.REQUIRED)),
        ("any", ToolUse([WEATHER], ToolMode.REQUIRED)),
        (
            {"type": "function", "function": {"name": "weather"}},
            ToolUse([WEATHER], ToolMode.NAMED, "weather"),
        ),
        (
            {"type": "function", "name": "weather"},
            ToolUse([WEATHER], ToolMode.NAMED, "weather"),
        ),
    ],
)
def test_tool_choice_is_read(choice: Any, expected: ToolUse | None) -> None:
    assert read(tools=[tool(parameters=SCHEMA)], tool_choice=choice).tool_use == expected


@all_cases("choice", [None, "auto", "none"])
@all_cases("tools", [None, []])
def test_tool_choice_without_tools_uses_nothing(tools: Any, choice: Any) -> None:
    assert read(tools=tools, tool_choice=choice).tool_use is None


@all_cases("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_call_without_tools_is_refused(choice: Any) -> None:
    error = refusal(tool_choice=choice)
    assert error.message.startswith("'tool_choice' requires 'tools'. Given: ")
    assert error.param == "tool_choice"


@all_cases(
    ("tools", "message"),
    [
        ([5], "'tools[0]' must be an object of type function. Given: 5."),
        ([tool(), {}], "'tools[1]' must be an object of type function. Given: {}."),
        ([{"type": "function"}], "'tools[0].function' must be an object. Given: null."),
        ([{"type": "function", "function": []}], "'tools[0].function' must be an object."),
        (
            [tool("")],
            "'tools[0].function.name' must have 1 to 64 letters, digits, '_', '-' or '.'.",
        ),
        ([tool("a b")], "'tools[0].function.name' must have 1 to 64 letters"),
        ([tool("a" * 65)], "'tools[0].function.name' must have 1 to 64 letters"),
        ([tool(5)], "'tools[0].function.name' must have 1 to 64 letters"),  # type: ignore[arg-type]
        (
            [tool(description=["a"])],
            "'tools[0].function.description' must be a string. Given: [\"a\"].",
        ),
        ([tool(strict=1)], "'tools[0].function.strict' must be a boolean. Given: 1."),
        ([tool(), tool()], "'tools' must have functions with different names."),
        ([tool(str(i)) for i in range(129)], "'tools' must have at most 128 entries. Given: 129."),
    ],
)
def test_invalid_tools_are_refused(tools: Any, message: str) -> None:
    error = refusal(tools=tools)
    assert error.message.startswith(message)
    assert error.param == "tools"


def test_parameters_of_a_tool_are_a_schema() -> None:
    error = refusal(tools=[tool(parameters=5)])
    assert error.message == (
        "'tools[0].function.parameters' must be a JSON schema: an object or a boolean. Given: 5."
    )


@all_cases(
    "choice",
    [
        "tool",
        5,
        True,
        [],
        {},
        {"type": "function"},
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": 5}},
        {"type": "tool", "function": {"name": "weather"}},
    ],
)
def test_tool_choice_of_a_wrong_type_is_refused(choice: Any) -> None:
    error = refusal(tools=[tool()], tool_choice=choice)
    assert error.message.startswith(
        "'tool_choice' must be none, auto, required, any, or an object of "
    )
    assert error.param == "tool_choice"


def test_choice_of_an_unknown_tool_is_refused() -> None:
    error = refusal(tools=[tool()], tool_choice={"type": "function", "function": {"name": "time"}})
    assert error.message == "'tool_choice' must name one of the tools. Given: \"time\"."


def test_one_call_at_most_constrains_the_text() -> None:
    free = read(tools=[tool()], parallel_tool_calls=True).tool_use
    single = read(tools=[tool()], parallel_tool_calls=False).tool_use
    assert free is not None
    assert single is not None
    assert (free.is_parallel, free.is_constraint) == (True, False)
    assert (single.is_parallel, single.is_constraint) == (False, True)
    assert read(parallel_tool_calls=False).tool_use is None


def test_structure_is_combined_only_with_tools_that_leave_it_a_text() -> None:
    error = refusal(json_schema={}, tools=[tool(strict=True)])
    assert error.message == "'json_schema' cannot be combined with tools that constrain the text."
    assert read(json_schema={}, tools=[tool()]).structure
    forced = read(json_schema={}, tools=[tool()], tool_choice="required")
    assert (forced.structure, forced.ignored_parameters) == (None, ("json_schema",))
