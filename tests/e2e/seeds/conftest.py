"""The model under the names that the documents of other APIs use."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import ENGINE_START_SECONDS
from tests.e2e.seeds.calling import Caller
from tests.support.processes import wait_until
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def named_model(stack: Stack, request: pytest.FixtureRequest) -> Iterator[str]:
    """Serve the tiny model under the name that a document uses, for one module of tests."""
    name: str = request.module.DOCUMENTED_MODEL
    stack.start_worker(
        name,
        ready_seconds=ENGINE_START_SECONDS,
        SLUICE_MODEL_NAME=name,
        SLUICE_MAX_SEQUENCES="8",
    )
    yield name
    stack.stop(name)


@pytest.fixture(scope="module")
def named_caller(stack: Stack, named_model: str) -> Iterator[Caller]:
    """A key that may use the model of the document only."""
    caller = Caller(stack.url, stack.key("documents", allowed_models=(named_model,)))
    wait_until(
        lambda: caller.get(f"/v1/models/{named_model}").status_code == 200,
        seconds=10,
        what=f"{named_model} being listed",
    )
    yield caller
    caller.close()
