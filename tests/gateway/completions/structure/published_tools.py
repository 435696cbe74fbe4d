"""Schemas of tools in the shapes that MCP servers, SDKs and agents publish.

Each has the paths of what cannot be enforced.
"""

from typing import Any, Final

Schema = dict[str, Any]

STRING: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
DRAFT_7: Final = "http://json-schema.org/draft-07/schema#"
DRAFT_2020: Final = "https://json-schema.org/draft/2020-12/schema"
ZOD_EMAIL: Final = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
ZOD_DATE_TIME: Final = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-"
    r"(?:0[1-9]|1\d|2[0-8])))T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"
)
ARTIFACT_NAME: Final = r'^(?!__.*__$)[^\p{Cc}\p{Zl}"\\./[\]]{1,200}$'


def of(required: str = "", /, **properties: Any) -> Schema:
    """Return the schema of an object with some required properties."""
    return {"type": "object", "properties": properties, "required": required.split()}


def listed(items: Any, **more: Any) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items, **more}


def optional(schema: Schema) -> Schema:
    """Return a schema as Pydantic writes `X | None = None`."""
    return {"anyOf": [schema, {"type": "null"}], "default": None, "title": "X"}


def nullable(schema: Schema) -> Schema:
    """Return a schema as Go's SDK writes a pointer or a slice."""
    return {**schema, "type": ["null", schema["type"]]}


EDIT: Final = of("oldText newText", oldText=STRING, newText=STRING)
LABELS: Final = {"type": "object", "additionalProperties": STRING}
FILTER: Final[Schema] = {
    "$schema": DRAFT_2020,
    "$defs": {
        "Filter": {
            "oneOf": [
                of("op all", op={"const": "and"}, all=listed({"$ref": "#/$defs/Filter"})),
                of("op field", op={"const": "eq"}, field=STRING, value={}),
            ]
        }
    },
    **of("filter", filter={"$ref": "#/$defs/Filter"}),
}

