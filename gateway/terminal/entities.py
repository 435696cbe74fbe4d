"""Shared options and output of the management commands."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, Final, TypeVar

import click
from pydantic import BaseModel
from typing_extensions import override

from gateway.errors import must
from gateway.tenancy.limits import (
    FromPlan,
    LimitChanges,
    LimitName,
    LimitValues,
    read_limit_changes,
)
from gateway.terminal.options import NONE, Decorator, json_option
from gateway.terminal.output import print_json, print_table

T = TypeVar("T")

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
        raise must(
            "limit", f"be NAME=VALUE with a number, {NONE} or {FromPlan.FROM_PLAN.value}", text
        )
    return name, int(value[:20])


def show_limits(limits: LimitValues) -> str:
    """Format an entity's own limits for a table."""
    texts = (f"{name}={NONE if value is None else value}" for name, value in limits.items())
    return ",".join(texts) or "-"


def prints(
    to_text: Callable[[Any], None], to_json: Callable[[Any], Any] = lambda result: result
) -> Decorator:
    """Return a decorator that adds `--json` to a command, and prints its result.

    Args:
        to_text: prints the result for people.
        to_json: returns a body of the result, or of each entry if the result is a list.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        @json_option
        @wraps(command)
        def run(*args: Any, as_json: bool, **options: Any) -> None:
            result = command(*args, **options)
            if not as_json:
                to_text(result)
            elif isinstance(result, list):
                print_json([_fields(to_json(each)) for each in result])
            else:
                print_json(_fields(to_json(result)))

        return run

    return decorate


def table(
    headings: Sequence[str], to_row: Callable[[T], Sequence[str]]
) -> Callable[[T | list[T]], None]:
    """Return a function that prints a table with one entity or a list of them."""

    def print_entities(found: T | list[T]) -> None:
        print_table(
            headings, [to_row(each) for each in (found if isinstance(found, list) else [found])]
        )

    return print_entities


def print_fields(body: BaseModel) -> None:
    """Print a line for each field."""
    print_table(("OPTION", "VALUE"), list(_lines(body.model_dump(mode="json"))))


def _fields(body: object) -> object:
    return body.model_dump(mode="json") if isinstance(body, BaseModel) else body


def _lines(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        match value:
            case dict():
                yield from _lines(value, f"{prefix}{name}.")
            case list():
                yield f"{prefix}{name}", ", ".join(map(str, value)) or NONE
            case bool():
                yield f"{prefix}{name}", "yes" if value else "no"
            case None:
                yield f"{prefix}{name}", NONE
            case _:
                yield f"{prefix}{name}", str(value)
