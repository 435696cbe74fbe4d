"""Parameters of commands, from the Admin API's OpenAPI document.

`admin_api.json` is the part of the document that commands need; `scripts/admin_api.py` writes it.
"""

import re
from collections.abc import Mapping
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


class Parameter(msgspec.Struct, frozen=True):
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
    flags = flags or f"--{_stem(name, parameter)}"
    settings: dict[str, Any] = {"required": parameter.is_required, "multiple": parameter.is_many}
    text, default = parameter.text, parameter.default
    if parameter.type == "object":
        flags += f" {name} NAME=VALUE"
        settings |= {"multiple": True, "callback": own_limits if name == "limits" else limits}
    elif parameter.type == "boolean":
        settings |= {"default": None if "/" in flags else False, "is_flag": True}
        flags += f" {name}"
    elif parameter.type == "time" and flags.endswith("-in"):
        settings |= {"type": Duration(also=NONE), "callback": from_now}
        text = "Time from now, such as 90m, 12h or 30d. " + text
        flags += f" {name}"
    else:
        changes = method == "PATCH"
        is_list = changes and parameter.is_many and not parameter.choices
        is_removable = is_list or (parameter.is_nullable and method != "PUT")
        if is_removable:
            settings["callback"] = _null if parameter.is_nullable else _empty
        elif name.endswith(_SECONDS):
            settings["callback"] = seconds
        settings["type"] = _type(name, parameter, can_be_none=is_removable and changes)
        if name.endswith(_SECONDS) and default is not None:
            default = f"{default // 3600}h"
        if is_removable and changes and "ull" not in text:
            text += f" `{NONE}` removes it."
        flags += f" {name}"
    if settings["multiple"]:
        text += " Repeatable."
    if default is not None:
        shown = ", ".join(map(str, default)) if isinstance(default, list) else default
        text += f"  [default: {shown}]"
    return option(flags, words(text).strip(), **settings)


def _stem(name: str, parameter: Parameter) -> str:
    stem = name.removeprefix("is_").removesuffix(MICROS).removesuffix(_SECONDS).removesuffix("_id")
    if parameter.is_many or parameter.type == "object":
        stem = stem.removesuffix("s")
    return stem.replace("_", "-")


def _type(name: str, parameter: Parameter, *, can_be_none: bool = False) -> Any:
    if parameter.choices:
        choices = [*parameter.choices, *([NONE] if can_be_none else [])]
        return click.Choice(choices, case_sensitive=False)
    if name.endswith(MICROS):
        return Dollars(parameter.least, parameter.most)
    if name.endswith(_SECONDS):
        return Duration(also="0")
    return _TYPES[parameter.type]


def _null(_context: click.Context, _param: click.Parameter, value: Any) -> Any:
    return NULL if value in (NONE, (NONE,)) else value


def _empty(_context: click.Context, _param: click.Parameter, value: Any) -> Any:
    return [] if value == (NONE,) else value
