"""Command lines of the worker's programs, made from their settings."""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

S = TypeVar("S", bound=BaseSettings)


def settings_command(
    name: str, settings_type: type[S], run: Callable[[S], int], *, description: str
) -> click.Command:
    """Return a command with an option for each setting. It exits with the code of `run`."""

    def start(**given: Any) -> None:
        try:
            settings = settings_type(
                **{name: value for name, value in given.items() if value is not None}
            )
        except ValidationError as error:
            raise click.UsageError(_describe(error)) from None
        try:
            code = run(settings)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        # Threads and finalizers of engine libraries may log or block at interpreter exit.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)

    prefix = str(settings_type.model_config["env_prefix"])
    return click.Command(
        name,
        callback=start,
        params=[_option(prefix, *each) for each in settings_type.model_fields.items()],
        help=description,
    )


def _option(prefix: str, name: str, field: FieldInfo) -> click.Option:
    text = f"{field.description}  [{prefix}{name.upper()}]"
    default = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if field.default_factory is None and isinstance(default, (str, int, float)) and default != "":
        text += f"  [default: {default}]"
    return click.Option([f"--{name.replace('_', '-')}", name], help=text, metavar="VALUE")


def _describe(error: ValidationError) -> str:
    lines = []
    for each in error.errors():
        name = ".".join(str(part) for part in each["loc"]).replace("_", "-")
        lines.append(f"{f'--{name}: ' if name else ''}{each['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)
