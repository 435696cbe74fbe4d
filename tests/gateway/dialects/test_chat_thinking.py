"""Reasoning, and other arguments of the chat template."""

from typing import Any

from gateway.dialects.chat.template_arguments import RESERVED, unread_parameters
from gateway.dialects.request import ChatRequest
from tests.gateway.dialects.chat_reading import chat, chat_refusal, read_chat
from tests.gateway.dialects.reading import FIREWORKS
from tests.support.cases import all_cases

BUDGETS: dict[str, Any] = {
    "thinking_budget": {"thinking_budget": 100},
    "thinking_token_budget": {"thinking_token_budget": 100},
    "reasoning_budget_tokens": {"reasoning_budget_tokens": 100},
    "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": 100}},
    "reasoning_effort": {"reasoning_effort": 100},
    "reasoning.max_tokens": {"reasoning": {"max_tokens": 100, "effort": None}},
}


@all_cases("param", BUDGETS)
def test_budget_is_read_by_each_of_its_names(param: str) -> None:
    request = read_chat(**BUDGETS[param])
    assert request.sampling.thinking_budget == 100
    assert request.chat
    assert request.chat.thinking_budget_param == param


def test_budget_may_be_given_by_several_names_that_agree() -> None:
    both = BUDGETS["thinking_budget"] | BUDGETS["thinking.budget_tokens"]
    assert read_chat(**both).sampling.thinking_budget == 100
    error = chat_refusal(thinking_budget=5, reasoning_effort=6)
    assert error.message == (
        "'thinking_budget' and 'reasoning_effort' are the same parameter and must be equal. "
        "Given: 5 and 6."
    )


@all_cases("budget", [None, -1, -1.0])
def test_budget_may_be_unlimited(budget: Any) -> None:
    request = read_chat(thinking_budget=budget)
    assert request.sampling.thinking_budget is None
    assert request.chat
    assert request.chat.thinking_budget_param == ""


def test_zero_budget_ends_reasoning_at_once() -> None:
    request = read_chat(thinking_budget=0)
    assert request.sampling.thinking_budget == 0
    assert request.chat
    assert request.chat.thinking_budget_param == "thinking_budget"


