"""Write `gateway/cli/admin_api.json`: the part of the Admin API's OpenAPI document for commands.

    .venv/bin/python scripts/admin_api.py

The commands of `sluice` for its resources get their parameters from this file. Making the document
takes seconds, and needs packages that a client of a gateway lacks.
"""

from typing import Any

import msgspec

from gateway.cli.parameters import FILE, Operation, Parameter
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app


def text_of(document: dict[str, Any]) -> str:
    """Return the file's text for an OpenAPI document: one line for each operation."""
    schemas = document["components"]["schemas"]
    lines = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path.startswith("/admin/"):
                described = msgspec.json.encode(_operation(operation, schemas)).decode()
                lines.append(f'"{method.upper()} {path}": {described}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _operation(operation: dict[str, Any], schemas: dict[str, Any]) -> Operation:
    given = {
        each["name"]: _parameter(
            each["schema"] | {"description": each.get("description", "")},
            schemas,
            is_required=each.get("required", False),
        )
        for each in operation.get("parameters", ())
    }
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = _resolved(content["schema"], schemas)
        for name, schema in body["properties"].items():
            given[name] = _parameter(schema, schemas, is_required=name in body.get("required", ()))
    return Operation(operation["description"], given)


def _parameter(schema: dict[str, Any], schemas: dict[str, Any], *, is_required: bool) -> Parameter:
    plain = _resolved(schema, schemas)
    items = _resolved(plain.get("items", {}), schemas)
    kind = plain | items
    return Parameter(
        text=schema.get("description", ""),
        type="time" if kind.get("format") == "date-time" else kind["type"],
        is_many=bool(items),
        is_nullable={"type": "null"} in schema.get("anyOf", ()),
        is_required=is_required,
        choices=tuple(kind.get("enum", ())),
        default=schema.get("default") or None,
        least=int(kind.get("minimum", 0)),
        most=int(kind.get("maximum", 0)),
    )


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without references, and without null as an alternative."""
    if "anyOf" in schema:
        [schema] = [each for each in schema["anyOf"] if each != {"type": "null"}]
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


if __name__ == "__main__":
    operators = create_operator_app(Settings(), create_app(Settings()))
    FILE.write_text(text_of(operators.openapi()), encoding="utf-8")
