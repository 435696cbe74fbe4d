"""The worker's command line: `python -m worker`. Environment variables can set every option."""

import logging
import os
import sys
from typing import Any

import click
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from worker.main import run
from worker.settings import Settings, environment_name


def _option(name: str, field: FieldInfo) -> click.Option:
    text = f"{field.description}  [{environment_name(name)}]"
    default = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if field.default_factory is None and isinstance(default, (str, int, float)) and default != "":
        text += f"  [default: {default}]"
    return click.Option([f"--{name.replace('_', '-')}", name], help=text, metavar="VALUE")


def _start(**given: Any) -> None:
    """Run a worker: claim jobs of one model from Redis, run them in batches, and reply."""
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise click.UsageError(_describe(error)) from None
    code = run(settings)
    # Threads and finalizers of engine libraries may log or block at interpreter exit.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _describe(error: ValidationError) -> str:
    lines = []
    for each in error.errors():
        name = ".".join(str(part) for part in each["loc"]).replace("_", "-")
        lines.append(f"{f'--{name}: ' if name else ''}{each['msg'].removeprefix('Value error, ')}")
    return "\\n".join(lines)


command = click.Command(
    "worker",
    callback=_start,
    params=[_option(name, field) for name, field in Settings.model_fields.items()],
    help=_start.__doc__,
)

if __name__ == "__main__":
    command(prog_name="python -m worker")
