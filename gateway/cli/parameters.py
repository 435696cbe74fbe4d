"""Parameters of commands, from the Admin API's OpenAPI document.

`admin_api.json` is the part of the document that commands need; `scripts/admin_api.py` writes it.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from gateway.cli.terminal import (
    MICROS,
    NONE,
    NULL,
    Duration,
    Time,
    argument,
    from_now,
    limits,
    option,
    own_limits,
    seconds,
)
from gateway.records.money import Dollars

FILE: Final = Path(__file__).with_name("admin_api.json")
_NULL: Final = re.compile(r"\b[Nn]ull\b")
_SECONDS: Final = "_seconds"
_TYPES: Final[Mapping[str, Any]] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "time": Time(),
}


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A parameter of the path or query, or a member of the body."""

    text: str = ""
    type: str = ""
    is_many: bool = False
    is_nullable: bool = False
    is_required: bool = False
    choices: tuple[str, ...] = ()
    default: Any = None
    least: int = 0
    most: int = 0


class Operation(msgspec.Struct, frozen=True):
    """An operation of the Admin API."""

    text: str
    given: dict[str, Parameter]


@cache
def operations() -> dict[str, Operation]:
    """Return the operations by method and path, such as `GET /admin/plans/{plan_id}`."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Operation])


def words(text: str) -> str:
    """Return a text of the API in the words of the command line."""
    plain = text.replace("Micro-dollars", "Dollars").replace(MICROS, "")
    return _NULL.sub(f"`{NONE}`", plain)


def argument_of(name: str, parameter: Parameter, metavar: str, **settings: Any) -> click.Argument:
    """Return the argument of a command with this value."""
    return argument(name, metavar=metavar, type=_type(name, parameter), **settings)


def option_of(
    name: str, parameter: Parameter, flags: str = "", *, method: str = "GET"
) -> click.Option:
    """Return the option of a command with this value.

    Args:
        name: its name in the API, from which the default of `flags` is made.
        parameter: its description.
        flags: its flags; a time with a flag that ends with `-in` is a duration from now.
        method: that of the request; `none` removes a value in a PATCH.
    """
    text, default = parameter.text, parameter.default
    flags = f"{flags or f'--{_stem(name, parameter)}'} {name}"
    settings: dict[str, Any] = {"required": parameter.is_required, "multiple": parameter.is_many}
    is_changed_list = method == "PATCH" and parameter.is_many and not parameter.choices
    is_removable = is_changed_list or (parameter.is_nullable and method != "PUT")
    if parameter.type == "object":
        flags += " NAME=VALUE"
        settings |= {"multiple": True, "callback": own_limits if name == "limits" else limits}
    elif parameter.type == "boolean":
        settings |= {"default": None if "/" in flags else False, "is_flag": True}
    elif parameter.type == "time" and "-in " in flags:
        settings |= {"type": Duration(also=NONE), "callback": from_now}
        text = f"Time from now, such as 90m, 12h or 30d. {text}"
    else:
        changes = is_removable and method == "PATCH"
        settings["type"] = _type(name, parameter, also=[NONE] if changes else [])
        if changes and not _NULL.search(text):
            text += f" `{NONE}` removes it."
        if is_removable:
            settings["callback"] = _null if parameter.is_nullable else _empty
        if name.endswith(_SECONDS):
            settings["callback"] = seconds
            default = default and f"{default // 3600}h"
    if settings["multiple"]:
        text += " Repeatable."
    if default:
        shown = ", ".join(map(str, default)) if isinstance(default, list) else default
        text += f"  [default: {shown}]"
    return option(flags, words(text).strip(), **settings)


def _stem(name: str, parameter: Parameter) -> str:
    stem = name.removeprefix("is_").removesuffix(MICROS).removesuffix(_SECONDS).removesuffix("_id")
    if parameter.is_many or parameter.type == "object":
        stem = stem.removesuffix("s")
    return stem.replace("_", "-")


def _type(name: str, parameter: Parameter, also: Sequence[str] = ()) -> Any:
    if parameter.choices:
        return click.Choice([*parameter.choices, *also], case_sensitive=False)
    if name.endswith(MICROS):
        return Dollars(parameter.least, parameter.most)
    if name.endswith(_SECONDS):
        return Duration(also="0")
    return _TYPES[parameter.type]


def _null(_context: click.Context, _param: click.Parameter, value: Any) -> Any:
    return NULL if value in (NONE, (NONE,)) else value


def _empty(_context: click.Context, _param: click.Parameter, value: Any) -> Any:
    return [] if value == (NONE,) else value
