"""The kinds of Redis and of databases that Sluice supports, and which of them a default run uses.

A test runs on the usual kind. Tests of what depends on the kind, such as one history of each Lua
script, are marked to run on every one. Long runs use every kind everywhere.
"""

from collections.abc import Iterable
from typing import Final

import pytest
from _pytest.mark import ParameterSet

from tests.support.redis_server import BUNDLED, SYSTEM

REDIS_KINDS: Final = {
    "redis-6.2": (BUNDLED, False),
    "redis-6.2-cluster": (BUNDLED, True),
    "redis-7": (SYSTEM, False),
    "redis-7-cluster": (SYSTEM, True),
}
"""Executable, and whether it runs in cluster mode, which restricts scripts."""
DATABASE_KINDS: Final = ("sqlite", "postgresql")


every_redis: Final = pytest.mark.parametrize("redis_kind", REDIS_KINDS, indirect=True)
every_database: Final = pytest.mark.parametrize("database_kind", DATABASE_KINDS, indirect=True)


def histories(seeds: int) -> pytest.MarkDecorator:
    """Run one random history on each kind of Redis; in long runs, every history on every kind."""
    return pytest.mark.parametrize(
        ("redis_kind", "seed"),
        [
            pytest.param(kind, seed, marks=() if seed == number else pytest.mark.long)
            for number, kind in enumerate(REDIS_KINDS)
            for seed in range(seeds)
        ],
        indirect=["redis_kind"],
    )


def _parameters(kinds: Iterable[str], *, usual: str) -> list[ParameterSet]:
    """Return the parameters of a fixture that uses unusual kinds only in long runs."""
    return [pytest.param(kind, marks=() if kind == usual else pytest.mark.long) for kind in kinds]


REDIS_PARAMETERS: Final = _parameters(
    # The strictest: in cluster mode, Redis rejects scripts that touch a second slot.
    REDIS_KINDS,
    usual="redis-6.2-cluster" if SYSTEM is None else "redis-7-cluster",
)
DATABASE_PARAMETERS: Final = _parameters(DATABASE_KINDS, usual="sqlite")
