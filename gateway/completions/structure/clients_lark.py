"""Client grammars in llguidance's own languages: Lark and JSON."""

import json
import re
from typing import Any

from contract.grammar import MAX_GRAMMAR_CHARACTERS
from gateway.completions.structure import lark
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.numbers import check_numbers
from gateway.completions.structure.schemas import Schemas
from gateway.records.errors import shown

_OPTIONS_LINE = re.compile(r"^\s*%llguidance\s*\{[^\n]*\}[ \t]*$", re.MULTILINE)
_DECODER = json.JSONDecoder()
_KINDS = {"lark_grammar", "json_schema"}
_TOKENS = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?://|#)[^\n]*|@(?P<name>[\w-]+)|(?P<json>%json)\s*',
    re.ASCII | re.DOTALL,
)
"""Strings, regular expressions and comments of Lark, and what is outside of them: references to
grammars, and the beginnings of schemas."""
_START = re.compile(r"^\s*\??start\s*(?:\[[^\]\n]*\]\s*)?:", re.MULTILINE)


def from_lark(source: str) -> str:
    """Return a client's Lark grammar with the gateway's options instead of the client's."""
    if not _START.search(source):
        raise RefusedError("a Lark grammar must have a rule 'start'")
    for found in _TOKENS.finditer(source):
        if found["json"]:
            try:
                schema, _ = _DECODER.raw_decode(source, found.end())
            except json.JSONDecodeError:
                break  # The compiler names what is no JSON.
            except RecursionError:
                raise RefusedError("a schema in the grammar is nested too deeply") from None
            check_numbers(schema)
    return lark.HEADER + _OPTIONS_LINE.sub("", source)


def from_llguidance(source: Any, place: str) -> str:
    """Return Lark for llguidance's JSON, or for a string that is already Lark.

    The first grammar is the start; Lark grammars refer to others by `@name`. Each reference is
    replaced by the grammar, so references cannot be circular. Errors name `place`, the source's
    place in the body, or a grammar in it.
    """
    grammars = llguidance_grammars(source, place)
    return grammars[f"{place}.grammars[0]"] if grammars else from_lark(source)


def llguidance_grammars(source: Any, place: str) -> dict[str, str]:
    """Return Lark for each grammar in llguidance's JSON, by its place in the body.

    A grammar comes after those that it refers to. There are none if the source is already Lark.
    """
    if isinstance(source, str):
        if not source.lstrip().startswith("{"):
            return {}
        source = _decoded(source)
    grammars = source.get("grammars") if isinstance(source, dict) else None
    if not isinstance(grammars, list) or not grammars:
        raise RefusedError("it must be a list of grammars, at least one", param=f"{place}.grammars")
    return _Grammars(grammars, f"{place}.grammars").documents()


def _decoded(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        raise RefusedError("the grammar begins with '{' but is not valid JSON") from None


class _Grammars:
    """Grammars that refer to each other by name."""

    def __init__(self, grammars: list[Any], place: str) -> None:
        self._grammars = grammars
        self._place = place
        self._expressions: dict[int, str] = {}
        self._pending: list[int] = []
        """Grammars whose references are being replaced, outermost first."""
        self._indexes: dict[str, int] = {}
        for index, grammar in enumerate(grammars):
            name = grammar.get("name") if isinstance(grammar, dict) else None
            if name is not None and self._indexes.setdefault(str(name), index) != index:
                raise self._refused(index, f"another grammar has the name {shown(name)}", ".name")

    def documents(self) -> dict[str, str]:
        """Return Lark for each grammar, by its place, after those that it refers to."""
        for index in range(len(self._grammars)):
            self._expression(index)
        return {
            f"{self._place}[{index}]": lark.document(expression)
            for index, expression in self._expressions.items()
        }

    def _expression(self, index: int) -> str:
        if index not in self._expressions:
            self._pending.append(index)
            self._expressions[index] = self._read(index)
            self._pending.pop()
        return self._expressions[index]

    def _read(self, index: int) -> str:
        grammar = self._grammars[index]
        kinds = _KINDS & grammar.keys() if isinstance(grammar, dict) else ()
        if len(kinds) != 1:
            raise self._refused(
                index, "it must be an object with either 'lark_grammar' or 'json_schema'"
            )
        (kind,) = kinds
        try:
            if kind == "json_schema":
                return Schemas().json(grammar[kind], f"{self._place}[{index}].{kind}")
            if not isinstance(text := grammar[kind], str):
                raise RefusedError(f"it must be a string. Given: {shown(text)}")
            return lark.block(self._with_references(from_lark(text)))
        except RefusedError as error:
            raise self._refused(index, str(error), f".{kind}", error.param) from None

    def _with_references(self, text: str) -> str:
        names = [found["name"] for found in _TOKENS.finditer(text) if found["name"]]
        for name in names:
            if name not in self._indexes:
                raise RefusedError(f"no grammar has the name of '@{name}'")
            if self._indexes[name] in self._pending:
                raise RefusedError(f"'@{name}' refers to a grammar that refers to this one")
        length = len(text) + sum(len(self._expression(self._indexes[name])) for name in names)
        if length > MAX_GRAMMAR_CHARACTERS:
            raise RefusedError(
                f"with the grammars that it refers to, it must have at most "
                f"{MAX_GRAMMAR_CHARACTERS} characters. Given: {length}"
            )
        return _TOKENS.sub(self._replaced, text)

    def _replaced(self, token: re.Match[str]) -> str:
        name = token["name"]
        return self._expression(self._indexes[name]) if name else token[0]

    def _refused(self, index: int, reason: str, within: str = "", param: str = "") -> RefusedError:
        return RefusedError(reason, param=param or f"{self._place}[{index}]{within}")
