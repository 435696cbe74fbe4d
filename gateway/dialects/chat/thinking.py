"""Reasoning parameters: budget, effort, and whether the response includes the reasoning."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field

from contract.sampling import Range
from gateway.dialects.fields import Parameters, agreed, bounded, integer
from gateway.dialects.wire import INTEGRAL
from gateway.errors import InvalidParameterError, shown

THINKING_BUDGET = Range(-1, 2**31 - 1)
UNLIMITED: Final = -1

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_EFFORT: Final = "none"

_SWITCHES: Final = {"enabled": True, "disabled": False}

EFFORT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": list(EFFORTS)},
        {"type": "boolean"},
        {
            "type": "integer",
            "minimum": THINKING_BUDGET.minimum,
            "maximum": THINKING_BUDGET.maximum,
        },
        {"type": "null"},
    ]
}

THINKING_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": [*_SWITCHES, None]},
                "budget_tokens": {
                    "type": ["integer", "null"],
                    "minimum": THINKING_BUDGET.minimum,
                    "maximum": THINKING_BUDGET.maximum,
                },
            },
        },
        {"type": "null"},
    ]
}


class ThinkingParameters(Parameters):
    """Parameters of reasoning models."""

    reasoning_effort: Any = Field(
        default=None,
        description=f"Amount of reasoning: {', '.join(EFFORTS)}. Sets the variables "
        "`reasoning_effort` and `enable_thinking` of the chat template, if it reads them. true and "
        "false only turn reasoning on and off; a number is the same as `thinking_budget`.",
        json_schema_extra=EFFORT_SCHEMA,
    )
    thinking_budget: Annotated[int, bounded(THINKING_BUDGET), INTEGRAL] | None = Field(
        default=None,
        description="Maximum tokens of reasoning, after which its end is forced; 0: at once, -1: "
        "no limit. No effect if the model or its engine does not support it. Default: -1.",
    )
    thinking_token_budget: Annotated[int, bounded(THINKING_BUDGET), INTEGRAL] | None = Field(
        default=None, description="Another name of `thinking_budget`."
    )
    reasoning_budget_tokens: Annotated[int, bounded(THINKING_BUDGET), INTEGRAL] | None = Field(
        default=None, description="Another name of `thinking_budget`."
    )
    thinking: Any = Field(
        default=None,
        description="`{type, budget_tokens}`: `type` enabled or disabled sets the template's "
        "variable `enable_thinking`; `budget_tokens` is another name of `thinking_budget`.",
        json_schema_extra=THINKING_SCHEMA,
    )
    include_reasoning: bool | None = Field(
        default=None,
        description="Whether the response includes the reasoning, which is always billed. Default: "
        "true.",
    )


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning settings of a request."""

    budget: int | None
    """Maximum reasoning tokens; None means no limit."""
    budget_param: str
    """The parameter that gave the budget; empty without one."""
    effort: str | None
    is_enabled: bool | None
    """Whether the model should reason; None leaves the decision to its template."""
    switch_param: str
    """The parameter that gave `is_enabled`; empty if none did."""


def read_thinking(body: ThinkingParameters) -> Thinking:
    """Return the reasoning settings of a request. Raises InvalidParameterError."""
    effort, effort_budget, is_effort = _effort(body.reasoning_effort)
    switch, switch_budget = _thinking(body.thinking)
    if None not in (switch, is_effort) and switch is not is_effort:
        raise InvalidParameterError(
            "'thinking.type' and 'reasoning_effort' must both enable or both disable reasoning. "
            f"Given: {shown(body.thinking['type'])} and {shown(body.reasoning_effort)}.",
            param="thinking.type",
        )
    budgets = {
        "thinking_budget": body.thinking_budget,
        "thinking_token_budget": body.thinking_token_budget,
        "reasoning_budget_tokens": body.reasoning_budget_tokens,
        "thinking.budget_tokens": switch_budget,
        "reasoning_effort": effort_budget,
    }
    budget = agreed(**budgets)
    switches = {"reasoning_effort": is_effort, "thinking.type": switch}
    is_limited = budget is not None and budget != UNLIMITED
    return Thinking(
        budget=budget if is_limited else None,
        budget_param=next(name for name in budgets if budgets[name] == budget)
        if is_limited
        else "",
        effort=effort,
        is_enabled=switch if is_effort is None else is_effort,
        switch_param=next((name for name, is_on in switches.items() if is_on is not None), ""),
    )


def _effort(value: object) -> tuple[str | None, int | None, bool | None]:
    """Return the effort, the budget, and whether to reason, each None if unspecified."""
    if value is None:
        return None, None, None
    if isinstance(value, bool):
        return None, None, value
    if isinstance(value, str) and value in EFFORTS:
        return value, None, value != NO_EFFORT
    if isinstance(value, int | float):
        return None, _budget(value, "reasoning_effort"), None
    raise InvalidParameterError(
        f"'reasoning_effort' must be one of {', '.join(EFFORTS)}, a boolean or an integer. "
        f"Given: {shown(value)}.",
        param="reasoning_effort",
    )


def _thinking(value: object) -> tuple[bool | None, int | None]:
    """Return whether to reason, and the budget."""
    if value is None:
        return None, None
    if not isinstance(value, dict):
        raise InvalidParameterError(
            f"'thinking' must be an object. Given: {shown(value)}.", param="thinking"
        )
    kind, given = value.get("type"), value.get("budget_tokens")
    if kind is not None and not (isinstance(kind, str) and kind in _SWITCHES):
        raise InvalidParameterError(
            f"'thinking.type' must be one of {', '.join(_SWITCHES)}. Given: {shown(kind)}.",
            param="thinking.type",
        )
    budget = None if given is None else _budget(given, "thinking.budget_tokens")
    if kind == "disabled" and budget is not None:
        raise InvalidParameterError(
            f"'thinking.budget_tokens' requires 'thinking.type' enabled. Given: {budget}.",
            param="thinking.budget_tokens",
        )
    return None if kind is None else _SWITCHES[kind], budget


def _budget(value: object, path: str) -> int:
    budget = integer(value)
    if budget is None:
        raise InvalidParameterError(
            f"'{path}' must be an integer. Given: {shown(value)}.", param=path
        )
    for comparison, bound, is_beyond in (
        ("at least", THINKING_BUDGET.minimum, budget < THINKING_BUDGET.minimum),
        ("at most", THINKING_BUDGET.maximum, budget > THINKING_BUDGET.maximum),
    ):
        if is_beyond:
            raise InvalidParameterError(
                f"'{path}' must be {comparison} {bound}. Given: {shown(value)}.", param=path
            )
    return budget
