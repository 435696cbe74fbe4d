"""The targets: the deployment with the real engine, and a separate one without a model."""

from collections.abc import Iterator

import pytest

from tests.support.deployment import DEPLOYMENT, LEASE_SECONDS, MAX_SEQUENCES
from tests.support.stack import Stack, running_stack

REAL, SCRIPTED = DEPLOYMENT, "scripted"
"""Fixtures; tests select an engine by their names."""


@pytest.fixture(scope="package")
def scripted() -> Iterator[Stack]:
    """Two gateways and an engine without a model, which costs almost no time."""
    with running_stack() as stack:
        for name in ("gateway-1", "gateway-2"):
            stack.start_gateway(name)
        stack.start_worker(
            SLUICE_ENGINE=SCRIPTED,
            SLUICE_SCRIPTED_STEP_SECONDS="0.002",
            SLUICE_MAX_SEQUENCES=str(MAX_SEQUENCES),
            SLUICE_LEASE_SECONDS=str(LEASE_SECONDS),
        )
        yield stack


@pytest.fixture
def target(request: pytest.FixtureRequest, engine: str) -> Stack:
    """The deployment with an engine; at the end all of it must still be running and sound."""
    stack: Stack = request.getfixturevalue(engine)
    return stack
