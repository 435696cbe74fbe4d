"""A deployment for all tests of this folder, whose real-engine workers are killed."""

from collections.abc import Iterator

import pytest

from tests.failures.kills.killing import killable_stack
from tests.support.stack import Stack


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """A separate deployment, whose workers can be killed."""
    with killable_stack() as stack:
        yield stack
