"""A run of everything that `make chaos` does: each kind of fault once, or a quarter of an hour on each database."""

import pytest
import uvloop

from tests.chaos.faults import Kind
from tests.chaos.run import Options, Report, completed, run

pytestmark = [pytest.mark.load, pytest.mark.timeout(1_800)]

LONG_SECONDS = 15 * 60.0
EVERY_SECONDS = 1.0
CLIENTS = 12
FEW_CLIENTS = 7
"""Of the default run."""
COMPLETIONS = 30
RECIPES = (
    "seeded, n",
    "several prompts",
    "ends by itself",
    "echo, log-probabilities",
    "bytes, log-probabilities",
    "best of, log-probabilities",
    "chat, bytes",
    "chat, reasoning",
    "chat, reasoning hidden, log-probabilities",
    "chat, tools, n",
    "chat, tools, log-probabilities",
    "chat, tool required",
    "chat, functions",
)
"""Of the default run, which has time for a request or two of each: every part of an answer, and how it may end."""
CLOCKED = ("gateway",)
"""Whose clock the default run sets, of which each fault happens once."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(("sqlite", 7), marks=pytest.mark.long), ("postgresql", 8)],
    ids=lambda pair: pair[0],
)
def report(request: pytest.FixtureRequest) -> Report:
    """What one run came to."""
    database, seed = request.param
    if request.config.getoption("--long"):
        options = Options(seed=seed, database=database, seconds=LONG_SECONDS, clients=CLIENTS)
    else:
        options = Options(
            seed=seed,
            database=database,
            seconds=None,
            every=EVERY_SECONDS,
            clients=FEW_CLIENTS,
            is_hasty=True,
            clocked=CLOCKED,
            recipes=RECIPES,
            completions=COMPLETIONS + 1,
        )
    return uvloop.run(run(options))


def test_every_invariant_holds(report: Report) -> None:
    print(report.figures.table())  # noqa: T201  (figures for whoever runs pytest with -rP)
    assert not report.violations, report.text()


def test_the_run_was_what_it_should_be(report: Report) -> None:
    done = {fault.kind for fault in report.havoc.log}
    assert done == set(Kind) - report.havoc.skipped.keys()
    assert completed(report.stories) > COMPLETIONS
    assert report.figures.tokens > 1_000
