"""Workers with the real engine that are killed, for the whole folder."""

from collections.abc import Iterator

import pytest

from tests.kills.killing import killable_stack
from tests.support.stack import Stack


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """A deployment of its own, whose workers can be killed."""
    with killable_stack() as stack:
        yield stack
