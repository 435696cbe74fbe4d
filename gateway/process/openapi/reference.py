"""The reference at `/docs`: pages made from an OpenAPI document, and a page for each error code."""

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from gateway.dialects.json_types import Schema
from gateway.http.public_pages import render, slug
from gateway.process.openapi.samples import Call
from gateway.records.error_codes import CODES
from gateway.records.errors import InvalidParameterError

_PREFIX: Final = "#/components/schemas/"
REJECTED: Final = "Parameters that are rejected"
"""The beginning of the part of a description that names parameters that nobody should use."""
_PLACES: Final = {"path": "Parts of the path", "query": "Query", "header": "Headers"}
_MANY: Final = 20
"""A body with more parameters shows the rare ones in groups."""
_ID: Final = "g4md3xbjk6fgqjby5zehhtfskp"
_SAMPLES: Final[Mapping[str, Any]] = {
    "arguments": '{"city": "Paris"}',
    "completion_tokens": 40,
    "content": "The capital of France is Paris.",
    "created": 1_795_779_603,
    "created_at": 1_795_779_603,
    "finish_reason": "stop",
    "input_tokens": 4,
    "logprobs": None,
    "model": "sluice-tiny",
    "name": "web site",
    "output_tokens": 40,
    "prompt_tokens": 4,
    "text": " there was a little fox who lived in a forest near the sea.",
    "tool_calls": None,
    "total_tokens": 44,
    "url": "https://example.com/hooks",
}
"""Values of examples by the name of the member."""


class Field(NamedTuple):
    """A parameter, or a member of an object."""

    name: str
    type: Markup
    text: str
    is_required: bool


class Reference:
    """The pages of one OpenAPI document.

    Args:
        document: The document.
        groups: For schemas of bodies, the title of the group of each rare parameter.
    """

    def __init__(self, document: Schema, groups: Mapping[str, Mapping[str, str]]) -> None:
        self._document = document
        self._schemas: Mapping[str, Schema] = document["components"]["schemas"]
        self._groups = groups

    def pages(self) -> dict[str, bytes]:
        """Return the pages by their paths."""
        title = self._document["info"]["title"]
        topics: dict[str, list[dict[str, Any]]] = {}
        for path, operations in self._document["paths"].items():
            for method, operation in operations.items():
                same = topics.setdefault(operation["tags"][0], [])
                same.append(self._operation(method.upper(), path, operation, same))
        shared = {"title": title, "topics": topics}
        found = {
            "/docs": render("docs.html", **shared),
            "/docs/search": render("search.html", errors=CODES.values(), **shared),
        }
        for topic, described in topics.items():
            used = [each.pop("used") for each in described]
            found[f"/docs/{slug(topic)}"] = render(
                "topic.html",
                topic=topic,
                operations=described,
                objects=list(map(self._object, self._used(used))),
                **shared,
            )
        found["/docs/errors"] = render("errors.html", code="", errors=CODES.values(), **shared)
        for code, error in CODES.items():
            page = render("errors.html", code=code, errors=[error], **shared)
            found[f"/docs/errors/{code}"] = page
        for name in ("reference.css", "reference.js"):
            found[f"/docs/{name}"] = files("gateway.process.openapi").joinpath(name).read_text()
        return {path: page.encode() for path, page in found.items()}

    def _operation(
        self, method: str, path: str, operation: Schema, earlier: list[dict[str, Any]]
    ) -> dict[str, Any]:
        text, _, rejected = operation.get("description", "").partition(REJECTED)
        contents: dict[str, Schema] = operation.get("requestBody", {}).get("content", {})
        kind, content = next(iter(contents.items()), ("", {}))
        body = content.get("schema", {})
        like = next((each["id"] for each in earlier if body and each["schema"] == body), "")
        fields = self._fields(body)
        groups: dict[str, list[Field]] = {}
        titles = self._groups.get(body.get("$ref", "").removeprefix(_PREFIX), {})
        if len(fields) > _MANY:
            for field in fields:
                if field.name in titles:
                    groups.setdefault(titles[field.name], []).append(field)
            fields = [field for field in fields if field.name not in titles]
        parameters: dict[str, list[Field]] = {}
        for each in operation.get("parameters", ()):
            text_of, is_required = each.get("description", ""), each.get("required", False)
            field = Field(each["name"], _type(each["schema"]), text_of, is_required)
            parameters.setdefault(_PLACES[each["in"]], []).append(field)
        responses, errors = [], []
        for status, response in operation["responses"].items():
            if status < "4":
                responses.append(self._response(status, response))
            else:
                codes = [code for code, error in CODES.items() if str(error.status) == status]
                errors.append((status, response["description"], codes))
        return {
            "id": operation["operationId"],
            "method": method,
            "path": path,
            "summary": operation.get("summary", ""),
            "text": text,
            "schema": body,
            "like": like,
            "body": [] if like else fields,
            "groups": {} if like else groups,
            "parameters": parameters,
            "names": dict.fromkeys(
                field.name
                for part in ([] if like else [fields, *groups.values()], parameters.values())
                for some in part
                for field in some
            ),
            "rejected": rejected and not like and f"{REJECTED}{rejected}",
            "examples": [
                (name, call, call.samples())
                for name, call in self._requests(method, path, kind, content)
            ],
            "responses": responses,
            "errors": errors,
            "error": CODES[InvalidParameterError.code].example,
            "used": [
                *(body, operation.get("parameters", [])),
                *(each for status, each in operation["responses"].items() if status < "4"),
            ],
        }

    def _requests(
        self, method: str, path: str, kind: str, content: Schema
    ) -> Iterator[tuple[str, Call]]:
        """Yield the title and the request of each example."""
        if not content:
            yield "", Call(method, path)
            return
        examples = content.get("examples") or {"": {"value": self._sample(content["schema"])}}
        if not kind.endswith("json"):
            body = dict(next(iter(examples.values()))["value"])
            file = str(body.pop("file")).replace("...", "batch.jsonl")
            yield "", Call(method, path, body, file=file)
            return
        for number, (dialect, example) in enumerate(examples.items()):
            named = dialect if number else ""
            call = Call(method, path, example["value"], dialect=named)
            yield example.get("summary", ""), call

    def _response(self, status: str, response: Schema) -> tuple[str, str, Markup, str]:
        schema = response.get("content", {}).get("application/json", {}).get("schema")
        if schema is None:
            return status, response["description"], Markup(""), ""
        example = json.dumps(self._sample(schema), indent=2, ensure_ascii=False)
        return status, response["description"], _type(schema), example

    def _object(self, name: str) -> dict[str, Any]:
        schema = self._schemas[name]
        fields = self._fields(schema)
        kind = Markup("") if fields else _type({**schema, "description": ""})
        text = schema.get("description", "")
        return {"name": name, "text": text, "type": kind, "fields": fields}

    def _used(self, parts: list[Any]) -> list[str]:
        """Return the names of all schemas that are used, in the order of their first use."""
        names: dict[str, None] = {}
        while parts:
            part = parts.pop(0)
            if isinstance(part, dict):
                name = str(part.get("$ref", "")).removeprefix(_PREFIX)
                if name in self._schemas and name not in names:
                    names[name] = None
                    parts.append(self._schemas[name])
                parts += part.values()
            elif isinstance(part, list):
                parts += part
        return [*names]

    def _resolved(self, schema: Schema) -> Schema:
        """Return a schema without a reference, and with the members of all its parts."""
        if "$ref" in schema:
            return self._resolved(self._schemas[schema["$ref"].removeprefix(_PREFIX)])
        if "allOf" not in schema:
            return schema
        parts = list(map(self._resolved, schema["allOf"]))
        properties = {name: each for part in parts for name, each in part["properties"].items()}
        return {"type": "object", "properties": properties}

    def _fields(self, schema: Schema) -> list[Field]:
        whole = self._resolved(schema) if schema else {}
        required = whole.get("required", ())
        return [
            Field(name, _type(each), each.get("description", ""), name in required)
            for name, each in whole.get("properties", {}).items()
        ]

    def _sample(self, schema: Schema, name: str = "", depth: int = 0) -> Any:
        """Return an example of a value."""
        whole = self._resolved(schema)
        if name in _SAMPLES and _KINDS[type(_SAMPLES[name])] in _all_kinds(whole):
            return _SAMPLES[name]
        if alternatives := whole.get("anyOf") or whole.get("oneOf"):
            return self._sample(alternatives[0], name, depth)
        kind = _all_kinds(whole)[0]
        if depth < _DEPTH and kind == "array" and "items" in whole:
            return [self._sample(whole["items"], name, depth + 1)]
        if depth < _DEPTH and kind == "object":
            members = whole.get("properties", {})
            required = [member for member in whole.get("required", ()) if member in members]
            return {each: self._sample(members[each], each, depth + 1) for each in required}
        return _plain_sample(whole, name, kind)


