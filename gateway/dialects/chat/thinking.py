"""Reasoning parameters: budget, effort, and whether the response includes the reasoning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field

from contract.sampling import Range
from gateway.dialects.fields import (
    Parameters,
    agreed,
    bounded,
    integer,
    one_of,
    optional_object,
    read_boolean,
    within,
)
from gateway.dialects.json_types import Schema, or_null, schema_of
from gateway.dialects.profile import Profile
from gateway.dialects.wire import INTEGRAL
from gateway.records.errors import invalid, must

THINKING_BUDGET = Range(-1, 2**31 - 1)
UNLIMITED: Final = -1

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_EFFORT: Final = "none"
DEFAULT_EFFORT: Final = "default"
"""The template's own effort, as if none was given."""

_SWITCHES: Final = {"enabled": True, "disabled": False, "adaptive": None}
_BUDGET: Final = f"int[{THINKING_BUDGET.minimum}:{THINKING_BUDGET.maximum}]"
_EFFORT: Final = f"effort | bool | {_BUDGET} | None"
_EFFORT_NAMES: Final[Schema] = {"enum": [*EFFORTS, DEFAULT_EFFORT]}
_THINKING: Final = schema_of(
    f'{{"type?": switch, "budget_tokens?": {_BUDGET} | None}}', switch={"enum": [*_SWITCHES, None]}
)
_REASONING: Final = schema_of(
    f"""{{
        "effort?": {_EFFORT},
        "enabled?": bool | None,
        "max_tokens?": {_BUDGET} | None,
        "exclude?": bool | None,
    }}""",
    effort=_EFFORT_NAMES,
)


class ThinkingParameters(Parameters):
    """Parameters of reasoning models."""

    reasoning_effort: Any = Field(
        default=None,
        description=f"Amount of reasoning: {', '.join(EFFORTS)}. Sets the variables "
        "`reasoning_effort` and `enable_thinking` or `thinking` of the chat template, if it reads "
        "them. true and false only turn reasoning on and off; a number is the same as "
        f"`thinking_budget`, and {DEFAULT_EFFORT} as null.",
        json_schema_extra=schema_of(_EFFORT, effort=_EFFORT_NAMES),
    )
    thinking_budget: Annotated[int, bounded(THINKING_BUDGET), INTEGRAL] | None = None
    """Maximum tokens of reasoning, after which its end is forced; 0: at once, -1: no limit. More
    than 0 turns reasoning on, unless another parameter turns it off. No effect if the model does
    not reason. Default: -1."""
    thinking_token_budget: Annotated[int, bounded(THINKING_BUDGET), INTEGRAL] | None = None
    """Another name of `thinking_budget`."""
    reasoning_budget_tokens: Annotated[int, bounded(THINKING_BUDGET), INTEGRAL] | None = None
    """Another name of `thinking_budget`."""
    thinking: Annotated[Any, Field(json_schema_extra=or_null(_THINKING))] = None
    """`{type, budget_tokens}`: `type` enabled or disabled sets the template's variable
    `enable_thinking`, adaptive does not; `budget_tokens` is another name of `thinking_budget`.
    Dialect fireworks rejects it together with `reasoning_effort`."""
    enable_thinking: bool | None = None
    """Whether to reason, as `reasoning_effort` true or false."""
    reasoning: Annotated[Any, Field(json_schema_extra=or_null(_REASONING))] = None
    """`{effort, enabled, max_tokens, exclude}`: other names of `reasoning_effort`,
    `enable_thinking` and `thinking_budget`, and the opposite of `include_reasoning`."""
    include_reasoning: bool | None = None
    """Whether the response includes the reasoning, which is always billed. Default: true."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning settings of a request. A parameter is empty if none gave its setting."""

    budget: int | None
    """Maximum reasoning tokens; None means no limit."""
    budget_param: str
    effort: str | None
    effort_param: str
    is_enabled: bool | None
    """Whether the model should reason; None leaves the decision to its template."""
    switch_param: str
    is_shown: bool
    """Whether the response includes the reasoning."""


