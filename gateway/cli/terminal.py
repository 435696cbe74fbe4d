"""Options and output of commands: types of values, a table for people, JSON for programs."""

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from operator import methodcaller
from shutil import get_terminal_size
from typing import Any, Final

import click
import msgspec
from typing_extensions import override

from gateway.records.errors import must
from gateway.records.limits import FromPlan, LimitName
from gateway.records.money import read_dollars, show_dollars

NONE: Final = "none"
"""The value that unsets an option."""

Entity = Mapping[str, Any]
Columns = Mapping[str, Callable[[Entity], Any]]
"""For each heading of a table, a function of the entity."""


def print_json(value: Any) -> None:
    """Print one JSON document, indented."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns that fit the terminal, or a message that there is nothing."""
    width = get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(headings, rows, width):
        click.echo(line)


def table_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None
) -> Iterator[str]:
    """Yield the lines of a table, of at most `width` characters if the longest words allow it.

    A table that is too wide loses columns without values, then wraps its widest columns at spaces
    and commas. If it is still too wide, each row becomes a block with a line for each value.
    """
    if not rows:
        yield "None."
        return
    columns = list(zip(headings, *rows, strict=True))
    if _width(columns, map(_widest, columns)) > (width or math.inf):
        columns = [column for column in columns if {*column[1:]} - {_MISSING}] or columns
    widths = list(map(_widest, columns))
    least = [max(len(word) for cell in column for word in _words(cell)) for column in columns]
    while width is not None and _width(columns, widths) > width:
        spare = [each - lowest for each, lowest in zip(widths, least, strict=True)]
        if (most := max(spare)) <= 0:
            break
        place = spare.index(most)
        wrapped = (_wrapped(cell, widths[place] - 1) for cell in columns[place])
        widths[place] = max(len(line) for lines in wrapped for line in lines)
    if width is not None and _width(columns, widths) > width:
        label = max(len(column[0]) for column in columns)
        for number in range(1, len(rows) + 1):
            yield from [""] * (number > 1)
            yield from (f"{column[0].ljust(label)}  {column[number]}" for column in columns)
        return
    for row in zip(*columns, strict=True):
        cells = [_wrapped(cell, each) for cell, each in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(each) for part, each in zip(parts, widths, strict=True))
            yield "  ".join(padded).rstrip()


def _widest(column: Sequence[str]) -> int:
    return max(map(len, column))


def _width(columns: Sequence[Any], widths: Iterable[int]) -> int:
    return sum(widths) + 2 * (len(columns) - 1)


def _words(cell: str) -> list[str]:
    """Return the parts of a cell between which a line may end."""
    return re.findall(r"[^ ,]*,|[^ ,]+| +", cell) or [""]


def _wrapped(cell: str, width: int) -> list[str]:
    lines = [""]
    for word in _words(cell):
        if lines[-1] and len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word if lines[-1] else word.lstrip()
    return [line.rstrip() for line in lines]


def print_columns(shown: Columns, found: Entity | Sequence[Entity]) -> None:
    """Print a table with one entity or a list of them."""
    entities = [found] if isinstance(found, Mapping) else found
    rows = [[show(of(entity), missing=_MISSING) for of in shown.values()] for entity in entities]
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
            label, text = _in_dollars(name, text)
            if name.endswith("_at") and text is not None:
                text = f"{text} ({_local(text):%Y-%m-%d %H:%M:%S %Z})"
            yield f"{prefix}{label}", str(value) if value == "" else show(text, missing=NONE)


def _in_dollars(name: str, value: Any) -> tuple[str, Any]:
    """Return the name and text of an amount in dollars; other values as they are."""
    if not name.endswith(MICROS):
        return name, value
    return name.removesuffix(MICROS), value if value is None else show_dollars(value)


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
            pairs = (_in_dollars(*pair) for pair in value.items())
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
        return heading, lambda entity: _in_dollars(name, read(entity))[1]
    return heading, read


def show_time(time: str | int | None, *, missing: str = "never") -> str:
    """Format a time for a table, in UTC. It is ISO 8601 text or Unix seconds."""
    if time is None:
        return missing
    return f"{_local(time).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _local(time: str | int) -> datetime:
    """Return a time of the API in the zone of this machine."""
    if isinstance(time, int):
        return datetime.fromtimestamp(time).astimezone()
    return datetime.fromisoformat(time).astimezone()


URL_SOURCE: Final = "gateway.url_source"
"""Key in click's `Context.meta` of the file that the URLs of the stores are from, or None."""
_PLAN: Final = FromPlan.FROM_PLAN.value
NULL: Final = object()
"""The value of an option that a request sends as null, because `none` is given."""

MICROS: Final = "_micros"
"""The end of the names of amounts."""
_MISSING: Final = "-"
BUDGET: Final = LimitName.BUDGET.removesuffix(MICROS)
"""The name of the budget in commands, which have amounts in dollars."""
_SHOWN_LIMITS: Final = [str(name).removesuffix(MICROS) for name in LimitName]
LIMITS_HELP: Final = f"""\
\b
Limits: {", ".join(_SHOWN_LIMITS[:4])},
  {", ".join(_SHOWN_LIMITS[4:])}.
The {BUDGET} is in dollars a month.
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
    "sqlite+aiosqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.  [SLUICE_DATABASE_URL]",
)
REDIS: Final = option("--redis-url URL", "Redis server of the gateways.  [SLUICE_REDIS_URL]")
JSON: Final = option("--json as_json", "Print JSON instead of a table.", is_flag=True)


def limits(_context: Any, _param: Any, given: tuple[str, ...]) -> dict[str, Any] | None:
    """Return limits by name from `NAME=VALUE`; None if there are none."""
    return dict(map(_pair, given)) or None


def own_limits(context: Any, param: Any, given: tuple[str, ...]) -> dict[str, Any] | None:
    """Do the same as `limits`, and refuse values that are no limit of an object's own."""
    own = limits(context, param, given)
    for name, value in (own or {}).items():
        if isinstance(value, str) and value != _PLAN:
            rule = f"be NAME=VALUE with a number, {NONE} or {_PLAN}"
            raise must("limit", rule, f"{name}={value}" if value else name)
    return own


def _pair(text: str) -> tuple[str, int | str | None]:
    name, _, value = text.partition("=")
    name = name.strip()
    # Names of a plan's spend limits have a slash.
    if name == BUDGET or "/" in name:
        name = LimitName.BUDGET.value if name == BUDGET else name
        amount = None if value in (NONE, _PLAN) else read_dollars(value)
        if amount is None and value not in (NONE, _PLAN):
            raise must("limit", "be NAME=DOLLARS, such as budget=50", text)
        value = value if amount is None else str(amount)
    if value == NONE:
        return name, None
    is_number = _INTEGER.fullmatch(value) is not None
    return name, int(value[:MAX_DIGITS]) if is_number else value


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


def seconds(_context: Any, _param: Any, given: int | str | None) -> int | None:
    """Return a duration as the API's number."""
    return None if given is None else int(given)


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
