"""Jinja environment for chat templates, with the extensions of transformers."""

import json
from collections import UserDict
from collections.abc import Callable
from secrets import token_hex
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

_OF_DICTS: Final = frozenset(dir(dict))
"""Attributes of an object of JSON, which come before its members."""
_OF_LOOPS: Final = frozenset({"first", "last", "index", "index0", "length"})


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


class WrittenArguments(UserDict[str, Any]):
    """Arguments of a call as the model wrote them.

    Templates write this text wherever they write JSON. Those that write each argument get the
    values; if the text is no JSON object, it is the only one, `arguments`.
    """

    def __init__(self, text: str, values: dict[str, Any] | None = None) -> None:
        super().__init__({"arguments": text} if values is None else values)
        self._text = text

    @override
    def __str__(self) -> str:
        return self._text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - what templates give by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - likewise
) -> str:
    written: dict[str, str] = {}

    def mark(value: object) -> str:
        if not isinstance(value, WrittenArguments):
            raise TypeError(f"{type(value).__name__} is not JSON serializable")
        written[marked := token_hex()] = str(value)
        return marked

    # Jinja's own filter escapes HTML special characters.
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=mark,
    )
    for marked, arguments in written.items():
        text = text.replace(f'"{marked}"', arguments)
    return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a direct way to what templates read most; no other value is read so."""

    @override
    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICTS and attribute in obj:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


ENVIRONMENT: Final = _environment()
"""Compiles templates. `strftime_now` is a variable, so that each request has its own clock."""
