"""Fields of forms for limits: a number, `none`, or nothing for the plan's limit."""

from typing import Final

from gateway.console.forms import Form
from gateway.console.tables import Field, Group
from gateway.records.errors import must
from gateway.records.limits import FromPlan, LimitName, LimitScope, LimitValues, names_of
from gateway.records.money import read_dollars, show_dollars

NONE: Final = "none"
PREFIX: Final = "limit_"
HINT: Final = "A number, “none” for no limit, or empty for the limit of the plan."

LABELS: Final = {
    LimitName.REQUESTS_PER_MINUTE: "Requests per minute",
    LimitName.TOKENS_PER_MINUTE: "Tokens per minute",
    LimitName.PROMPT_TOKENS_PER_MINUTE: "Prompt tokens per minute",
    LimitName.COMPLETION_TOKENS_PER_MINUTE: "Completion tokens per minute",
    LimitName.REQUESTS_PER_DAY: "Requests per day",
    LimitName.TOKENS_PER_DAY: "Tokens per day",
    LimitName.CONCURRENT_REQUESTS: "Concurrent requests",
    LimitName.BUDGET: "Budget per month, in dollars",
    LimitName.STORED_BYTES: "Stored bytes",
    LimitName.BATCH_TOKENS: "Tokens in batches",
    LimitName.MODEL_SHARE: "Share of a model, in percent",
}


def shown_limit(name: LimitName, value: int) -> str:
    """Return a limit or its usage as text."""
    return show_dollars(value) if name is LimitName.BUDGET else f"{value:,}"


def labels_of(scope: LimitScope) -> dict[LimitName, str]:
    """Return the labels of the limits that a holder can have."""
    return {name: LABELS[name] for name in names_of(scope)}


def limit_group(
    scope: LimitScope, legend: str = "Limits", *, prefix: str = PREFIX, hint: str = HINT
) -> Group:
    """Return the fields of a form for the limits of a holder."""
    fields = [Field(f"{prefix}{name}", label) for name, label in labels_of(scope).items()]
    return Group(legend, fields, hint)


def fields_of(limits: LimitValues, prefix: str = PREFIX) -> dict[str, str]:
    """Return the fields of a holder's own limits."""
    return {f"{prefix}{name}": _text(name, limits) for name in LimitName}


def read_limits(
    form: Form, scope: LimitScope, *, is_new: bool, prefix: str = PREFIX
) -> dict[str, int | str | None]:
    """Return the limits of a form as a request body has them. Raises InvalidParameterError.

    An empty field of something new is absent, else it restores the plan's limit.
    """
    limits: dict[str, int | str | None] = {}
    for name in LimitName:
        text = form[f"{prefix}{name}"]
        if text:
            limits[name.value] = _value(name, text)
        elif not is_new and name in names_of(scope):
            limits[name.value] = FromPlan.FROM_PLAN.value
    return limits


def _text(name: LimitName, limits: LimitValues) -> str:
    if name not in limits:
        return ""
    value = limits[name]
    if value is None:
        return NONE
    return (
        show_dollars(value).replace("$", "").replace(",", "")
        if name is LimitName.BUDGET
        else str(value)
    )


def _value(name: LimitName, text: str) -> int | None:
    if text.lower() == NONE:
        return None
    if name is LimitName.BUDGET:
        value = read_dollars(text)
    else:
        digits = text.replace(",", "").replace("_", "")
        value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None
    if value is None or value < 0:
        what = "an amount such as 12.50" if name is LimitName.BUDGET else "a whole number"
        raise must(name, f"be {what}, '{NONE}' or empty", text)
    return value
