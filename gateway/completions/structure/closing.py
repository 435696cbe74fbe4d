"""Close JSON schemas: their objects have only the properties that the schemas name.

A closed schema means what `unevaluatedProperties: false` specifies, in keywords that the compiler
has. Schemas that apply to the same object (`allOf`, `anyOf`, `oneOf`, `$ref`) are closed with the
names of each other, because each closed one would otherwise reject the properties of the others.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.limits import MAX_CLOSING_STEPS
from gateway.completions.structure.splitting import ALSO_NAMED

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs"})
_NESTED: Final = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties"})
_ALTERNATIVES: Final = frozenset({"anyOf", "oneOf"})


class _Names(NamedTuple):
    """Properties that schemas name; the keys of both mappings are ordered sets."""

    properties: Mapping[str, Any] = {}
    patterns: Mapping[str, Any] = {}
    is_open: bool = False
    """Whether a schema explicitly permits properties that it does not name."""


_NONE: Final = _Names()


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that permits only the properties that `schema` names.

    `schema` is the enforced part of a client's schema. Unchanged are objects without `properties`
    and `patternProperties`, and objects with `additionalProperties`. Raises RefusedError if the
    result is too large or a `$ref` cannot be combined.
    """
    result: dict[str, Any] = _Closer(schema).closed(schema)
    return result


class _Closer:
    def __init__(self, root: dict[str, Any]) -> None:
        definitions = root.get("$defs", {})
        self._targets = {f"#/$defs/{name}": each for name, each in definitions.items()}
        self._steps = 0
        self._names: dict[int, _Names] = {}
        self._replaced: list[str] = []
        """References that are being replaced by their targets, outermost first."""

    def closed(self, schema: Any, context: _Names = _NONE) -> Any:
        """Return a closed schema. `context` has the names of others that apply to its object."""
        if not isinstance(schema, dict):
            return schema
        self._count(1 + len(context.properties))
        names, place = self._names_of_parts(schema)
        contexts = [
            self._union([context, *names[:index], *names[index + 1 :]])
            for index in range(len(names))
        ]
        own, beside = names[place], contexts.pop(place)
        result = self._with_closed_parts(schema, iter(contexts))
        for keyword in ("unevaluatedProperties", ALSO_NAMED):
            result.pop(keyword, None)
        if _is_closing(schema) and not own.is_open and not beside.is_open:
            _close(result, own, beside)
        return result

    def _with_closed_parts(
        self, schema: dict[str, Any], contexts: Iterator[_Names]
    ) -> dict[str, Any]:
        """Return a copy with everything closed that it contains, and with contexts for its parts.

        A reference with a context is replaced by its target, since other references to the target
        have other contexts.
        """
        result: dict[str, Any] = {}
        merged: list[Any] = []
        for keyword, value in schema.items():
            if keyword == "allOf":
                result["allOf"] = merged
                merged += [self.closed(each, next(contexts)) for each in value]
            elif keyword in _ALTERNATIVES:
                context = next(contexts)
                result[keyword] = [self.closed(each, context) for each in value]
            elif keyword == "$ref" and (context := next(contexts)) != _NONE:
                result["allOf"] = merged
                merged.append(self._closed_target(value, context))
            else:
                result[keyword] = self._closed_within(keyword, value)
        return result

    def _closed_within(self, keyword: str, value: Any) -> Any:
        """Return the value of a keyword whose schemas, if any, apply to other values."""
        if keyword in _MAPS:
            return {name: self.closed(each) for name, each in value.items()}
        if keyword in _NESTED:
            is_list = isinstance(value, list)
            return [self.closed(each) for each in value] if is_list else self.closed(value)
        return value

    def _closed_target(self, ref: str, context: _Names) -> Any:
        if ref in self._replaced:
            raise RefusedError("a '$ref' beside other properties refers to itself")
        self._replaced.append(ref)
        result = self.closed(self._targets[ref], context)
        self._replaced.pop()
        return result

    def _names_of_parts(self, schema: dict[str, Any]) -> tuple[list[_Names], int]:
        """Return the names of each part that applies to the same object, and the own names' place.

        The order is that of the keywords, because the compiler keeps it for properties.
        """
        names: list[_Names] = []
        place = 0
        for keyword, value in schema.items():
            if keyword == "properties":
                place = len(names)
            elif keyword == "allOf":
                names += map(self._names_of, value)
            elif keyword in _ALTERNATIVES:
                names.append(self._union(map(self._names_of, value)))
            elif keyword == "$ref":
                names.append(self._names_of(self._targets[value]))
        names.insert(place, _own_names(schema))
        return names, place

    def _names_of(self, schema: Any) -> _Names:
        if not isinstance(schema, dict):
            return _NONE
        if id(schema) not in self._names:
            # A schema that refers to itself adds no names.
            self._names[id(schema)] = _NONE
            self._names[id(schema)] = self._union(self._names_of_parts(schema)[0])
        return self._names[id(schema)]

    def _union(self, names: Iterable[_Names]) -> _Names:
        properties: dict[str, Any] = {}
        patterns: dict[str, Any] = {}
        is_open = False
        for each in names:
            self._count(1 + len(each.properties) + len(each.patterns))
            properties |= each.properties
            patterns |= each.patterns
            is_open |= each.is_open
        return _Names(properties, patterns, is_open)

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_CLOSING_STEPS:
            raise RefusedError("too complex: its compositions name too many properties")


def _is_closing(schema: dict[str, Any]) -> bool:
    if "additionalProperties" in schema:
        return False
    names = "properties" in schema or "patternProperties" in schema
    return names or schema.get("unevaluatedProperties") is False


def _own_names(schema: dict[str, Any]) -> _Names:
    named = (schema.get(keyword, ()) for keyword in ("properties", "required", ALSO_NAMED))
    names = dict.fromkeys(name for each in named for name in each)
    # Listed values say completely which properties they have.
    is_listed = "const" in schema or "enum" in schema
    is_open = is_listed or schema.get("additionalProperties", False) is not False
    return _Names(
        names,
        dict.fromkeys(schema.get("patternProperties", ())),
        is_open or schema.get("unevaluatedProperties") is True,
    )


def _close(schema: dict[str, Any], own: _Names, beside: _Names) -> None:
    properties = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    others = (
        name
        for name in (*own.properties, *beside.properties)
        if name not in properties and not any(_matches(each, name) for each in patterns)
    )
    schema["properties"] = {**properties, **dict.fromkeys(others, True)}
    if beside.patterns:
        schema["patternProperties"] = {**dict.fromkeys(beside.patterns, True), **patterns}
    schema["additionalProperties"] = False


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False
