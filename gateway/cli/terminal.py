"""Options and output of commands: types of values, a table for people, JSON for programs."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from typing import Any, Final

import click
import msgspec
from typing_extensions import override

from contract.dialect import Dialect
from gateway.records.errors import must
from gateway.records.limits import FromPlan, LimitName
from gateway.records.money import show_dollars

NONE: Final = "none"
"""The value that unsets an option."""

Entity = Mapping[str, Any]
Columns = Mapping[str, Callable[[Entity], Any]]
"""For each heading of a table, a function of the entity."""


def print_json(value: Any) -> None:
    """Print one JSON document, indented."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, or a message that there is nothing."""
    if not rows:
        click.echo("None.")
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def print_columns(shown: Columns, found: Entity | Sequence[Entity]) -> None:
    """Print a table with one entity or a list of them."""
    entities = [found] if isinstance(found, Mapping) else found
    rows = [[show(of(entity), missing="-") for of in shown.values()] for entity in entities]
    print_table([heading.replace("_", " ") for heading in shown], rows)


def print_fields(entity: Entity) -> None:
    """Print a line for each field."""
    print_table(("OPTION", "VALUE"), list(_lines(entity)))


def _lines(fields: Entity, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{prefix}{name}", str(value) if value == "" else show(text, missing=NONE)


def show(value: Any, *, missing: str) -> str:
    """Format a value of JSON for a table."""
    if value in (None, "", [], {}):
        return missing
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list():
            return ",".join(map(str, value))
        case dict():
            pairs = value.items()
            return ",".join(f"{name}={NONE if each is None else each}" for name, each in pairs)
        case _:
            return str(value)


def columns(text: str, **computed: Callable[[Entity], Any]) -> Columns:
    """Return the columns `HEADING=FIELD`; `_` in a heading is a space.

    The fields are those of the entity, or computed. Fields that end with `_at` are times, those
    with `_micros` are amounts. `HEADING=FIELD:TEXT` shows a text where a time is missing.
    """
    return dict(_column(part, computed) for part in text.split())


def _column(
    part: str, computed: Mapping[str, Callable[[Entity], Any]]
) -> tuple[str, Callable[[Entity], Any]]:
    heading, _, field = part.partition("=")
    name, _, missing = field.partition(":")
    # Gateways of another release may lack a field.
    read = computed.get(name, methodcaller("get", name))
    if name.endswith("_at"):
        return heading, lambda entity: show_time(read(entity), missing=missing or "never")
    if name.endswith("_micros"):
        return heading, lambda entity: show_dollars(read(entity))
    return heading, read


def show_time(time: str | int | None, *, missing: str = "never") -> str:
    """Format a time for a table, in UTC. It is ISO 8601 text or Unix seconds."""
    if time is None:
        return missing
    read = datetime.fromtimestamp(time, UTC) if isinstance(time, int) else _read(time)
    return f"{read:%Y-%m-%d %H:%M:%S} UTC"


def _read(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


URL_SOURCE: Final = "gateway.url_source"
"""Key in click's `Context.meta` of the file that the URLs of the stores are from, or None."""
_PLAN: Final = FromPlan.FROM_PLAN.value
NULL: Final = object()
"""The value of an option that a request sends as null, because `none` is given."""

LIMITS_HELP: Final = f"""\
\b
Limits: {", ".join(tuple(LimitName)[:4])},
  {", ".join(tuple(LimitName)[4:])}.
"""

_UNIT_SECONDS: Final = {"m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_INTEGER: Final = re.compile(r"[0-9]+", re.ASCII)
MAX_DIGITS: Final = 20
"""Longer numbers are cut: they are beyond every bound, and Python refuses to read the longest."""


def option(flags: str, text: str, **settings: Any) -> click.Option:
    """Return an option: its flags, the name of its value if it differs, and a METAVAR."""
    *names, last = flags.split()
    if last.isupper():
        settings["metavar"] = last
    return click.Option(names if last.isupper() else [*names, last], help=text, **settings)


def choice(flags: str, values: Iterable[str], text: str, **settings: Any) -> click.Option:
    """Return an option with one of some values."""
    return option(flags, text, type=click.Choice([str(each) for each in values]), **settings)


def argument(name: str, **settings: Any) -> click.Argument:
    """Return an argument of a command."""
    return click.Argument([name], **settings)


DATABASE: Final = option(
    "--database-url URL",
    "sqlite+aiosqlite:///FILE or postgresql+asyncpg://USER:PASSWORD@HOST/NAME.  "
    "[SLUICE_DATABASE_URL]",
)
REDIS: Final = option("--redis-url URL", "Redis server of the gateways.  [SLUICE_REDIS_URL]")
JSON: Final = option("--json as_json", "Print JSON instead of a table.", is_flag=True)


def or_none(_context: click.Context, _param: click.Parameter, value: Any) -> Any:
    """Return an option's value, or NULL for `none`."""
    return NULL if value in (NONE, (NONE,)) else value


def dialect_option(*, is_new: bool) -> click.Option:
    """Return the option of a dialect; `none` removes it, unless the object is new."""
    text = f"Dialect of requests that specify none{'' if is_new else '; none removes it'}."
    return choice("--dialect", [*Dialect, *([] if is_new else [NONE])], text, callback=or_none)


def limit_option() -> click.Option:
    """Return the option of an object's own limits."""
    text = f"Own limit, repeatable; {NONE}: no limit, {_PLAN}: the plan's limit."
    return option("--limit limits NAME=VALUE", text, multiple=True, callback=_own_limits)


def default_limit_option(scope: str) -> click.Option:
    """Return the option of a plan's limits for each tenant, project or key."""
    text = f"Default limit of each {scope}, repeatable; {NONE} removes it."
    flags = f"--{scope}-limit {scope}_limits NAME=VALUE"
    return option(flags, text, multiple=True, callback=_limits)


def _limits(_context: Any, _param: Any, given: tuple[str, ...]) -> dict[str, Any] | None:
    return dict(map(_pair, given)) or None


def _own_limits(context: Any, param: Any, given: tuple[str, ...]) -> dict[str, Any] | None:
    limits = _limits(context, param, given)
    for name, value in (limits or {}).items():
        if isinstance(value, str) and value != _PLAN:
            rule = f"be NAME=VALUE with a number, {NONE} or {_PLAN}"
            raise must("limit", rule, f"{name}={value}" if value else name)
    return limits


def _pair(text: str) -> tuple[str, int | str | None]:
    name, _, value = text.partition("=")
    if value == NONE:
        return name.strip(), None
    is_number = _INTEGER.fullmatch(value) is not None
    return name.strip(), int(value[:MAX_DIGITS]) if is_number else value


class Duration(click.ParamType[int | str]):
    """A number of minutes, hours or days, such as 30d, in seconds; or the word `also`."""

    name = "duration"

    def __init__(self, *, also: str = "") -> None:
        self._also = also

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == self._also:
            return self._also
        match = _DURATION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a duration in m, h or d, such as 30d.", param, ctx)
        return int(match[1]) * _UNIT_SECONDS[match[2]]


def seconds(_context: click.Context, _param: click.Parameter, given: int | str) -> int:
    """Return a duration as the API's number."""
    return int(given)


def from_now(_context: click.Context, _param: click.Parameter, given: int | str | None) -> Any:
    """Return the time in ISO 8601 after a duration, or NULL for `none`."""
    if isinstance(given, int):
        return (datetime.now(UTC) + timedelta(seconds=given)).isoformat()
    return NULL if given == NONE else None


class Time(click.ParamType[str]):
    """A date or time in ISO 8601; UTC if it has no zone."""

    name = "time"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            time = datetime.fromisoformat(str(value).strip())
            in_utc = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
            return in_utc.isoformat()
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a time such as 2026-12-01 or 2026-12-01T08:30+01:00.", param, ctx
            )
