"""JSON schemas of types that are written as in Python."""

import ast
from collections.abc import Mapping
from typing import Any, Final

Schema = dict[str, Any]

_NULL: Final[Schema] = {"type": "null"}
_BUILT_IN: Final[Mapping[str, Schema]] = {
    "Any": {},
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list": {"type": "array"},
    "dict": {"type": "object"},
}
_BOUNDED: Final = {
    "str": "Length",
    "int": "imum",
    "float": "imum",
    "list": "Items",
    "dict": "Properties",
}
"""What `min` and `max` precede in the keywords of bounds."""


def schema_of(kind: str, /, **types: Schema) -> Schema:
    """Return the schema of a type, such as `list[str] | None`.

    Bounds are inclusive: `str[1:64]` has 1 to 64 characters, `list[int[0:], 1:9]` 1 to 9 natural
    numbers, `dict[str, int, :9]` at most 9 members. `{"id": str, "n?": int}` is an object whose
    `n` may be absent, `match("^a")` a string, and `"a" | "b"` one of two strings. Other names are
    those of `types`, or of schemas of the OpenAPI page.
    """
    return _read(ast.parse(kind, mode="eval").body, {**_BUILT_IN, **types})


def reference(name: str) -> Schema:
    """Return a reference to a schema of the OpenAPI page."""
    return {"$ref": f"#/components/schemas/{name}"}


def or_null(schema: Schema) -> Schema:
    """Return the schema of a value or null: with two types if it has one, without `anyOf`."""
    # These keywords would apply to null, too.
    if not isinstance(schema.get("type"), str) or schema.keys() & {"enum", "const", "oneOf"}:
        return {"anyOf": [schema, _NULL]}
    return {**schema, "type": [schema["type"], "null"]}


def _read(node: ast.expr, types: Mapping[str, Schema]) -> Schema:
    match node:
        case ast.BinOp():
            alternatives: list[Schema] = []
            while isinstance(node, ast.BinOp):
                alternatives.insert(0, _read(node.right, types))
                node = node.left
            schema = _either(_read(node, types), *alternatives)
        case ast.Name(name):
            schema = types[name] if name in types else reference(name)
        case ast.Subscript(ast.Name(name), content):
            parts = content.elts if isinstance(content, ast.Tuple) else [content]
            schema = _generic(name, parts, types)
        case ast.Dict(names, values):
            schema = {"type": "object", "required": [], "properties": {}}
            for key, value in zip(map(ast.literal_eval, filter(None, names)), values, strict=True):
                schema["properties"][key.rstrip("?")] = _read(value, types)
                schema["required"] += [key] * (not key.endswith("?"))
        case ast.Call(_, [ast.Constant(pattern)]):
            schema = {"type": "string", "pattern": pattern}
        case _:
            value = ast.literal_eval(node)
            schema = _NULL if value is None else {"const": value}
    return schema


def _generic(name: str, parts: list[ast.expr], types: Mapping[str, Schema]) -> Schema:
    schema = dict(types[name])
    for part in parts:
        if isinstance(part, ast.Slice):
            bounds = {"min": part.lower, "max": part.upper}
            schema |= {
                side + _BOUNDED[name]: ast.literal_eval(bound)
                for side, bound in bounds.items()
                if bound
            }
        elif name == "list":
            schema["items"] = _read(part, types)
        else:
            key = "propertyNames" if part is parts[0] else "additionalProperties"
            schema[key] = _read(part, types)
    if schema.get("propertyNames") == _BUILT_IN["str"]:
        del schema["propertyNames"]  # The keys of every object are texts.
    return schema


def _either(*alternatives: Schema) -> Schema:
    constants = [each["const"] for each in alternatives if "const" in each]
    if len(constants) > 1:
        others = [each for each in alternatives if "const" not in each]
        if others == [_NULL]:
            return {"type": ["string", "null"], "enum": [*constants, None]}
        alternatives = ({"type": "string", "enum": constants}, *others)
    if all(each.keys() == {"type"} for each in alternatives):
        return {"type": [each["type"] for each in alternatives]}
    match alternatives:
        case [only]:
            return only
        case [value, {"type": "null"}]:
            return or_null(value)
        case _:
            return {"anyOf": list(alternatives)}
