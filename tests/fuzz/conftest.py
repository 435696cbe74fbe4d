"""What is shot at: the deployment with the real engine, and one of its own without a model."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.deployment import LEASE_SECONDS, MAX_SEQUENCES, attach, place
from tests.support.stack import Stack, running_stack

REAL, SCRIPTED = "real", "scripted"
_HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Do not shoot at the real engine while a test of another process wants to be alone with it."""
    if not item.path.is_relative_to(_HERE) or REAL not in item.name:
        return (yield)  # pytest calls this hook for the tests of all folders.
    with place(item.config, alone=False):
        return (yield)


@pytest.fixture(scope="session")
def real(request: pytest.FixtureRequest) -> Stack:
    """Two gateways and the real engine, which other tests use, too."""
    return attach(request.config)


@pytest.fixture(scope="package")
def scripted() -> Iterator[Stack]:
    """Two gateways and an engine without a model, which costs next to nothing."""
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
    """The deployment with an engine; at the end all of it must still be there and sound."""
    stack: Stack = request.getfixturevalue(engine)
    return stack