def _plain_sample(schema: Schema, name: str, kind: str) -> Any:
    if fixed := [schema[key] for key in ("const", "example") if key in schema]:
        return fixed[0]
    least = schema.get("minimum", 0)
    plain = {"object": {}, "array": [], "integer": least, "number": least, "boolean": False}
    return schema["enum"][0] if "enum" in schema else _text(schema, name, plain.get(kind))


def _text(schema: Schema, name: str, other: Any) -> Any:
    """Return an example of a text; `other` for a value of another type."""
    pattern = str(schema.get("pattern", ""))
    if schema.get("format") == "date-time":
        return "2026-11-27T09:15:41Z"
    if other is not None or "string" not in _all_kinds(schema):
        return other
    prefix = pattern.strip("^$").split("[")[0]
    is_plain = prefix.replace("-", "").replace("_", "").isalnum()
    return f"{prefix if is_plain else ''}{_ID}" if pattern or name == "id" else "..."


_KINDS: Final = {str: "string", int: "integer", type(None): "null"}
_DEPTH: Final = 6


def _all_kinds(schema: Schema) -> list[str]:
    kinds = schema.get("type", [])
    others = (kind for each in schema.get("anyOf", ()) for kind in _all_kinds(each))
    return [*(kinds if isinstance(kinds, list) else [kinds]), *others] or ["any"]


def _type(schema: Schema) -> Markup:
    """Return the type of a value in words, with links to objects."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_PREFIX)
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "const" in schema:
        return Markup("{}").format(json.dumps(schema["const"]))
    if "enum" in schema:
        return _joined(map(Markup.escape, map(json.dumps, schema["enum"])))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _joined(map(_type, schema[key]))
    kinds = [
        Markup("array of ") + _type(schema["items"])
        if kind == "array" and "items" in schema
        else Markup.escape(kind)
        for kind in _all_kinds({**schema, "anyOf": ()})
    ]
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (
            ("minimum", "from"),
            ("exclusiveMinimum", "above"),
            ("maximum", "to"),
            ("exclusiveMaximum", "below"),
        )
        if key in schema
    ]
    if "maxLength" in schema:
        bounds.append(f"of at most {schema['maxLength']} characters")
    return Markup("{} {}").format(_joined(kinds), " ".join(bounds)).strip()


def _joined(types: Iterable[Markup]) -> Markup:
    return Markup(" or ").join(dict.fromkeys(types))
