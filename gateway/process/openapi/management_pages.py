"""Complete the OpenAPI descriptions of the typed routes.

FastAPI derives their parameters and responses. It lacks the error format of this service and the
credential that each of these routes requires.
"""

from collections.abc import Collection
from typing import Any, Final

from gateway.dialects.json_types import Schema
from gateway.process.openapi.described import HEADER_TEXT, error_response, header_objects

ERRORS: Final = {
    "400": "A parameter is invalid; `param` names it.",
    "401": "No valid API key or token.",
    "403": "The credential lacks the scope, or may not be used from this address.",
    "404": "The resource does not exist, or the credential has no access to it.",
    "503": "The database or Redis cannot be reached; retry later.",
}
"""Errors of every route."""

BODY_ERRORS: Final = {
    "408": "The body did not arrive in time.",
    "409": "The resource already exists, or the change conflicts with its state.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
}
"""Errors of routes that read a body."""

METHODS: Final = ("get", "post", "put", "patch", "delete")


def describe_management(schema: dict[str, Any], *, apart_from: Collection[str]) -> None:
    """Complete the operations of all paths except those described by hand."""
    for path, operations in schema["paths"].items():
        if path not in apart_from:
            for method in METHODS:
                if method in operations:
                    _complete(path, operations[method])


def _complete(path: str, operation: dict[str, Any]) -> None:
    operation["security"] = [{"bearer": []}]
    # FastAPI appends the parameters of dependencies, such as the tenant in the path.
    parameters: list[dict[str, Any]] = operation.get("parameters", [])
    parameters.sort(key=lambda each: (each["in"] != "path", path.find(f"{{{each['name']}}}")))
    for parameter in parameters:
        parameter["schema"] = _plain(parameter["schema"])
    responses: dict[str, Any] = operation["responses"]
    # Invalid parameters get a 400 response, in the shape of every error.
    responses.pop("422", None)
    for status, response in responses.items():
        if status.startswith("2"):
            text = {"x-request-id": HEADER_TEXT["x-request-id"]}
            response["headers"] = header_objects(text) | response.get("headers", {})
    errors = ERRORS if "requestBody" not in operation else ERRORS | BODY_ERRORS
    for status, description in errors.items():
        responses.setdefault(status, error_response(description))


def _plain(schema: Schema) -> Schema:
    """Return a parameter's schema without duplicates, and without null, which no query can have."""
    plain = {
        name: value
        for name, value in schema.items()
        if name not in ("anyOf", "description", "title")
    }
    for alternative in schema.get("anyOf", ()):
        if alternative != {"type": "null"}:
            plain |= alternative
    return plain