@all_cases(
    ("given", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "max"}, {"reasoning_effort": "max", "enable_thinking": True}),
        ({"reasoning_effort": False}, {"enable_thinking": False}),
        ({"reasoning_effort": True}, {"enable_thinking": True}),
        ({"reasoning_effort": 100}, {}),
        ({"reasoning_effort": "default"}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning": {}}, {}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"max_tokens": 5, "effort": "default", "exclude": True}}, {}),
        (
            {"reasoning": {"effort": "low"}, "reasoning_effort": "low"},
            {"reasoning_effort": "low", "enable_thinking": True},
        ),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"budget_tokens": 5}}, {}),
        (
            {"thinking": {"type": "enabled"}, "reasoning_effort": "low"},
            {"reasoning_effort": "low", "enable_thinking": True},
        ),
        (
            {"chat_template_kwargs": {"a": "b", "c": 1.5, "d": True, "e": None}},
            {"a": "b", "c": 1.5, "d": True},
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "high", "enable_thinking": False},
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high", "enable_thinking": True},
        ),
    ],
)
def test_reasoning_parameters_reach_the_template(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    # Templates of some models call the switch `thinking`.
    arguments = chat(**given).template_arguments
    switch = arguments.pop("thinking", expected.get("enable_thinking"))
    assert arguments == expected
    assert switch is expected.get("enable_thinking") or "chat_template_kwargs" in given


@all_cases(("given", "shows"), [(None, True), (True, True), (False, False)])
def test_reasoning_may_be_hidden(given: Any, *, shows: bool) -> None:
    assert chat(include_reasoning=given).shows_reasoning is shows
    excluded = None if given is None else not given
    assert chat(reasoning={"exclude": excluded}).shows_reasoning is shows


def test_fireworks_takes_one_way_to_control_reasoning() -> None:
    both = {"thinking": {"type": "enabled"}, "reasoning_effort": "low"}
    assert chat(**both).template_arguments["enable_thinking"] is True
    error = chat_refusal(FIREWORKS, **both)
    assert (error.code, error.param) == ("invalid_value", "thinking")


@all_cases(
    ("given", "param", "message"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort", "must be one of none, minimal, low, "),
        ({"reasoning_effort": []}, "reasoning_effort", "must be one of none, minimal, low, "),
        ({"reasoning_effort": -2}, "reasoning_effort", "must be at least -1. Given: -2."),
        ({"reasoning_effort": 1.5}, "reasoning_effort", "must be an integer. Given: 1.5."),
        ({"thinking_budget": -2}, "thinking_budget", "must be at least -1. Given: -2."),
        ({"thinking_budget": "5"}, "thinking_budget", 'must be an integer. Given: "5".'),
        ({"thinking_budget": 2**31}, "thinking_budget", "must be at most 2147483647. Given: "),
        ({"thinking": 5}, "thinking", "must be an object. Given: 5."),
        (
            {"thinking": {"type": "on"}},
            "thinking.type",
            'must be one of enabled, disabled, adaptive. Given: "on"',
        ),
        (
            {"thinking": {"type": []}},
            "thinking.type",
            "must be one of enabled, disabled, adaptive. Given: [].",
        ),
        ({"thinking": {"budget_tokens": "5"}}, "thinking.budget_tokens", "must be an integer."),
        ({"thinking": {"budget_tokens": True}}, "thinking.budget_tokens", "must be an integer."),
        (
            {"thinking": {"budget_tokens": 2**31}},
            "thinking.budget_tokens",
            "must be at most 2147483647. Given: 2147483648.",
        ),
        (
            {"thinking": {"type": "disabled", "budget_tokens": 5}},
            "thinking.budget_tokens",
            "requires 'thinking.type' enabled. Given: 5.",
        ),
        (
            {"thinking": {"type": "disabled"}, "reasoning_effort": "low"},
            "thinking.type",
            "disables reasoning, but 'reasoning_effort' enables it.",
        ),
        (
            {"reasoning": {"enabled": False}, "reasoning_effort": "low"},
            "reasoning.enabled",
            "disables reasoning, but 'reasoning_effort' enables it.",
        ),
        (
            {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
            "reasoning.effort",
            "",
        ),
        ({"reasoning": "low"}, "reasoning", 'must be an object. Given: "low".'),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of none, minimal, "),
        ({"reasoning": {"exclude": 1}}, "reasoning.exclude", "must be a boolean. Given: 1."),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens", "must be at least -1."),
        (
            {"reasoning": {"exclude": True}, "include_reasoning": True},
            "reasoning.exclude",
            "must not be true if 'include_reasoning' is true.",
        ),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "is not supported. Reasoning "),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object. Given: []."),
        (
            {"chat_template_kwargs": {f"a{number}": 1 for number in range(33)}},
            "chat_template_kwargs",
            "must have at most 32 entries. Given: 33.",
        ),
        (
            {"chat_template_kwargs": {"a b": 1}},
            "chat_template_kwargs",
            "must have names of 1 to 64 letters, digits or '_', no digit first. Given: \"a b\".",
        ),
        (
            {"chat_template_kwargs": {"a": {}}},
            "chat_template_kwargs.a",
            "must be a string, a number or a boolean. Given: {}.",
        ),
        (
            {"chat_template_kwargs": {"a": "b" * 1025}},
            "chat_template_kwargs.a",
            "must have at most 1024 characters. Given: 1025 characters.",
        ),
        (
            {"chat_template_kwargs": {"a": 10**30}},
            "chat_template_kwargs.a",
            "must be a number from -2^63 to 2^63. Given: 1",
        ),
        (
            {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
            "chat_template_kwargs.reasoning_effort",
            'and \'reasoning_effort\' must be equal. Given: "low" and "high".',
        ),
        (
            {"chat_template_kwargs": {"verbosity": "low"}, "verbosity": "high"},
            "chat_template_kwargs.verbosity",
            'and \'verbosity\' must be equal. Given: "low" and "high".',
        ),
        ({"verbosity": "long"}, "verbosity", "must be one of 'low', 'medium' or 'high'. Given: "),
        ({"include_reasoning": "yes"}, "include_reasoning", 'must be a boolean. Given: "yes".'),
    ],
)
def test_unknown_reasoning_effort_is_refused(
    given: dict[str, Any], param: str, message: str
) -> None:
    error = chat_refusal(**given)
    assert error.param == param
    assert error.message.startswith(f"'{param}' {message}") or not message


@all_cases("name", sorted(RESERVED))
def test_client_cannot_set_template_variables_of_the_gateway(name: str) -> None:
    error = chat_refusal(chat_template_kwargs={name: 1})
    assert error.message == (
        f"'chat_template_kwargs.{name}' cannot be set. The request or the model determines it."
    )
    assert error.code == "unsupported_parameter"


@all_cases(
    ("variables", "unread"),
    [
        ({"enable_thinking", "reasoning_effort", "x"}, []),
        ({"enable_thinking"}, ["chat_template_kwargs.x"]),
        ({"reasoning_effort", "x"}, []),
        ({"x"}, ["reasoning_effort"]),
        (set(), ["chat_template_kwargs.x", "reasoning_effort"]),
    ],
)
def test_parameters_that_no_template_reads_are_named(
    variables: set[str], unread: list[str]
) -> None:
    request = chat(reasoning_effort="low", chat_template_kwargs={"x": 1})
    assert unread_parameters(request, variables) == unread
    assert unread_parameters(ChatRequest(messages=[]), variables) == []


@all_cases(
    ("verbosity", "unread"), [("low", ["verbosity"]), ("medium", []), ("high", ["verbosity"])]
)
def test_verbosity_reaches_the_template(verbosity: str, unread: list[str]) -> None:
    request = chat(verbosity=verbosity)
    assert request.template_arguments == {"verbosity": verbosity}
    assert unread_parameters(request, {"verbosity"}) == []
    # Medium is OpenAI's default, which some clients always send.
    assert unread_parameters(request, set()) == unread


def test_options_of_thinking_without_effect_are_named() -> None:
    request = read_chat(thinking={"type": "enabled", "pace": "short", "other": None})
    assert request.ignored_parameters == ("thinking.pace",)
