"""`make chaos` as a test: each kind of fault once, or a quarter of an hour on each database.

In the long form, batches run beside the requests, and a third run has a cluster of Redis.
"""

import pytest
import uvloop

from tests.failures.chaos.faults import Kind
from tests.failures.chaos.run import Options, Report, completed, run
from tests.support.redis_server import SYSTEM

pytestmark = [pytest.mark.load, pytest.mark.timeout(1_800)]

LONG_SECONDS = 15 * 60.0
LONG_LINES = 20_000
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
    "message",
    "response",
)
"""Of the default run: a few requests for every part of a response, and each way to end."""
CLOCKED = ("gateway",)
"""Roles whose clock the default run sets; it injects each fault once."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("sqlite", 7, False), marks=pytest.mark.long),
        ("postgresql", 8, False),
        # Six servers with proxies: beside other tests, two cores are too few to refuse in time.
        pytest.param(("postgresql", 9, SYSTEM is not None), marks=pytest.mark.long),
    ],
    ids=lambda each: f"{each[0]}, {'a cluster' if each[2] else 'one Redis'}",
)
def report(request: pytest.FixtureRequest) -> Report:
    """The report of one run."""
    database, seed, is_cluster = request.param
    if request.config.getoption("--long"):
        options = Options(
            seed=seed,
            database=database,
            is_cluster=is_cluster,
            seconds=LONG_SECONDS,
            clients=CLIENTS,
            lines=LONG_LINES,
        )
    else:
        options = Options(
            seed=seed,
            database=database,
            is_cluster=is_cluster,
            seconds=None,
            every=EVERY_SECONDS,
            clients=FEW_CLIENTS,
            is_hasty=True,
            clocked=CLOCKED,
            recipes=RECIPES,
            completions=COMPLETIONS + 1,
        )
    return uvloop.run(run(options))


@pytest.mark.slow
def test_every_invariant_holds(report: Report) -> None:
    print(report.figures.table())  # noqa: T201  (figures for pytest -rP)
    assert not report.violations, report.text()


@pytest.mark.slow
def test_run_has_enough_requests_and_faults(report: Report) -> None:
    done = {fault.kind for fault in report.injector.log}
    assert done == set(Kind) - report.injector.skipped.keys()
    assert completed(report.histories) > COMPLETIONS
    assert len(report.lines) == report.options.lines
    assert report.figures.tokens > 1_000
