"""Split JSON schemas into what the compiler enforces and what it cannot.

The result has only keywords that the compiler has, with values that it reads exactly. Annotations,
unknown keywords and unknown values of `format`, which is an annotation, have no effect. All
references point to `#/$defs/N`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.limits import (
    MAX_ITEMS,
    MAX_LENGTH,
    MAX_NESTING,
    MAX_PATH_CHARACTERS,
    MAX_PROPERTIES,
)
from gateway.completions.structure.numbers import exact
from gateway.completions.structure.patterns import translated
from gateway.records.errors import shown

Schema = dict[str, Any] | bool
"""A schema that was split; `$defs` is in the outermost one."""

ALSO_NAMED: Final = "x-also-named"
"""Keyword of a result: properties that are named by parts which are not enforced."""

_TYPES: Final = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
_FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
"""The formats that the compiler enforces."""
_SIZES: Final[Mapping[str, int]] = {
    "minItems": MAX_ITEMS,
    "maxItems": MAX_ITEMS,
    "minProperties": MAX_PROPERTIES,
    "maxProperties": MAX_PROPERTIES,
    "minLength": MAX_LENGTH,
    "maxLength": MAX_LENGTH,
}
_ANY_OF_OBJECTS: Final = "Use 'anyOf' of schemas with all their 'properties'"
_LACKING: Final[Mapping[str, str]] = {
    "contains": "Describe all 'items', or the first ones with 'prefixItems'",
    "dependencies": _ANY_OF_OBJECTS,
    "dependentRequired": _ANY_OF_OBJECTS,
    "dependentSchemas": _ANY_OF_OBJECTS,
    "if": _ANY_OF_OBJECTS,
    "not": "List what is permitted with 'enum' or 'anyOf', such as permitted 'properties'",
    "propertyNames": "Name the keys with 'properties' or 'patternProperties'",
    "unevaluatedItems": "Use 'items'",
    "unevaluatedProperties": "Use 'additionalProperties'",
    "uniqueItems": "Use 'maxItems', or an object with boolean 'properties'",
    "$dynamicRef": "Use '$ref'",
    "$recursiveRef": "Use '$ref'",
}
"""Keywords that the compiler lacks, with what to use instead."""
_NO_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": ({},),
    "uniqueItems": (False,),
}
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_$-]{1,64}")
_DESCRIBED: Final = frozenset({"$ref", "description", "title"})


class Unenforced(NamedTuple):
    """A part of a schema that is not enforced."""

    path: str
    """Its place in the schema, such as `.properties.to.pattern`."""
    reason: str


class Split(NamedTuple):
    """The enforced part of a schema, and what is missing from it."""

    schema: dict[str, Any]
    unenforced: list[Unenforced]
    places: list[str]
    """Paths in the client's schema of the definitions in `$defs`."""


def split(schema: Any) -> Split:
    """Return what is enforced of a decoded schema.

    Raises RefusedError for a schema that no JSON, or only endless JSON, can match.
    """
    if schema is False:
        raise RefusedError("the schema false matches nothing", is_final=True)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RefusedError("a schema must be an object or a boolean")
    return _Splitter(schema).split()


class _Documents:
    """The schemas in a document by their URIs."""

    def __init__(self, root: Any) -> None:
        self._documents: dict[str, tuple[Any, str]] = {"": (root, "")}
        self._anchors: dict[str, tuple[Any, str]] = {}
        self._bases: dict[int, str] = {}
        pending = [(root, "", "", 1)]
        while pending:
            value, path, base, depth = pending.pop()
            if depth > MAX_NESTING:
                raise RefusedError(
                    f"the schema must not be nested deeper than {MAX_NESTING} levels"
                )
            if isinstance(value, dict):
                base = self._add(value, path, base)
                pending += (
                    (each, within(path, name), base, depth + 1) for name, each in value.items()
                )
            elif isinstance(value, list):
                pending += (
                    (each, f"{path}[{index}]", base, depth + 1) for index, each in enumerate(value)
                )

    def find(self, schema: dict[str, Any], ref: str) -> tuple[Any, str] | None:
        """Return the schema to which a reference in `schema` points, and its path."""
        uri = _joined(self._bases.get(id(schema), ""), ref)
        document, fragment = urldefrag(uri)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(uri)
        if (found := self._documents.get(document)) is None:
            return None
        value, path = found
        for key in unquote(fragment).split("/")[1:] if fragment != "/" else ():
            name = key.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value, path = value[int(name)], f"{path}[{name}]"
            elif isinstance(value, dict) and name in value:
                value, path = value[name], within(path, name)
            else:
                return None
        return (value, path) if isinstance(value, bool | dict) else None

    def _add(self, value: dict[str, Any], path: str, base: str) -> str:
        """Note the names of a schema. Return the URI to which its references are relative."""
        if isinstance(own := value.get("$id"), str):
            uri = _joined(base, own)
            document, fragment = urldefrag(uri)
            if fragment:
                self._anchors[uri] = value, path
            else:
                base = document
                self._documents[base] = value, path
        if isinstance(anchor := value.get("$anchor"), str):
            self._anchors[f"{base}#{anchor}"] = value, path
        if base:
            self._bases[id(value)] = base
        return base


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:
        return uri


