"""A short run of everything that `make chaos` does, with the same seeds each time."""

import pytest
import uvloop

from tests.chaos.run import Options, Report, completed, run

pytestmark = [pytest.mark.load, pytest.mark.timeout(600)]

SECONDS = 36.0
LONG_SECONDS = 15 * 60.0
CLIENTS = 12


@pytest.fixture(scope="module", params=[("sqlite", 7), ("postgresql", 8)], ids=lambda pair: pair[0])
def report(request: pytest.FixtureRequest) -> Report:
    """What one run came to."""
    database, seed = request.param
    is_long = request.config.getoption("--long")
    options = Options(
        seed=seed,
        database=database,
        seconds=LONG_SECONDS if is_long else SECONDS,
        clients=CLIENTS,
    )
    return uvloop.run(run(options))


def test_every_invariant_holds(report: Report) -> None:
    print(report.figures.table())  # noqa: T201  (figures for whoever runs pytest with -rP)
    assert not report.violations, report.told()


def test_the_run_was_what_it_should_be(report: Report) -> None:
    assert len(report.havoc.log) >= SECONDS / 3 / 2
    assert completed(report.stories) > 50
    assert report.figures.tokens > 1_000
