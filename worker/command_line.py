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

_MAY_BE_SECRET = (SecretStr, dict[str, Any])
"""Types of settings whose values are not shown. Engine arguments may hold a token."""
_MOST_SHOWN_CHARACTERS = 100

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
            raise click.UsageError(_describe(error, settings_type)) from None
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
    text = " ".join(f"{field.description}".splitlines()) + f"  [{prefix}{name.upper()}]"
    default = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if field.default_factory is None and isinstance(default, (str, int, float)) and default != "":
        text += f"  [default: {default}]"
    return click.Option([f"--{name.replace('_', '-')}", name], help=text, metavar="VALUE")


def reasons(error: ValidationError, settings_type: type[BaseSettings]) -> list[tuple[str, str]]:
    """Return the name of each invalid setting, or nothing, and what is wrong with its value.

    Values of settings that may hold secrets are left out.
    """
    found = []
    for each in error.errors():
        name = ".".join(map(str, each["loc"]))
        reason, value = each["msg"].removeprefix("Value error, "), each["input"]
        field = settings_type.model_fields.get(name)
        # Not of an unknown setting: it may be a secret whose name is misspelled.
        is_public = field is not None and field.annotation not in _MAY_BE_SECRET
        if is_public and isinstance(value, (str, int, float)):
            reason += f". Given: {str(value)[:_MOST_SHOWN_CHARACTERS]!r}"
        found.append((name, reason))
    return found


def _describe(error: ValidationError, settings_type: type[BaseSettings]) -> str:
    return "\n".join(
        f"--{name.replace('_', '-')}: {reason}" if name else reason
        for name, reason in reasons(error, settings_type)
    )
