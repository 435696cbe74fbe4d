"""The OpenAPI documents: FastAPI's own, completed."""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gateway.completions.endpoints.tokenize import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    LlamacppTokenizeRequest,
    VllmTokenizeRequest,
)
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.json_types import Schema, or_null, reference
from gateway.dialects.messages.request import MessageRequest
from gateway.process.openapi.management_pages import describe_management
from gateway.process.openapi.operations import GENERATION_TAGS, generation_operations
from gateway.process.openapi.schemas import table_schemas

_TOKENIZE: Final = (VllmTokenizeRequest, ChatTokenizeRequest, LlamacppTokenizeRequest)
_REQUESTS: Final = (
    CompletionRequest,
    ChatCompletionRequest,
    MessageRequest,
    *_TOKENIZE,
    DetokenizeRequest,
)


def install_documentation(app: FastAPI, *, generates: bool) -> None:
    """Make `app.openapi()` describe errors and credentials.

    `generates`: whether to describe the generation endpoints as well.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, generates=generates)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, *, generates: bool) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    components = schema.setdefault("components", {})
    schemas: dict[str, Schema] = components.setdefault("schemas", {})
    described = _add_generation(schema["paths"], schemas) if generates else set()
    describe_management(schema, apart_from=described)
    schema["paths"] = dict(sorted(schema["paths"].items(), key=_place))
    # All errors have one shape; FastAPI's own shape is never sent.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {name: each for name, each in table_schemas().items() if name.endswith("Error")}
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return schema


def _place(path: tuple[str, dict[str, Any]]) -> int:
    """Return the position of a path's tag; management follows generation in its own order."""
    [tag] = next(iter(path[1].values()))["tags"]
    return GENERATION_TAGS.index(tag) if tag in GENERATION_TAGS else len(GENERATION_TAGS)


def _add_generation(paths: dict[str, Any], schemas: dict[str, Schema]) -> set[str]:
    """Add the generation endpoints, and return their paths."""
    operations = generation_operations()
    for name, operation in operations.items():
        method, path = name.split(" ")
        paths.setdefault(path, {}).setdefault(method, {}).update(operation)
    _, definitions = models_json_schema(
        [(model, "validation") for model in _REQUESTS],
        ref_template=reference("{model}")["$ref"],
    )
    table = table_schemas()
    schemas |= {name: _plain(model) for name, model in definitions["$defs"].items()}
    schemas |= {name: each for name, each in table.items() if not name.startswith("_")}
    schemas["TokenizeRequest"] = {"anyOf": [reference(each.__name__) for each in _TOKENIZE]}
    schemas["NativeCompletionRequest"] = {
        "allOf": [reference("CompletionRequest"), table["_PostSampling"]]
    }
    return {name.split(" ")[1] for name in operations}


def _plain(model: Schema) -> Schema:
    """Return a body's schema with each parameter's type and bounds in one place.

    "Null or a number from 0 to 2" becomes a number from 0 to 2 with two types. The schema omits a
    default of null, which means absent: the description states the effective default.
    """
    if "properties" not in model:
        return model
    properties = {name: _plain_property(each) for name, each in model["properties"].items()}
    return {**model, "properties": properties}


def _plain_property(schema: Schema) -> Schema:
    plain = {name: value for name, value in schema.items() if (name, value) != ("default", None)}
    alternatives: list[Schema] = plain.get("anyOf", [])
    if alternatives[1:] != [{"type": "null"}]:
        return plain
    del plain["anyOf"]
    return plain | or_null(alternatives[0])
