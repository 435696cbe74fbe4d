"""The OpenAPI documents: FastAPI's own, completed with errors, credentials and headers."""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.completions.endpoints.tokenize import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    LlamacppTokenizeRequest,
    VllmTokenizeRequest,
)
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.embeddings import (
    ClassificationRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from gateway.dialects.endpoint import MESSAGES
from gateway.dialects.json_types import Schema, or_null, reference
from gateway.dialects.messages.request import MessageRequest
from gateway.dialects.responses.request import ResponseRequest
from gateway.dialects.speech import TranscriptionRequest, TranslationRequest
from gateway.process.openapi.operations import (
    GENERATION_TAGS,
    generation_operations,
    use_errors_of_messages,
)
from gateway.process.openapi.schemas import (
    ID_TEXT,
    error_responses,
    header_objects,
    table_schemas,
)

ERRORS: Final = frozenset({"400", "401", "403", "404", "503"})
"""Statuses of the errors of every route."""
BODY_ERRORS: Final = frozenset({"408", "409", "413", "415"})
"""Those that only routes which read a body have."""

COMMON: Final = (
    *("model", "prompt", "messages", "input", "query", "documents", "text_1", "text_2"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "stream"),
    *("system", "instructions", "temperature", "top_p", "n", "stop", "seed"),
    *("tools", "tool_choice", "response_format"),
)
"""Parameters that most requests have, in the order of the reference."""


def describe_management(schema: dict[str, Any], *, apart_from: Collection[str]) -> None:
    """Complete the operations of all paths except those described by hand."""
    for path, operations in schema["paths"].items():
        if path not in apart_from:
            for operation in operations.values():
                _complete(path, operation)


def _complete(path: str, operation: dict[str, Any]) -> None:
    operation["security"] = [{"bearer": []}]
    # FastAPI appends the parameters of dependencies, such as the tenant in the path.
    parameters: list[dict[str, Any]] = operation.get("parameters", [])
    parameters.sort(key=lambda each: (each["in"] != "path", path.find(f"{{{each['name']}}}")))
    for parameter in parameters:
        parameter["schema"] = _plain_parameter(parameter["schema"])
    responses: dict[str, Any] = operation["responses"]
    # Invalid parameters get a 400 response, in the shape of every error.
    responses.pop("422", None)
    for status, response in responses.items():
        if status.startswith("2"):
            response["headers"] = header_objects(ID_TEXT) | response.get("headers", {})
    statuses = ERRORS | BODY_ERRORS if "requestBody" in operation else ERRORS
    for status, response in error_responses(statuses).items():
        responses.setdefault(status, response)
    if path.startswith(MESSAGES.path):
        use_errors_of_messages(responses)


def _plain_parameter(schema: Schema) -> Schema:
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


_TOKENIZE: Final = (VllmTokenizeRequest, ChatTokenizeRequest, LlamacppTokenizeRequest)
_POOLING: Final = (EmbeddingRequest, ClassificationRequest, ScoreRequest, RerankRequest)
_REQUESTS: Final = (
    CompletionRequest,
    ChatCompletionRequest,
    MessageRequest,
    ResponseRequest,
    TranscriptionRequest,
    TranslationRequest,
    *_POOLING,
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
    schema = _with_titles_as_names(
        get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            tags=app.openapi_tags,
        )
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


def _with_titles_as_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Rename the schemas of generic models, such as `ListBody_KeyBody_` to `KeyList`."""
    schemas = schema.get("components", {}).get("schemas", {})
    titles = {name: each["title"] for name, each in schemas.items() if name.endswith("_")}
    text = re.sub(r'\w+_(?=")', lambda name: titles.get(name[0], name[0]), json.dumps(schema))
    return dict[str, Any](json.loads(text))


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
    given = model["properties"]
    names = [*(name for name in COMMON if name in given), *given]
    properties = {name: _plain_property(given[name]) for name in dict.fromkeys(names)}
    return {**model, "properties": properties}


def parameter_groups() -> dict[str, dict[str, str]]:
    """Return the titles of the groups of rare parameters by the name of the body's schema."""
    return {model.__name__: dict(_grouped(model)) for model in _REQUESTS}


def _grouped(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for part in model.__mro__:
        title = (part.__doc__ or "").split("\n")[0]
        for name in vars(part).get("__annotations__", {}):
            if name in model.model_fields and name not in COMMON:
                yield name, title


def _plain_property(schema: Schema) -> Schema:
    plain = {name: value for name, value in schema.items() if (name, value) != ("default", None)}
    alternatives: list[Schema] = plain.get("anyOf", [])
    if alternatives[1:] != [{"type": "null"}]:
        return plain
    del plain["anyOf"]
    return plain | or_null(alternatives[0])
