"""Fields of forms for limits: a number, `none`, or nothing for the plan's limit."""

from collections.abc import Mapping
from typing import Final

from gateway.accounts.limits import LimitBody
from gateway.console.formats import cents, number, size
from gateway.console.forms import Form
from gateway.console.tables import Field, Group
from gateway.records.errors import must
from gateway.records.limits import FromPlan, LimitName, LimitScope, LimitValues, names_of
from gateway.records.money import plain_dollars, read_dollars

NONE: Final = "none"
PREFIX: Final = "limit_"
HINT: Final = "A number, “none” for no limit, or empty for the limit of the plan."
LABELS: Final = {name: name.replace("_", " ").capitalize() for name in LimitName} | {
    LimitName.BUDGET: "Monthly budget",
    LimitName.BATCH_TOKENS: "Tokens in batches",
    LimitName.MODEL_SHARE: "Share of a model",
}
"""Names of limits, in the words of the API's errors."""
COMMON: Final = (
    LimitName.REQUESTS_PER_MINUTE,
    LimitName.TOKENS_PER_MINUTE,
    LimitName.TOKENS_PER_DAY,
    LimitName.BUDGET,
)
"""Limits that forms show at once; the others are folded away."""
_UNITS: Final = {
    LimitName.BUDGET: "in dollars",
    LimitName.STORED_BYTES: "in bytes",
    LimitName.MODEL_SHARE: "in percent",
}
_SHOWN: Final = {
    LimitName.BUDGET: cents,
    LimitName.STORED_BYTES: size,
    LimitName.MODEL_SHARE: "{} %".format,
}
_GROUPS: Final = {
    "_per_minute": "Per minute",
    "_per_day": "Per day",
    "_micros": "Per month",
    "": "At the same time",
}
"""By the end of a limit's name, the period that the limit counts."""


def shown_limit(name: LimitName, value: int) -> str:
    """Return a limit or its usage as text."""
    return _SHOWN.get(name, number)(value)


def grouped(limits: Mapping[LimitName, LimitBody]) -> Mapping[str, list[tuple[str, LimitBody]]]:
    """Return the limits that are set, by the period that they count."""
    groups: dict[str, list[tuple[str, LimitBody]]] = {group: [] for group in _GROUPS.values()}
    for name, body in limits.items():
        if body.limit is not None:
            ending = next((each for each in _GROUPS if name.endswith(each)), "")
            groups[_GROUPS[ending]].append((name, body))
    return {group: found for group, found in groups.items() if found}


def limit_group(
    scope: LimitScope, legend: str = "Limits", *, prefix: str = PREFIX, hint: str = HINT
) -> Group:
    """Return the fields of a form for the limits that a holder can have."""
    units = {name: f", {unit}" for name, unit in _UNITS.items()}
    fields = {
        name: Field(f"{prefix}{name}", LABELS[name] + units.get(name, ""))
        for name in names_of(scope)
    }
    common = [fields.pop(name) for name in COMMON if name in fields]
    return Group(legend, common, hint, more=list(fields.values()))


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
    return plain_dollars(value) if name is LimitName.BUDGET else str(value)


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
