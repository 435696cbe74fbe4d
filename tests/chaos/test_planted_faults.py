"""A suite that finds nothing proves nothing: defects that are put into the processes must be found."""

from collections.abc import Iterator

import pytest
import uvloop

from tests.chaos.deployment import Size
from tests.chaos.faults import Havoc, Kind, Planned
from tests.chaos.load import MANNERS
from tests.chaos.run import Options, Report, run
from tests.chaos.story import Manner

pytestmark = pytest.mark.timeout(600)

PLAIN = {manner: MANNERS[manner] for manner in (Manner.STREAM, Manner.WHOLE)}

TALKATIVE = "chat, tools, n"
"""A recipe most of whose tokens are arguments of calls."""


def kill_workers(_: Havoc) -> Iterator[Planned]:
    """One worker after the other, each time the first that is well."""
    while True:
        yield Planned(Kind.KILL_WORKER, 0, 0)


def nothing(_: Havoc) -> Iterator[Planned]:
    """A fault that changes nothing: it is so short."""
    while True:
        yield Planned(Kind.SLOW_NETWORK, 0, 0)


def run_with(plant: str, plan: object, recipe: str = "greedy", *, seed: int = 1) -> Report:
    options = Options(
        seed=seed,
        # One kill may meet a worker that runs nothing.
        seconds=12 if plan is kill_workers else 5,
        size=Size(gateways=1, workers=2),
        clients=8,
        plan=plan,  # type: ignore[arg-type]
        manners=PLAIN,
        plant=plant,
        settle_seconds=20,
        patience=15,
        recipes=(recipe,),
    )
    return uvloop.run(run(options))


def assert_found(invariant: str, plant: str, plan: object, recipe: str = "greedy") -> None:
    """Run until a planted fault has been found, three times at most: its moment need not come in each run."""
    for seed in (1, 2, 3):
        report = run_with(plant, plan, recipe, seed=seed)
        if invariant in {violation.invariant for violation in report.violations}:
            return
    pytest.fail(report.told())


@pytest.mark.parametrize(
    ("plant", "plan"),
    [
        ("call told again after a cut", kill_workers),
        ("reading begins anew after a cut", kill_workers),
        ("call with another id", nothing),
    ],
)
def test_planted_fault_of_chats_is_found(plant: str, plan: object) -> None:
    assert_found("told right", plant, plan, TALKATIVE)


@pytest.mark.parametrize(
    ("plant", "plan", "expected"),
    [
        ("lease never reclaimed", kill_workers, "ends"),
        ("settlement skipped", nothing, "nothing left over"),
        ("token too many charged", nothing, "one record"),
        ("delta twice", nothing, "told right"),
        ("token changed on the way", kill_workers, "told right"),
        ("task left behind", nothing, "nothing left over"),
    ],
)
def test_planted_fault_is_found(plant: str, plan: object, expected: str) -> None:
    assert_found(expected, plant, plan)


@pytest.mark.parametrize("recipe", ["greedy", TALKATIVE])
def test_nothing_is_found_where_nothing_was_planted(recipe: str) -> None:
    report = run_with("", kill_workers, recipe)
    assert not report.violations, report.told()
