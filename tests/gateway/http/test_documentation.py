"""The OpenAPI page describes every route of the management API completely."""

import json
import re
from functools import cache
from html import unescape
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from starlette.routing import Route

from gateway.http.allowances import FailedLogins, UnpaidRequests
from gateway.limits.headers import _FAMILIES, _FAMILY_OF_DAY, _names
from gateway.limits.refusals import _CODES
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app
from gateway.process.openapi.document import BODY_ERRORS, ERRORS, parameter_groups
from gateway.process.openapi.operations import generation_operations
from gateway.process.openapi.reference import Reference
from gateway.process.openapi.schemas import RESPONSE_HEADERS
from gateway.records import errors

PAGES = ("/anthropic", "/console", "/docs", "/openapi.json", "/status")
"""Pages, and a prefix of paths that are described without it."""


@cache
def pages() -> tuple[Any, Any]:
    """Return the pages of customers and operators. They take a second to make."""
    app = create_app(Settings())
    return app.openapi(), create_operator_app(Settings(), app).openapi()


def page() -> Any:
    """Return the customers' page."""
    return pages()[0]


def operations() -> dict[str, Any]:
    """Return the operations of both pages that are described by their types, by method and path."""
    return {
        f"{method} {path}": operation
        for page in pages()
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
        if f"{method} {path}" not in generation_operations()
        # Their errors are Anthropic's.
        and not path.startswith("/v1/messages/")
    }


def test_pages_have_operations() -> None:
    paths, of_operators = (set(page["paths"]) for page in pages())
    assert {"/v1/usage", "/v1/usage/requests", "/v1/usage/requests/{request_id}"} < paths
    assert {"/v1/audit", "/v1/keys", "/v1/limits"} < paths
    assert {"/admin/usage", "/admin/audit", "/admin/tenants"} < of_operators
    assert len(operations()) > 50


def test_generation_comes_first_and_management_before_operations() -> None:
    paths = page()["paths"].values()
    tags = list(dict.fromkeys(next(iter(methods.values()))["tags"][0] for methods in paths))
    generation = ["Completions", "Chat", "Messages", "Responses", "Audio"]
    generation += ["Embeddings and ranks", "Models", "Tokenization", "llama.cpp"]
    assert tags[: len(generation) + 4] == [*generation, "Files", "Batches", "Adapters", "Keys"]
    assert tags[-1] == "Operations"
    assert [tag["name"] for tag in page()["tags"]] == generation
    assert list(page()["paths"])[:2] == ["/v1/completions", "/v1/completions:estimate"]
    assert "tags" not in pages()[1]


def test_every_api_is_described() -> None:
    served = {
        f"{method.lower()} {route.path.replace(':path}', '}')}"
        for route in create_app(Settings()).routes
        if isinstance(route, Route) and not route.path.startswith(PAGES)
        for method in route.methods or ()
        if method != "HEAD"
    }
    described = {
        f"{method} {path}" for path, methods in page()["paths"].items() for method in methods
    }
    # Other names of paths that are described.
    others = {"post /v1/tokenize", "post /v1/detokenize", "get /v1/tokenizer_info"}
    assert served - described == others | {"get /", "get /healthz", "get /readyz"}


def test_operation_has_description_and_parameters() -> None:
    for name, operation in operations().items():
        assert operation["summary"], name
        assert operation["description"], name
        assert operation["tags"], name
        assert operation["security"] == [{"bearer": []}], name
        for parameter in operation.get("parameters", ()):
            assert parameter["description"], (name, parameter["name"])
            assert not parameter["schema"].keys() & {"anyOf", "title"}, (name, parameter["name"])


def test_generation_describes_what_it_rejects() -> None:
    completions, chats = (
        page()["paths"][path]["post"]["description"]
        for path in ("/v1/completions", "/v1/chat/completions")
    )
    assert "\n- `functions`: Use `tools`." in completions
    assert "\n- `best_of` other than `1`: Use `n` with `logprobs`" in chats
    assert "`best_of` other" not in completions


