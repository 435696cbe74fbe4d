"""Schemathesis sends requests to the management API: responses match the OpenAPI page.

503 is documented, but everything is available here.
"""

from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.records.scopes import Scope
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import Stack

EXAMPLES, LONG_EXAMPLES = 3, 50
"""Requests for each operation, in the short form and in the long one."""
LEAST_OPERATIONS = 50
LEAST_SERVED = 40
"""Requests that must be served, so that not only refusals are checked."""
TENANT = "fuzzed"
OTHERS = ("/v1/completions", "/v1/models")
"""Paths that other tests cover, with an engine."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def target(scripted: Stack) -> Stack:
    """Two gateways, and resources for the requests."""
    return scripted


@pytest.fixture(scope="module")
def key(target: Stack) -> str:
    """A key with all permissions."""
    return target.key(TENANT, scopes=frozenset(Scope))


@pytest.fixture(scope="module")
def things(target: Stack, key: str) -> dict[str, str]:
    """Ids by the names of path parameters."""
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=target.url, headers=headers, timeout=PATIENCE_SECONDS) as client:

        def make(path: str, **body: Any) -> str:
            answer = client.post(path, json=body)
            assert answer.is_success, answer.text
            return str(answer.json()["id"])

        return {
            "tenant_id": TENANT,
            "project_id": make("/v1/projects", name="a project"),
            "member_id": make("/v1/members", subject="ann", name="Ann", role="owner"),
            "key_id": make("/v1/keys", name="a key"),
            "plan_id": make(f"{target.operators}/admin/plans", id="basic", name="Basic"),
        }


@pytest.mark.slow
def test_management_api_matches_its_openapi_page(
    request: pytest.FixtureRequest, target: Stack, key: str, things: dict[str, str]
) -> None:
    examples = LONG_EXAMPLES if request.config.getoption("--long") else EXAMPLES
    urls = (target.url, target.operators)
    pages = [
        schemathesis.openapi.from_url(f"{url}/openapi.json", timeout=PATIENCE_SECONDS)
        for url in urls
    ]
    for page in pages:
        page.validate()
        assert page.raw_schema["openapi"].startswith("3.1")
    operations = [
        page[path][method.upper()]
        for page in pages
        for path, methods in page.raw_schema["paths"].items()
        for method in methods
        if path.startswith(("/admin", "/v1")) and not path.startswith(OTHERS)
    ]
    assert len(operations) >= LEAST_OPERATIONS
    statuses: Counter[int] = Counter()
    for operation in operations:
        _send(operation, key, things, statuses, examples=examples)
    assert sum(statuses[status] for status in (200, 201, 204)) >= LEAST_SERVED, statuses
    assert {400, 404} <= set(statuses)
    assert statuses[503] == 0
    log = target.log("gateway-1")
    assert "Traceback" not in log
    assert key[16:] not in log


def _send(
    operation: Any, key: str, things: dict[str, str], statuses: Counter[int], *, examples: int
) -> None:
    """Send requests to one operation, half of them about existing resources."""
    strategies = [
        operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode
    ]
    headers = {"authorization": f"Bearer {key}"}
    # A suspended owner gets no more requests.
    is_last = operation.path.endswith(":suspend")

    @seed(1)
    @settings(
        max_examples=examples,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(strategies), st.booleans())
    def send(case: Any, is_known: bool) -> None:
        if is_known and not is_last:
            known = {name: things[name] for name in case.path_parameters if name in things}
            case.path_parameters.update(known)
        response = case.call(headers=headers, timeout=PATIENCE_SECONDS)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    send()