def within(path: str, name: str) -> str:
    """Return the path of what has a name in an object, in characters that every header can have."""
    if len(path) > MAX_PATH_CHARACTERS:
        return path
    return f"{path}.{name if _PLAIN_NAME.fullmatch(name) else '*'}"


class _Splitter:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._documents = _Documents(root)
        self._unenforced: list[Unenforced] = []
        self._numbers: dict[int, int] = {}
        """Numbers of the targets of references, in `$defs`."""
        self._targets: list[tuple[Any, str]] = []
        self._inlined: dict[int, Schema] = {}

    def split(self) -> Split:
        schema = self._object(self._root, "")
        definitions = dict[str, Schema]()
        while len(definitions) < len(self._targets):
            target, path = self._targets[len(definitions)]
            definitions[str(len(definitions))] = self._schema(target, path)
        places = [path for _, path in self._targets]
        if definitions:
            schema["$defs"] = definitions
            _check_ends(definitions, places)
        return Split(schema, self._unenforced, places)

    def _schema(self, schema: Any, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._drop(path, "it must be an object or a boolean")
            return True
        return self._object(schema, path)

    def _object(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lost: list[str] = []
        for keyword, value in schema.items():
            if not _has_effect(schema, keyword, value):
                continue
            place = within(path, keyword)
            try:
                result[keyword] = self._enforced(schema, keyword, value, place)
            except RefusedError as error:
                self._drop(place, str(error))
                lost.append(keyword)
        if "patternProperties" in lost:
            result["additionalProperties"] = True
        if also_named := [*_named_by_parts(schema, lost)]:
            result[ALSO_NAMED] = also_named
        return result

    def _enforced(self, schema: dict[str, Any], keyword: str, value: Any, place: str) -> Any:
        """Return what is enforced of a keyword's value. Raise RefusedError if that is nothing."""
        match keyword:
            case "$ref":
                return self._reference(schema, value)
            case "properties" | "patternProperties":
                read = translated if keyword == "patternProperties" else str
                return {
                    read(name): self._schema(each, within(place, name))
                    for name, each in _object(keyword, value).items()
                }
            case "allOf" | "anyOf" | "oneOf" | "prefixItems":
                return self._listed(keyword, value, place)
            case "items" | "additionalItems" | "additionalProperties":
                is_list = isinstance(value, list)
                return (
                    self._listed(keyword, value, place) if is_list else self._schema(value, place)
                )
            case "unevaluatedProperties" if isinstance(value, bool):
                return value
            case _ if keyword in _LACKING:
                raise RefusedError(f"'{keyword}' cannot be enforced. {_LACKING[keyword]}")
            case _:
                return _VALUES[keyword](schema, keyword)

    def _listed(self, keyword: str, value: Any, place: str) -> list[Schema]:
        if not isinstance(value, list) or (not value and keyword in _COMPOSITIONS):
            raise RefusedError(f"'{keyword}' must be a list of at least one schema")
        read = self._alternative if keyword == "oneOf" else self._schema
        return [read(each, f"{place}[{index}]") for index, each in enumerate(value)]

    def _alternative(self, schema: Any, path: str) -> Schema:
        """Return an alternative of `oneOf`, with the target of a mere reference in its place.

        The compiler does not look at the targets when it proves that alternatives do not overlap.
        """
        is_reference = isinstance(schema, dict) and "$ref" in schema and schema.keys() <= _DESCRIBED
        found = None
        if is_reference and isinstance(schema["$ref"], str):
            found = self._documents.find(schema, schema["$ref"])
        if found is None or found[0] is self._root:
            return self._schema(schema, path)
        target, place = found
        if id(target) not in self._inlined:
            # What refers to itself remains a reference.
            self._inlined[id(target)] = {"$ref": self._reference(schema, schema["$ref"])}
            self._inlined[id(target)] = self._alternative(target, place)
        return self._inlined[id(target)]

    def _reference(self, schema: dict[str, Any], ref: Any) -> str:
        found = self._documents.find(schema, ref) if isinstance(ref, str) else None
        if found is None:
            raise RefusedError(
                "'$ref' must point to a schema in the same document, such as '#/$defs/x'. Given: "
                f"{shown(ref)}"
            )
        number = self._numbers.setdefault(id(found[0]), len(self._targets))
        if number == len(self._targets):
            self._targets.append(found)
        return f"#/$defs/{number}"

    def _drop(self, path: str, reason: str) -> None:
        self._unenforced.append(Unenforced(path, reason))


def _object(keyword: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(keyword, "an object", value)
    return value


def _type(schema: dict[str, Any], keyword: str) -> Any:
    value = schema[keyword]
    types = value if isinstance(value, list) else [value]
    if not types or not all(isinstance(each, str) and each in _TYPES for each in types):
        raise _wrong(keyword, f"one or several of {', '.join(sorted(_TYPES))}", value)
    return value


def _enum(schema: dict[str, Any], keyword: str) -> Any:
    if not isinstance(value := schema[keyword], list) or not value:
        raise _wrong(keyword, "a list of at least one value", value)
    return exact(schema, keyword)


def _required(schema: dict[str, Any], keyword: str) -> Any:
    value = schema[keyword]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(keyword, "a list of names of 'properties'", value)
    return value


def _pattern(schema: dict[str, Any], keyword: str) -> str:
    if not isinstance(value := schema[keyword], str):
        raise _wrong(keyword, "a string", value)
    return translated(value)


def _size(schema: dict[str, Any], keyword: str) -> int:
    value, most = schema[keyword], _SIZES[keyword]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0 or value % 1:
        raise _wrong(keyword, "an integer of at least 0", value)
    if value > most:
        raise _wrong(keyword, f"at most {most}", value)
    return int(value)


def _wrong(keyword: str, rule: str, value: Any) -> RefusedError:
    return RefusedError(f"'{keyword}' must be {rule}. Given: {shown(value)}")


_VALUES: Final[Mapping[str, Callable[[dict[str, Any], str], Any]]] = {
    "type": _type,
    "enum": _enum,
    "required": _required,
    "pattern": _pattern,
    "format": lambda schema, keyword: schema[keyword],
    **dict.fromkeys(("const", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"), exact),
    "multipleOf": exact,
    **dict.fromkeys(_SIZES, _size),
}
"""Functions that return the value of a keyword that contains no schema."""
_COMPOSITIONS: Final = frozenset({"allOf", "anyOf", "oneOf"})
_KEYWORDS: Final = (
    _VALUES.keys()
    | _LACKING.keys()
    | _COMPOSITIONS
    | {
        *("$ref", "properties", "patternProperties", "additionalProperties"),
        *("items", "prefixItems", "additionalItems"),
    }
)


def _has_effect(schema: dict[str, Any], keyword: str, value: Any) -> bool:
    """Whether a keyword limits what matches. Generators write null for what is absent."""
    if keyword not in _KEYWORDS or (value is None and keyword != "const"):
        return False
    if keyword == "format":
        return isinstance(value, str) and value in _FORMATS
    if keyword == "if":
        return any(schema.get(each) not in (None, True, {}) for each in ("then", "else"))
    return keyword not in _LACKING or value not in _NO_EFFECT.get(keyword, (True, {}))


def _named_by_parts(schema: dict[str, Any], keywords: list[str]) -> Iterator[str]:
    """Yield the properties that parts name which are not enforced."""
    parts: list[Any] = []
    if "if" in keywords:
        parts += [schema.get("then"), schema.get("else")]
    for keyword in ("dependentSchemas", "dependencies"):
        if keyword in keywords and isinstance(schema[keyword], dict):
            parts += schema[keyword].values()
    for part in parts:
        for member in ("properties", "required") if isinstance(part, dict) else ():
            yield from (each for each in part.get(member) or () if isinstance(each, str))


def _check_ends(definitions: Mapping[str, Schema], places: list[str]) -> None:
    """Raise RefusedError for a definition that only endless JSON can match."""
    ending: set[str] = set()
    while added := {
        f"#/$defs/{number}"
        for number, each in definitions.items()
        if f"#/$defs/{number}" not in ending and _ends(each, ending)
    }:
        ending |= added
    for number, place in enumerate(places):
        if f"#/$defs/{number}" not in ending:
            raise RefusedError(
                "it requires itself without an end. Make the properties that refer back to it "
                "optional, or permit null beside it with 'anyOf'",
                param=place,
                is_final=True,
            )


def _ends(schema: Schema, ending: set[str]) -> bool:
    """Whether JSON of a finite size may match, if it may for the definitions in `ending`."""
    if isinstance(schema, bool):
        return True
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    if not all(_ends(each, ending) for each in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_ends(each, ending) for each in schema[keyword]):
            return False
    types = schema.get("type", "any")
    if (
        "enum" in schema
        or "const" in schema
        or not {"object", "array"}.issuperset(types if isinstance(types, list) else [types])
    ):
        return True
    return ("object" in types and _ends_as_object(schema, ending)) or (
        "array" in types and _ends_as_array(schema, ending)
    )


def _ends_as_object(schema: dict[str, Any], ending: set[str]) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    required = schema.get("required", ())
    return all(_ends(properties.get(each, others), ending) for each in required)


def _ends_as_array(schema: dict[str, Any], ending: set[str]) -> bool:
    items = schema.get("items", True)
    first = items if isinstance(items, list) else schema.get("prefixItems", [])
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    least = schema.get("minItems", 0)
    return all(_ends(each, ending) for each in first[:least]) and (
        least <= len(first) or _ends(rest, ending)
    )
