"""Numbers and flags are taken as they are written: nothing else is read as one."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from gateway.accounts.routes_common import RequestBody
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app

WRONG: dict[str, tuple[Any, ...]] = {
    "integer": (True, "1", 1.0, "", " 1"),
    "number": (True, "1"),
    "boolean": (1, "true", "yes", 0),
}


def check_of(field: FieldInfo) -> TypeAdapter[Any]:
    """Return what checks the values of a field."""
    annotated: Any = Annotated
    return TypeAdapter(annotated[field.annotation, *field.metadata, None])


def bodies(base: type[BaseModel] = RequestBody) -> Iterator[tuple[str, str, TypeAdapter[Any]]]:
    """Yield the numbers and flags of all request bodies: their names, kinds and checks."""
    for body in base.__subclasses__():
        for name, field in body.model_fields.items():
            adapter = check_of(field)
            schema = adapter.json_schema()
            for each in schema.get("anyOf", [schema]):
                if each.get("type") in WRONG:
                    yield f"{body.__name__}.{name}", str(each["type"]), adapter
        yield from bodies(body)


def test_bodies_have_strict_numbers_and_flags() -> None:
    create_app(Settings())  # Imports every body.
    found = list(bodies())
    assert {"KeyRotation.grace_seconds", "OutputExpiry.seconds"} <= {name for name, *_ in found}
    taken = []
    for name, kind, adapter in found:
        for value in WRONG[kind]:
            try:
                adapter.validate_python(value)
            except ValidationError:
                continue
            taken.append((name, value))
    assert not taken


OTHERS: dict[str, tuple[str, ...]] = {
    "integer": (" 5", "5 ", "5.0", "0_5", "+5", "5\n"),
    "boolean": ("1", "yes", "on", "True", " true", ""),
}
"""Texts of a query that are no integers or flags."""


def test_queries_and_paths_have_plain_integers_and_flags() -> None:
    settings = Settings()
    app = create_app(settings)
    taken, checked = [], set()
    for route in (*app.routes, *create_operator_app(settings, app).routes):
        if isinstance(route, APIRoute):
            dependant = get_flat_dependant(route.dependant)
            for field in (*dependant.query_params, *dependant.path_params):
                adapter = check_of(field.field_info)
                kind = str(adapter.json_schema().get("type"))
                if kind == "boolean" and route.path.startswith("/console"):
                    continue  # Only the console itself writes the addresses of its pages.
                checked.add((kind, field.alias))
                for text in OTHERS.get(kind, ()):
                    try:
                        adapter.validate_python(text)
                    except ValidationError:
                        continue
                    taken.append((route.path, field.alias, text))
                if kind == "boolean":
                    assert [adapter.validate_python(each) for each in ("true", "false")] == [1, 0]
    assert checked >= {("integer", "limit"), ("boolean", "history")}
    assert not taken
