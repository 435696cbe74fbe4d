"""Shared code of the commands for tenants, projects, members and keys."""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

import click
from pydantic import BaseModel
from typing_extensions import override

from gateway.errors import InvalidParameterError, shown
from gateway.tenancy.limits import (
    FromPlan,
    LimitChanges,
    LimitName,
    LimitValues,
    read_limit_changes,
)
from gateway.terminal.options import NONE, Decorator
from gateway.terminal.output import print_json, print_table

LIMITS_HELP: Final = f"""\
\b
Limits: {", ".join(tuple(LimitName)[:4])},
  {", ".join(tuple(LimitName)[4:])}.
"""

tenant_option: Decorator = click.option(
    "--tenant", "tenant_id", required=True, help="Id of the tenant."
)
limit_option: Decorator = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help=f"Own limit, repeatable; {NONE}: no limit, {FromPlan.FROM_PLAN.value}: the plan's limit.",
)

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}
_DURATION = re.compile(r"([1-9][0-9]{0,5})([mhd])")


class Duration(click.ParamType[timedelta | str]):
    """A number of minutes, hours or days, such as 30d; 0 or none where that is allowed."""

    name = "duration"

    def __init__(self, *, allows_zero: bool = False, allows_none: bool = False) -> None:
        self._allows_zero = allows_zero
        self._allows_none = allows_none

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta | str:
        if self._allows_zero and value == "0":
            return timedelta(0)
        if self._allows_none and value == NONE:
            return NONE
        match = _DURATION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a duration in m, h or d, such as 30d.", param, ctx)
        return timedelta(**{_UNITS[match[2]]: int(match[1])})


def to_limits(given: Iterable[str]) -> LimitChanges:
    """Parse limits given as NAME=VALUE."""
    return read_limit_changes(dict(map(_pair, given)))


def _pair(text: str) -> tuple[str, int | str | None]:
    name, _, value = text.partition("=")
    if value == NONE:
        return name, None
    if value == FromPlan.FROM_PLAN.value:
        return name, value
    if not value.isascii() or not value.isdigit():
        raise InvalidParameterError(
            f"'limit' must be NAME=VALUE with a number, {NONE} or {FromPlan.FROM_PLAN.value}. "
            f"Given: {shown(text)}.",
            param="limit",
        )
    return name, int(value[:20])


def show_limits(limits: LimitValues) -> str:
    """Format an entity's own limits for a table."""
    texts = (f"{name}={NONE if value is None else value}" for name, value in limits.items())
    return ",".join(texts) or "-"


def print_one(body: BaseModel, *, as_json: bool) -> None:
    """Print one entity: a line for each field, or JSON."""
    fields = body.model_dump(mode="json")
    if as_json:
        print_json(fields)
        return
    print_table(("OPTION", "VALUE"), list(_lines(fields)))


def print_bodies(bodies: Iterable[BaseModel]) -> None:
    """Print a list as JSON."""
    print_json([body.model_dump(mode="json") for body in bodies])


def _lines(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        match value:
            case dict():
                yield from _lines(value, f"{prefix}{name}.")
            case list():
                yield f"{prefix}{name}", ", ".join(map(str, value))
            case bool():
                yield f"{prefix}{name}", "yes" if value else "no"
            case None:
                yield f"{prefix}{name}", NONE
            case _:
                yield f"{prefix}{name}", str(value)