def test_operation_describes_its_errors() -> None:
    for name, operation in operations().items():
        responses = operation["responses"]
        expected = ERRORS | BODY_ERRORS if "requestBody" in operation else ERRORS
        assert set(expected) <= set(responses), name
        assert "422" not in responses, name
        for status in expected:
            schema = responses[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Error"}, name
            assert "x-should-retry" in responses[status]["headers"], name
        answers = [responses[status] for status in responses if status.startswith("2")]
        assert answers, name
        assert all("x-request-id" in answer["headers"] for answer in answers), name


def test_usage_is_described_with_its_bounds_and_as_csv() -> None:
    operation = page()["paths"]["/v1/usage"]["get"]
    parameters = {each["name"]: each["schema"] for each in operation["parameters"]}
    assert set(parameters) == {
        *("start", "end", "bucket", "group_by", "model", "key", "project"),
        *("after", "limit", "format"),
    }
    assert (parameters["limit"]["minimum"], parameters["limit"]["maximum"]) == (1, 1000)
    assert parameters["model"]["maxLength"] == 300
    assert parameters["format"]["enum"] == ["json", "csv"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/csv"}
    admin = pages()[1]["paths"]["/admin/usage"]["get"]["parameters"]
    assert {each["name"] for each in admin} == {*parameters, "tenant"}


@cache
def reference() -> dict[str, str]:
    """Return the pages of both references by audience and path."""
    return {
        f"{audience}{path}": content.decode()
        for audience, document in enumerate(pages())
        for path, content in Reference(document, parameter_groups()).pages().items()
    }


def test_every_link_of_the_reference_has_a_target() -> None:
    anchors = {path: {*re.findall(r'id="([^"]+)"', text)} for path, text in reference().items()}
    for path, text in reference().items():
        for link in re.findall(r'href="([^"]+)"', text):
            target, _, anchor = link.partition("#")
            if target not in ("/", "/openapi.json"):
                place = f"{path[0]}{target}" if target else path
                assert place in anchors, (path, link)
                assert not anchor or anchor in anchors[place], (path, link)


def test_reference_begins_with_what_every_request_has_and_ends_with_what_is_rejected() -> None:
    for topic, first in (("completions", "prompt"), ("chat", "messages")):
        section = reference()[f"0/docs/{topic}"].partition("</section>")[0]
        opened = re.sub(r"<details>.*?</details>", "", section, flags=re.DOTALL)
        names = re.findall(r"<dt[^>]*><code>(\w+)</code>", opened)
        assert [*names[:3], names[4]] == ["model", first, "max_tokens", "stream"]
        assert not {"mirostat", "truncation_side", "functions", "x-api-dialect"} & {*names}
        folded = re.findall(r"<summary>(.*?)</summary>", section, re.DOTALL)
        assert any("mirostat_tau" in each for each in folded)
        assert [each.strip() for each in folded[-2:-1]] == ["Rejected"]
        assert f'"{first}": ' in unescape(opened)
        response = re.findall(r'<pre tabindex="0"><code>(.*?)</code>', opened, re.DOTALL)[0]
        assert json.loads(unescape(response))["usage"]["completion_tokens"] == 40
    # The schemas of other tools have the same order.
    [*names] = page()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert names[:3] == ["model", "prompt", "max_tokens"]


def test_every_error_code_has_a_page() -> None:
    classes = [errors.ApiError]
    for each in classes:
        classes += each.__subclasses__()
    dynamic = {*_CODES.values(), FailedLogins.code, UnpaidRequests.code}
    codes = {each.code for each in classes} | dynamic
    assert {path.rpartition("/")[2] for path in reference() if "/errors/" in path} == codes | {
        "budget_exceeded",
        "insufficient_credits",
    }
    text = reference()["0/docs/errors/context_length_exceeded"]
    assert "Shorten the prompt" in text
    assert "422 in the style of mistralrs" in text


def test_operation_ids_are_unique() -> None:
    names = [
        operation["operationId"]
        for page in pages()
        for methods in page["paths"].values()
        for operation in methods.values()
    ]
    assert len(names) == len(set(names))


def test_every_schema_is_valid() -> None:
    for page in pages():
        for schema in page["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        text = json.dumps(page)
        assert "HTTPValidationError" not in text
        named = set(re.findall(r"#/components/schemas/(\w+)", text))
        assert named <= set(page["components"]["schemas"])


def test_headers_of_limits_are_described() -> None:
    families = {*_FAMILY_OF_DAY.values(), *(family for family, _ in _FAMILIES)}
    assert {name for each in families for name in _names(each, False)} <= {*RESPONSE_HEADERS}


def test_refusal_by_a_limit_fits_its_description() -> None:
    body = {
        "message": "The limit of 50 requests per minute of the key 'key_1' is reached. "
        "It resets in 12.3 s.",
        "type": "rate_limit_error",
        "param": None,
        "code": "requests",
        "limit": "requests_per_minute",
        "scope": "key",
        "limit_value": 50,
        "used": 50,
        "reset_seconds": 12.25,
        "availability": {
            "reason": "requests",
            "model": "m",
            "tier": "default",
            "position": None,
            "estimated_wait_seconds": 12.25,
        },
    }
    schema = {"$ref": "#/components/schemas/Error", "components": page()["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"error": body})
    assert not validator.is_valid({"error": body | {"used": "all"}})
