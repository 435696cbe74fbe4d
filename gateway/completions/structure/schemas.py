"""JSON schemas: checks of limits that the compiler lacks, and closed objects.

A closed object has only the properties that its schema names. A closed schema means what
`unevaluatedProperties: false` specifies, in keywords that the compiler has. Schemas that apply to
the same object (`allOf`, `anyOf`, `oneOf`, `$ref`) are closed with the names of each other, because
each closed one would otherwise reject the properties of the others.

The compiler reads all numbers as 64-bit floating-point numbers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from gateway.completions.structure import lark
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.limits import (
    MAX_CLOSING_STEPS,
    MAX_ITEMS,
    MAX_LENGTH,
    MAX_NESTING,
    MAX_PROPERTIES,
)

_BOUNDS: Final[Mapping[str, int]] = {
    "minItems": MAX_ITEMS,
    "maxItems": MAX_ITEMS,
    "minProperties": MAX_PROPERTIES,
    "maxProperties": MAX_PROPERTIES,
    "minLength": MAX_LENGTH,
    "maxLength": MAX_LENGTH,
}
_OPTIONS_KEY = "x-guidance"

_DATA: Final = frozenset({"const", "enum", "default", "examples"})
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NESTED: Final = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties"})
_ALTERNATIVES: Final = frozenset({"anyOf", "oneOf"})
_LARGEST_INTEGER: Final = 2**63 - 1
"""The largest integer in a range that the compiler supports. It reads it exactly."""
_LEAST_INTEGER: Final = 1024 - 2**63
_LARGEST_NUMBER: Final = 10**18
"""The largest bound of a range that is not of integers."""
_LARGEST_WITHOUT_GAPS: Final = 2**53
_LARGEST_FACTOR: Final = (2**32 - 10) // 10
"""The largest `multipleOf`, without its decimal point, for which the compiler does not overflow."""


def json_from_schema(schema: Any) -> str:
    """Return Lark for JSON that matches a decoded schema, which is an object or a boolean.

    Objects must have their properties in the schema's order, and only those that it names. The
    compiler rejects keywords that it cannot enforce. Unknown keywords have no effect, as JSON
    Schema specifies.
    """
    if isinstance(schema, bool):
        if not schema:
            raise RefusedError("the schema false matches nothing")
        return lark.json_value({})
    if not isinstance(schema, dict):
        raise RefusedError("a schema must be an object or a boolean")
    _check(schema)
    # With these options, a client could switch off the enforcement of keywords.
    schema = {key: value for key, value in schema.items() if key != _OPTIONS_KEY}
    return lark.json_value(closed(schema))


def _check(schema: dict[str, Any]) -> None:
    for value, depth in _nested(schema):
        if depth > MAX_NESTING:
            raise RefusedError(f"the schema must not be nested deeper than {MAX_NESTING} levels")
        for keyword, most in _BOUNDS.items() if isinstance(value, dict) else ():
            number = value.get(keyword)
            if isinstance(number, int | float) and number > most:
                raise RefusedError(f"'{keyword}' must be at most {most}. Given: {number}")


def _nested(root: Any) -> Iterator[tuple[Any, int]]:
    """Yield a JSON value and all values in it, with the depth of each, from 1."""
    pending = [(root, 1)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        if isinstance(value, dict | list):
            children = value.values() if isinstance(value, dict) else value
            pending += ((child, depth + 1) for child in children)


class _Names(NamedTuple):
    """Properties that schemas name; the keys of both mappings are ordered sets."""

    properties: Mapping[str, Any] = {}
    patterns: Mapping[str, Any] = {}
    is_open: bool = False
    """Whether a schema explicitly permits properties that it does not name."""


_NONE: Final = _Names()


def closed(schema: Any) -> Any:
    """Return a schema that permits only the properties that `schema` names.

    Unchanged are objects without `properties` and `patternProperties`, objects with
    `additionalProperties`, and invalid keywords, which the compiler rejects. Raises RefusedError if
    the result is too large or a `$ref` cannot be combined.
    """
    return _Closer(schema).closed(schema)


class _Closer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._names: dict[int, _Names] = {}
        self._replaced: list[str] = []
        """References that are being replaced by their targets, outermost first."""
        self._has_resources = False
        self._targets: set[int] = set()
        self._find_targets()

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
        if isinstance(schema.get("unevaluatedProperties"), bool):
            del result["unevaluatedProperties"]
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
            if keyword == "allOf" and _is_list(value):
                result["allOf"] = merged
                merged += [self.closed(each, next(contexts)) for each in value]
            elif keyword in _ALTERNATIVES and _is_list(value):
                context = next(contexts)
                result[keyword] = [self.closed(each, context) for each in value]
            elif keyword == "$ref" and (context := next(contexts)) != _NONE:
                result["allOf"] = merged
                merged.append(self._closed_target(value, context))
            else:
                result[keyword] = self._closed_within(keyword, exact(schema, keyword))
        return result

    def _closed_within(self, keyword: str, value: Any) -> Any:
        """Return the value of a keyword whose schemas, if any, apply to other values."""
        if keyword in _DATA:
            return value
        if keyword in _MAPS and isinstance(value, dict):
            return {name: self.closed(each) for name, each in value.items()}
        if keyword in _NESTED:
            return [self.closed(each) for each in value] if _is_list(value) else self.closed(value)
        return self._copied(value)

    def _copied(self, value: Any) -> Any:
        """Return the value of an unknown keyword; a schema in it is closed if it is a target."""
        if id(value) in self._targets:
            return self.closed(value)
        if isinstance(value, dict):
            return {key: self._copied(each) for key, each in value.items()}
        return [self._copied(each) for each in value] if isinstance(value, list) else value

    def _closed_target(self, ref: Any, context: _Names) -> Any:
        target = self._target(ref)
        if target is None:
            raise RefusedError(
                "a '$ref' beside other properties must be the JSON pointer of a schema in the same "
                f"document, such as '#/$defs/x'. Given: {str(ref)[:80]!r}"
            )
        if ref in self._replaced:
            raise RefusedError(f"the '$ref' {ref[:80]!r} refers to itself")
        self._replaced.append(ref)
        result = self.closed(target, context)
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
            elif keyword == "allOf" and _is_list(value):
                names += map(self._names_of, value)
            elif keyword in _ALTERNATIVES and _is_list(value):
                names.append(self._union(map(self._names_of, value)))
            elif keyword == "$ref":
                names.append(self._names_of(self._target(value)))
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

    def _target(self, ref: Any) -> Any:
        """Return the schema that a reference points to; None if it is not found that way."""
        if not isinstance(ref, str) or self._has_resources or ref[:2] not in ("#", "#/"):
            return None
        found: Any = self._root
        _, *keys = unquote(ref[1:]).split("/")
        for key in keys:
            name = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None
        return found if isinstance(found, dict) else None

    def _find_targets(self) -> None:
        refs: set[str] = set()
        for value, depth in _nested(self._root):
            if isinstance(value, dict):
                if isinstance(ref := value.get("$ref"), str):
                    refs.add(ref)
                # References in a resource with its own URI are relative to that resource.
                self._has_resources |= depth > 1 and isinstance(value.get("$id"), str)
        self._targets = {id(target) for ref in refs if (target := self._target(ref)) is not None}

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_CLOSING_STEPS:
            raise RefusedError("too complex: its compositions name too many properties")


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_closing(schema: dict[str, Any]) -> bool:
    if "additionalProperties" in schema:
        return False
    names = "properties" in schema or "patternProperties" in schema
    return names or schema.get("unevaluatedProperties") is False


def _own_names(schema: dict[str, Any]) -> _Names:
    properties, patterns, required = (
        schema.get(keyword) for keyword in ("properties", "patternProperties", "required")
    )
    names = dict.fromkeys(properties if isinstance(properties, dict) else ())
    if isinstance(required, list):
        names |= dict.fromkeys(name for name in required if isinstance(name, str))
    # Listed values say completely which properties they have.
    is_listed = "const" in schema or "enum" in schema
    is_open = is_listed or schema.get("additionalProperties", False) is not False
    return _Names(
        names,
        dict.fromkeys(patterns if isinstance(patterns, dict) else ()),
        is_open or schema.get("unevaluatedProperties") is True,
    )


def _close(schema: dict[str, Any], own: _Names, beside: _Names) -> None:
    properties = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return
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


def exact(schema: dict[str, Any], keyword: str) -> Any:
    """Return a keyword's value, unless the compiler would read another number.

    Bounds beyond the largest ones that the compiler supports become these, as in the ranges of
    64-bit integers that generators write: the range gets smaller. Raises RefusedError for other
    numbers.
    """
    value = schema[keyword]
    if keyword in {"const", "enum"}:
        for each, _ in _nested(value):
            if isinstance(each, int) and not isinstance(each, bool):
                _check_exact(keyword, each, most=_LARGEST_INTEGER)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return value
    elif keyword == "multipleOf":
        _, digits, exponent = Decimal(str(value)).as_tuple()
        factor = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
        if factor > _LARGEST_FACTOR:
            raise RefusedError(f"'multipleOf' must be at most {_LARGEST_FACTOR}. Given: {value}")
    elif keyword in {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}:
        return _exact_bound(schema, keyword, value)
    return value


def _exact_bound(schema: dict[str, Any], keyword: str, value: float) -> float:
    types = schema.get("type")
    is_integer = types == "integer" or (isinstance(types, list) and "number" not in types)
    most = _LARGEST_INTEGER if is_integer else _LARGEST_NUMBER
    least = _LEAST_INTEGER if is_integer else -_LARGEST_NUMBER
    is_lower = keyword.endswith("inimum")
    if (value < least) if is_lower else (value > most):
        return least if is_lower else most
    if "excl" in keyword or schema.get(f"exclusive{keyword.capitalize()}") is True:
        # The compiler adds one to a lower bound of integers, and subtracts one from an upper one.
        most = _LARGEST_WITHOUT_GAPS - ((value > 0) is is_lower)
    if is_integer or isinstance(value, int):
        _check_exact(keyword, value, most=most)
    return value


def check_numbers(schema: Any) -> None:
    """Raise RefusedError for a number of a schema that the compiler would read as another one."""
    for value, _ in _nested(schema):
        for keyword, given in value.items() if isinstance(value, dict) else ():
            if (end := exact(value, keyword)) != given:
                raise RefusedError(f"'{keyword}' cannot be beyond {end}. Given: {given}")


def _check_exact(keyword: str, number: float, *, most: int) -> None:
    if abs(number) > most or (float(number) != number and number != _LARGEST_INTEGER):
        raise RefusedError(
            f"the compiler does not read the integer {number} of '{keyword}' exactly: it must be "
            f"from -{(end := min(most, _LARGEST_WITHOUT_GAPS))} to {end}, or a string"
        )
