"""Schemathesis makes requests from the OpenAPI page: responses match the page."""

from collections import Counter
from itertools import islice
from typing import Any

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

from tests.failures.fuzz.conftest import REAL, SCRIPTED
from tests.failures.fuzz.soundness import check_sound
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.load]

REQUESTS = {
    "/v1/completions": 30,
    "/v1/completions:estimate": 15,
    "/v1/chat/completions": 50,
    "/v1/chat/completions:estimate": 15,
    "/tokenize": 15,
    "/detokenize": 15,
}
LONG_FACTOR = 20
LEAST_SERVED = 2
"""Requests to each path that must be served, so that not only refusals are checked."""

MOST_SEEDS = 20
"""Seeds of the requests, until so many were served."""

FEW = 4
MESSAGES = [{"role": "user", "content": "a"}]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


each_engine = pytest.mark.parametrize(
    "engine", [SCRIPTED, pytest.param(REAL, marks=pytest.mark.long)]
)
"""The gateway's code for responses is the same for each engine."""


@pytest.fixture
def page(target: Stack) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{target.url}/openapi.json", timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("path", REQUESTS)
@each_engine
def test_responses_match_the_openapi_page(
    request: pytest.FixtureRequest, target: Stack, page: schemathesis.BaseSchema, path: str
) -> None:
    factor = LONG_FACTOR if request.config.getoption("--long") else 1
    operation = page[path]["POST"]
    strategies = [
        operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode
    ]
    headers = {"authorization": f"Bearer {target.key()}"}

    @settings(
        max_examples=factor * REQUESTS[path],
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(strategies), st.booleans())
    def send(case: Any, is_brief: bool) -> None:
        if is_brief and isinstance(case.body, dict) and "completions" in path:
            # Many parameters at once nearly always contradict each other somewhere.
            subject = {"messages": MESSAGES} if "chat" in path else {"prompt": "a"}
            case.body = {**subject, **dict(islice(case.body.items(), FEW))}
        if isinstance(case.body, dict) and (is_brief or isinstance(case.body.get("model"), str)):
            # A made-up model would be unknown in every request, and no limit would let a request
            # run long.
            case.body.update(model=MODEL, max_tokens=2, n_predict=None, max_completion_tokens=None)
        response = case.call(headers=headers, timeout=PATIENCE_SECONDS)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    statuses: Counter[int] = Counter()
    # What hypothesis makes of a seed depends on the imported modules.
    for number in range(1, MOST_SEEDS + 1):
        seed(number)(send)()
        if statuses[200] >= LEAST_SERVED:
            break
    assert statuses[200] >= LEAST_SERVED, statuses
    check_sound(target)
