"""A chat template that renders messages to text."""

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError, meta

from gateway.completions.prompt.templates.environment import ENVIRONMENT

MAX_RENDER_SECONDS: Final = 5.0
"""Time limit; rendering stops at the next piece of text after it."""
MAX_REASON_CHARACTERS: Final = 500

_CLOCK: Final = "strftime_now"


class WrongTemplateError(Exception):
    """The template has invalid syntax; the message is for its author."""


class RefusedMessagesError(Exception):
    """The template rejects these messages. The message is for the client."""


class TooLongError(Exception):
    """The text exceeds its maximum number of characters."""


class ChatTemplate:
    """A compiled template. Any thread may render it."""

    def __init__(self, source: str) -> None:
        """Compile a template. Raises WrongTemplateError."""
        try:
            tree = ENVIRONMENT.parse(source)
            self._template = ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as error:
            raise WrongTemplateError(f"line {error.lineno}: {error.message}") from None
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            # Jinja compiles a template to Python, which has its own rules about nesting and names.
            raise WrongTemplateError(_described(error)) from None
        self.variables: Final = meta.find_undeclared_variables(tree) - {
            _CLOCK,
            *ENVIRONMENT.globals,
        }
        """The variables that the template reads and does not set itself."""
        self.has_developer_role: Final = '"developer"' in source or "'developer'" in source
        """Whether the template handles the role of that name."""
        self.source: Final = source

    def render(self, variables: Mapping[str, Any], *, now: datetime, most_characters: int) -> str:
        """Return the text for these variables.

        Args:
            variables: `messages`, `tools`, `add_generation_prompt` and any other variable that the
                template reads.
            now: The time that the template gets from `strftime_now`.
            most_characters: Maximum length of the text.

        Raises:
            RefusedMessagesError: The template raises an error or takes too long.
            TooLongError: The text is too long.
        """
        pieces = self._template.generate(**{**variables, _CLOCK: now.strftime})
        try:
            return "".join(_bounded(pieces, most_characters))
        except (RefusedMessagesError, TooLongError):
            raise
        except MemoryError:
            raise TooLongError from None
        except TemplateError as error:
            raise RefusedMessagesError(_shortened(error.message or "no reason given")) from None
        except Exception as error:  # A template's expression may raise any error.
            raise RefusedMessagesError(_described(error)) from None


def _bounded(pieces: Iterator[str], most_characters: int) -> Iterator[str]:
    characters, end = 0, time.monotonic() + MAX_RENDER_SECONDS
    for piece in pieces:
        characters += len(piece)
        if characters > most_characters:
            raise TooLongError
        if time.monotonic() > end:
            raise RefusedMessagesError("it takes too long")
        yield piece


def _described(error: Exception) -> str:
    return _shortened(f"{type(error).__name__}: {error}")


def _shortened(reason: str) -> str:
    return reason[:MAX_REASON_CHARACTERS]
