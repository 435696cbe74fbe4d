"""`sluice capacity`: what a load needs, by the formulas and costs of docs/capacity.md."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
from pydantic.fields import FieldInfo

from gateway.cli.terminal import JSON, choice, option, print_json, print_table
from gateway.records.capacity import BYTES, COSTS, Load, Plan, plan, rows_of, values_of
from gateway.records.errors import must


def _yaml(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _yaml(value, f"{indent}  ")
        else:
            text = f'"{value}"' if isinstance(value, str) else value
            yield f"{indent}{name}: {text}"


def _costs(_context: Any, _param: Any, given: tuple[str, ...]) -> dict[str, float]:
    """Return all costs in microseconds and bytes, with those that are given."""
    values = {name: cost.value for name, cost in COSTS.items()}
    for text in given:
        name, _, number = text.partition("=")
        if name not in COSTS:
            raise must("cost", f"be NAME=NUMBER with a name of {', '.join(COSTS)}", text)
        try:
            values[name] = float(number)
        except ValueError:
            values[name] = -1.0
        if not 0 <= values[name] < _MOST:
            raise must("cost", f"be NAME=NUMBER, with {COSTS[name].unit} from 0", text)
    return {name: value * BYTES.get(COSTS[name].unit, 1) for name, value in values.items()}


_MOST: Final = 1e9


def _number(name: str, field: FieldInfo) -> click.Option:
    """Return the option of a member of the load."""
    settings = {} if field.is_required() else {"default": field.default, "show_default": True}
    flags = f"--{name.replace('_', '-')} NUMBER"
    return option(
        flags, field.description or "", type=float, required=field.is_required(), **settings
    )


PARAMS: Final = [
    *(_number(name, field) for name, field in Load.model_fields.items()),
    option(
        "--cost costs NAME=NUMBER",
        "Your own measured cost, repeatable; names and units are in docs/capacity.md.",
        multiple=True,
        callback=_costs,
    ),
    choice("--output", ["table", "values"], "A table, or values for the chart.", default="table"),
    JSON,
]

EPILOG = """\
\b
Examples:
  sluice capacity --requests 40 --prompt-tokens 1200 --completion-tokens 400
  sluice capacity --requests 40 --prompt-tokens 1200 --completion-tokens 400 \\
    --kv-tokens 447611 --cost token=11 --output values >values.yaml
"""


@click.command("capacity", params=PARAMS, epilog=EPILOG)
def command(*, costs: dict[str, float], output: str, as_json: bool, **load: Any) -> None:
    """Compute the machines for a load, from measured costs. It contacts no server."""
    asked = Load.read(load)
    needed = plan(asked, costs)
    if output == "values":
        if needed.redis_servers > 1:
            click.echo(
                f"# Redis needs {needed.redis_servers} masters: a cluster, whose URL you set "
                "(docs/operations.md)."
            )
        for line in _yaml(values_of(needed)):
            click.echo(line)
    elif as_json:
        print_json({name: getattr(needed, name) for name in Plan.__slots__})
    else:
        print_table(("FIGURE", "VALUE"), rows_of(asked, needed))