PUBLISHED: Final[dict[str, tuple[Schema, list[str]]]] = {
    "read_text_file": (of("path", path=STRING, tail=NUMBER, head=NUMBER), []),
    "edit_file": (
        {
            "$schema": DRAFT_7,
            "additionalProperties": False,
            **of("path edits", path=STRING, edits=listed(EDIT), dryRun=BOOLEAN),
        },
        [],
    ),
    "git_commit": ({**of("repo_path message", repo_path=STRING, message=STRING), "title": "G"}, []),
    "git_log": (of("repo_path", repo_path=STRING, max_count={**INTEGER, "default": 10}), []),
    "fetch": (
        of(
            "url",
            url={**STRING, "format": "uri", "minLength": 1},
            max_length={**INTEGER, "exclusiveMinimum": 0, "exclusiveMaximum": 1000000},
            raw={**BOOLEAN, "default": False},
        ),
        [],
    ),
    "create_entities": (
        of(
            "entities",
            entities=listed(
                of("name entityType observations", name=STRING, observations=listed(STRING))
            ),
        ),
        [],
    ),
    "sequentialthinking": (
        of(
            "thought nextThoughtNeeded thoughtNumber totalThoughts",
            thought=STRING,
            nextThoughtNeeded=BOOLEAN,
            thoughtNumber={**INTEGER, "minimum": 1},
            totalThoughts={**INTEGER, "minimum": 1},
        ),
        [],
    ),
    "brave_web_search": (
        of(
            "query",
            query={**STRING, "maxLength": 400},
            count={**NUMBER, "minimum": 1, "maximum": 20},
            freshness={"anyOf": [{"enum": ["pd", "pw"]}, {**STRING, "pattern": r"^\d{4}-\d\d$"}]},
        ),
        [],
    ),
    "get_current_time": (of("timezone", timezone=STRING), []),
    "query": (of("", sql=STRING), []),
    "github create_issue": (
        of("owner repo", owner=STRING, repo=STRING, labels=listed(STRING), milestone=NUMBER),
        [],
    ),
    "github push_files": (
        of("files", files=listed(of("path content", path=STRING, content=STRING))),
        [],
    ),
    "go sdk": (
        {
            **of("ids", ids=nullable(listed(STRING)), limit={**INTEGER, "format": "int32"}),
            "additionalProperties": {"not": {}},
        },
        [".additionalProperties.not"],
    ),
    "slack_post_message": (of("channel_id text", channel_id=STRING, text=STRING), []),
    "browser_click": (
        {
            "$schema": DRAFT_7,
            **of(
                "ref",
                ref=STRING,
                button={**STRING, "enum": ["left", "right", "middle"]},
                modifiers=listed({**STRING, "enum": ["Alt", "Shift"]}),
            ),
        },
        [],
    ),
    "browser_select_option": (of("values", values=listed(STRING, minItems=1)), []),
    "maps_distance_matrix": (
        of("origins", origins=listed(STRING), mode={"enum": ["driving", "walking"]}),
        [],
    ),
    "firecrawl_scrape": (
        of(
            "url",
            url={**STRING, "format": "url"},
            formats=listed({"enum": ["markdown", "html"]}, uniqueItems=True),
            headers=LABELS,
        ),
        [".properties.formats.uniqueItems"],
    ),
    "firecrawl_extract": (of("urls", urls=listed(STRING), schema={"type": "object"}), []),
    "notion patch-page": (
        of(
            "page_id",
            page_id={**STRING, "format": "uuid"},
            parent={
                "oneOf": [of("page_id", page_id=STRING), of("database_id", database_id=STRING)]
            },
        ),
        [],
    ),
    "notion query": (FILTER, []),
    "linear create_issue": (
        of("title", title=STRING, dueDate={**STRING, "format": "date"}, estimate=NUMBER),
        [],
    ),
    "stripe create_refund": (
        of("charge", charge=STRING, amount={**INTEGER, "format": "int64", "minimum": 0}),
        [],
    ),
    "sentry find_issues": (
        {"$schema": DRAFT_2020, **of("", since={**STRING, "format": "google-datetime"})},
        [],
    ),
    "jira update": (
        of(
            "fields", fields={"type": "object", "propertyNames": STRING, "additionalProperties": {}}
        ),
        [],
    ),
    "jira transition": (
        {
            **of("", id=STRING, name=STRING),
            "oneOf": [{"required": ["id"]}, {"required": ["name"]}],
        },
        [".oneOf"],
    ),
    "email send": (
        of("to", to=listed({**STRING, "format": "email", "pattern": ZOD_EMAIL}), subject=STRING),
        [".properties.to.items.pattern"],
    ),
    "calendar create": (
        of("start", start={**STRING, "format": "date-time", "pattern": ZOD_DATE_TIME}),
        [],
    ),
    "zod record": (
        of(
            "tags",
            tags={
                "type": "object",
                "propertyNames": {"pattern": "^[a-z]+$"},
                "additionalProperties": STRING,
            },
        ),
        [".properties.tags.propertyNames"],
    ),
    "zod tuple": (
        of("at", at={"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False}),
        [],
    ),
    "pydantic": (
        {
            "$defs": {
                "Color": {**STRING, "enum": ["red", "blue"], "title": "Color"},
                "Cat": of("kind", kind={**STRING, "const": "cat"}, lives=INTEGER),
                "Dog": of("kind", kind={**STRING, "const": "dog"}, color={"$ref": "#/$defs/Color"}),
            },
            **of(
                "pet",
                pet={
                    "discriminator": {"propertyName": "kind"},
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                },
                note=optional(STRING),
            ),
        },
        [],
    ),
    "pydantic tree": (
        {
            "$defs": {"Node": of("v", v=INTEGER, next=optional({"$ref": "#/$defs/Node"}))},
            **of("root", root={"$ref": "#/$defs/Node"}),
        },
        [],
    ),
    "typescript-json-schema": (
        {
            "$schema": DRAFT_7,
            "definitions": {"Map<string,any>": {"type": "object"}, "a/b~c": INTEGER},
            **of(
                "",
                m={"$ref": "#/definitions/Map%3Cstring%2Cany%3E"},
                n={"$ref": "#/definitions/a~1b~0c"},
                o={"$ref": "#/definitions/Missing"},
            ),
        },
        [".properties.o.$ref"],
    ),
    "zod reused": (
        of(
            "a",
            a={"anyOf": [of("x", x=INTEGER), STRING]},
            b=listed({"$ref": "#/properties/a/anyOf/0"}),
        ),
        [],
    ),
    "kubernetes apply": (
        of(
            "manifest",
            manifest={"type": "object", "x-kubernetes-preserve": True},
            dry={"type": "bool"},
        ),
        [".properties.dry.type"],
    ),
    "openapi if": (
        {
            **of("kind", kind={"enum": ["url", "id"]}, url=STRING),
            "if": {"properties": {"kind": {"const": "id"}}},
            "then": {"required": ["id"]},
        },
        [".if"],
    ),
    "openapi limits": (
        {
            **of("", a=STRING, b=STRING, c=listed(STRING, minItems=0.0, maxItems=5.0)),
            "minProperties": 2,
            "dependentRequired": {"a": ["b"]},
        },
        [".dependentRequired", ".minProperties"],
    ),
    "draft 3": (of("a", a={**STRING, "required": True}), [".properties.a.required"]),
    "Bash": (
        {
            "$schema": DRAFT_2020,
            "additionalProperties": False,
            **of("command", command=STRING, timeout=NUMBER, run_in_background=BOOLEAN),
        },
        [],
    ),
    "TodoWrite": (
        of(
            "todos",
            todos=listed(
                of(
                    "content status",
                    content={**STRING, "minLength": 1},
                    status={**STRING, "enum": ["pending", "in_progress", "completed"]},
                )
            ),
        ),
        [],
    ),
    "Artifact": (
        of("file", file={**STRING, "pattern": ARTIFACT_NAME}),
        [".properties.file.pattern"],
    ),
    "AskUserQuestion": (
        of(
            "questions",
            questions=listed(
                of(
                    "question",
                    question=STRING,
                    options=listed(of("label", label=STRING), minItems=2),
                ),
                minItems=1,
                maxItems=4,
            ),
        ),
        [],
    ),
}
