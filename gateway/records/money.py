"""Amounts of money: a parameter type of commands, and text."""

import re
from typing import Any, Final

import click
from typing_extensions import override

from gateway.records.usage_record import MICRO

_DOLLARS: Final = re.compile(r"(-?)\$?([0-9]{1,12})(?:\.([0-9]{1,6}))?")


class Dollars(click.ParamType[int]):
    """An exact amount with at most six decimals, such as 0.15; converted to micro-dollars."""

    name = "dollars"

    def __init__(self, least_micros: int, most_micros: int) -> None:
        self._least, self._most = least_micros, most_micros

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        amount = read_dollars(str(value))
        if amount is None:
            self.fail(
                f"{value!r} is not an amount in dollars with at most six decimals, such as 0.15.",
                param,
                ctx,
            )
        if not self._least <= amount <= self._most:
            bounds = f"{show_dollars(self._least)} to {show_dollars(self._most)}"
            self.fail(f"{value!r} is not an amount from {bounds}.", param, ctx)
        return amount


def read_dollars(text: str) -> int | None:
    """Return an exact amount such as 0.15 in micro-dollars, or None if it is no amount."""
    match = _DOLLARS.fullmatch(text.strip())
    if match is None:
        return None
    micros = int(match[2]) * MICRO + int((match[3] or "").ljust(6, "0"))
    return -micros if match[1] else micros


def plain_dollars(micros: int) -> str:
    """Format an amount of micro-dollars exactly, as `read_dollars` reads it."""
    return show_dollars(micros).replace("$", "").replace(",", "")


def show_dollars(micros: int) -> str:
    """Format an amount of micro-dollars exactly, in dollars with two to six decimals."""
    whole, rest = divmod(abs(micros), MICRO)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if micros < 0 else ''}${whole:,}.{decimals}"
