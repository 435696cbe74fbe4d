"""A chat template that renders messages to text."""

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from secrets import token_hex
from typing import Any, Final, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes

from gateway.completions.prompt.templates.environment import ENVIRONMENT

MAX_RENDER_SECONDS: Final = 5.0
"""Time limit; rendering stops at the next piece of text after it."""
MAX_REASON_CHARACTERS: Final = 500

_CLOCK: Final = "strftime_now"
_OPENS: Final = "add_generation_prompt"
_OPENING: Final = f"OPENING_{token_hex()}"
"""Written before the text that begins a response."""


class WrongTemplateError(Exception):
    """The template has invalid syntax; the message is for its author."""


class RefusedMessagesError(Exception):
    """The template rejects these messages. The message is for the client."""


class TooLongError(Exception):
    """The text exceeds its maximum number of characters."""


class Rendered(NamedTuple):
    """What a template renders."""

    text: str
    opening: str | None
    """The end of the text that begins a response: without `add_generation_prompt`, the template
    renders what is before it. None if only rendering both shows where that is."""


class ChatTemplate:
    """A compiled template. Any thread may render it."""

    def __init__(self, source: str) -> None:
        """Compile a template. Raises WrongTemplateError."""
        try:
            tree = ENVIRONMENT.parse(source)
            variables = meta.find_undeclared_variables(tree)
            self._mark_size = _mark_opening(tree)
            self._template = ENVIRONMENT.from_string(tree)
        except TemplateSyntaxError as error:
            raise WrongTemplateError(f"line {error.lineno}: {error.message}") from None
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            # Jinja compiles a template to Python, which has its own rules about nesting and names.
            raise WrongTemplateError(_described(error)) from None
        self.variables: Final = variables - {_CLOCK, *ENVIRONMENT.globals}
        """The variables that the template reads and does not set itself."""
        self.has_developer_role: Final = '"developer"' in source or "'developer'" in source
        """Whether the template handles the role of that name."""
        self.source: Final = source

    def render(self, variables: Mapping[str, Any], *, now: datetime, most_characters: int) -> str:
        """Return the text of `render_opening`."""
        return self.render_opening(variables, now=now, most_characters=most_characters).text

    def render_opening(
        self, variables: Mapping[str, Any], *, now: datetime, most_characters: int
    ) -> Rendered:
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
            text = "".join(_bounded(pieces, most_characters + (self._mark_size or 0)))
            before, _, opening = text.partition(_OPENING)
            return Rendered(before + opening, None if self._mark_size is None else opening)
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


def _mark_opening(tree: nodes.Template) -> int | None:
    """Write a mark before the text that begins a response, if it is known where that is.

    It is if the template reads the variable only to decide whether it renders its last node: what
    is before this node does not depend on it. A template that never reads it has no such text.
    Returns the characters of the mark, or None if it is unknown.
    """
    names = [each for each in tree.find_all(nodes.Name) if each.name == _OPENS]
    last = tree.body[-1] if tree.body else None
    if not names or not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return None if names else 0
    conditions = [*_conditions(last.test)]
    deciding = [each for each in conditions if isinstance(each, nodes.Name) and each in names]
    tests = [each.node for each in conditions if isinstance(each, nodes.Test)]
    if len(names) != sum(each in names for each in [*deciding, *tests]) or not deciding:
        return None
    last.body.insert(0, nodes.Output([nodes.TemplateData(_OPENING)]))
    return len(_OPENING)


def _conditions(test: nodes.Node) -> Iterator[nodes.Node]:
    """Return the conditions that must all be true."""
    if isinstance(test, nodes.And):
        yield from _conditions(test.left)
        yield from _conditions(test.right)
    else:
        yield test


def _described(error: Exception) -> str:
    return _shortened(f"{type(error).__name__}: {error}")


def _shortened(reason: str) -> str:
    return reason[:MAX_REASON_CHARACTERS]
