"""`structured_outputs` in the form of vLLM and oMLX: exactly one constraint."""

from typing import Any

from gateway.dialects.fields import read_strings
from gateway.dialects.json_types import Schema, or_null, schema_of
from gateway.dialects.request import Structure, StructureKind
from gateway.dialects.structured.schemas import decoded_schema
from gateway.records.errors import invalid, must

MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 4096

_NAME = "structured_outputs"
_SOURCES: dict[str, Schema] = {
    "json": schema_of("dict | bool | str"),
    "json_object": schema_of("True"),
    "regex": schema_of("str[1:]"),
    "choice": schema_of(f"list[str[1:{MAX_CHOICE_CHARACTERS}], 1:{MAX_CHOICES}]"),
    "grammar": schema_of("str[1:]"),
}
CONSTRAINTS = tuple(_SOURCES)

STRUCTURED_OUTPUTS_SCHEMA = or_null(
    {
        "type": "object",
        "oneOf": [
            {"required": [name], "properties": {name: source}} for name, source in _SOURCES.items()
        ],
    }
)


def read_structured_outputs(value: object) -> Structure | None:
    """Return what the text must match. Raises a BadRequestError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise must(_NAME, "be an object", value)
    _check_json_object(value.get("json_object"))
    given = [name for name in CONSTRAINTS if value.get(name) is not None]
    if "json_object" in given and value["json_object"] is False:
        given.remove("json_object")
    if len(given) != 1:
        raise invalid(
            _NAME,
            f"must have exactly one of {', '.join(CONSTRAINTS)}. Given: "
            f"{', '.join(given) or 'none'}.",
        )
    return _structure(given[0], value[given[0]])


def unknown_options(value: object) -> dict[str, Any]:
    """Return the options without effect here, such as the options of one backend."""
    if not isinstance(value, dict):
        return {}
    return {name: option for name, option in value.items() if name not in CONSTRAINTS}


def _check_json_object(value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise must(f"{_NAME}.json_object", "be a boolean", value)


def _structure(name: str, source: Any) -> Structure:
    param = f"{_NAME}.{name}"
    if name == "json_object":
        return Structure(StructureKind.JSON_OBJECT, None, param)
    if name == "json":
        return Structure(StructureKind.JSON_SCHEMA, decoded_schema(source, param), param)
    if name == "choice":
        return Structure(StructureKind.CHOICE, _choices(source, param), param)
    if not isinstance(source, str) or not source:
        raise must(param, "be a non-empty string", source)
    if name == "regex":
        return Structure(StructureKind.REGEX, source, param)
    # vLLM accepts both languages in one field; only GBNF has this operator.
    kind = StructureKind.GBNF if "::=" in source else StructureKind.LARK
    return Structure(kind, source, param)


def _choices(source: object, param: str) -> list[str]:
    choices = read_strings(source, param, most=MAX_CHOICES, longest=MAX_CHOICE_CHARACTERS)
    if not choices:
        raise must(param, "have at least one string", [])
    return choices