def read_thinking(body: ThinkingParameters, profile: Profile) -> Thinking:
    """Return the reasoning settings of a request. Raises InvalidParameterError."""
    if profile.separates_thinking and None not in (body.thinking, body.reasoning_effort):
        raise invalid("thinking", "cannot be combined with 'reasoning_effort' in this dialect.")
    effort, effort_budget, is_effort = _effort(body.reasoning_effort, "reasoning_effort")
    reasoning = optional_object(body.reasoning, "reasoning")
    other_effort, other_budget, is_other_effort = _effort(
        reasoning.get("effort"), "reasoning.effort"
    )
    switch, switch_budget = _thinking(body.thinking)
    excludes = read_boolean(reasoning.get("exclude"), "reasoning.exclude")
    if excludes and body.include_reasoning:
        raise invalid("reasoning.exclude", "must not be true if 'include_reasoning' is true.")
    efforts = {"reasoning_effort": effort, "reasoning.effort": other_effort}
    switches = {
        "reasoning_effort": is_effort,
        "reasoning.effort": is_other_effort,
        "reasoning.enabled": read_boolean(reasoning.get("enabled"), "reasoning.enabled"),
        "thinking.type": switch,
        "enable_thinking": body.enable_thinking,
    }
    budgets = {
        "thinking_budget": body.thinking_budget,
        "thinking_token_budget": body.thinking_token_budget,
        "reasoning_budget_tokens": body.reasoning_budget_tokens,
        "thinking.budget_tokens": switch_budget,
        "reasoning.max_tokens": _budget(reasoning.get("max_tokens"), "reasoning.max_tokens"),
        "reasoning_effort": effort_budget,
        "reasoning.effort": other_budget,
    }
    budget = agreed(**budgets)
    is_limited = budget is not None and budget != UNLIMITED
    return Thinking(
        budget=budget if is_limited else None,
        budget_param=_param_of(budgets) if is_limited else "",
        effort=agreed(**efforts),
        effort_param=_param_of(efforts),
        is_enabled=_agreed_switch(switches),
        switch_param=_param_of(switches),
        is_shown=body.include_reasoning is not False and not excludes,
    )


def _param_of(given: Mapping[str, object]) -> str:
    return next((name for name, value in given.items() if value is not None), "")


def _agreed_switch(switches: Mapping[str, bool | None]) -> bool | None:
    first = _param_of(switches)
    is_on = switches.get(first)
    for name, other in switches.items():
        if other is not None and other is not is_on:
            given, earlier = ("enables", "disables") if other else ("disables", "enables")
            raise invalid(name, f"{given} reasoning, but '{first}' {earlier} it.")
    return is_on


def _effort(value: object, path: str) -> tuple[str | None, int | None, bool | None]:
    """Return the effort, the budget, and whether to reason, each None if unspecified."""
    if value is None or value == DEFAULT_EFFORT:
        return None, None, None
    if isinstance(value, bool):
        return None, None, value
    if isinstance(value, str) and value in EFFORTS:
        return value, None, value != NO_EFFORT
    if isinstance(value, int | float):
        return None, _budget(value, path), None
    raise must(path, f"be one of {', '.join(EFFORTS)}, a boolean or an integer", value)


def _thinking(value: object) -> tuple[bool | None, int | None]:
    """Return whether to reason, and the budget."""
    thinking = optional_object(value, "thinking")
    kind = one_of(thinking.get("type"), "thinking.type", _SWITCHES)
    budget = _budget(thinking.get("budget_tokens"), "thinking.budget_tokens")
    if kind == "disabled" and budget is not None:
        raise invalid(
            "thinking.budget_tokens", f"requires 'thinking.type' enabled. Given: {budget}."
        )
    return None if kind is None else _SWITCHES[kind], budget


def _budget(value: object, path: str) -> int | None:
    if value is None:
        return None
    budget = integer(value)
    if budget is None:
        raise must(path, "be an integer", value)
    return within(budget, path, THINKING_BUDGET)
