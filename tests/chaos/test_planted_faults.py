"""A suite that finds nothing proves nothing: defects that are put into the processes must be found.

All of them are in the same deployment, and armed one after the other, or at once where that shows both.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import uvloop

from contract import keys
from tests.chaos.deployment import Size
from tests.chaos.faults import Havoc
from tests.chaos.load import MANNERS, Load
from tests.chaos.plants import Plant
from tests.chaos.run import Disturb, Options, Report, Round, Run, running
from tests.chaos.story import Ending, Manner, Story
from tests.support.stack import MODEL

GREEDY: Final = "greedy"
TALKATIVE: Final = "chat, tools, n"
"""A recipe most of whose tokens are arguments of calls."""
CLIENTS: Final = 8
"""More than the five requests, one of which some defects befall."""
CUT: Final = 2
"""Streams at least that a killed worker leaves in the middle."""
OPTIONS: Final = Options(
    size=Size(gateways=1, workers=2),
    clocked=(),
    clients=CLIENTS,
    manners={manner: MANNERS[manner] for manner in (Manner.STREAM, Manner.WHOLE)},
    is_planted=True,
    is_hasty=True,
    recipes=(GREEDY, TALKATIVE),
)
PATIENCE_SECONDS: Final = 8.0
"""Of clients whose answers nobody resumes: four times a worker's lease."""
LEFT_OVER_SECONDS: Final = 2.0
"""How long what will not go is waited for."""
HUNG_SECONDS: Final = 60.0
"""How long anything else is waited for; only another defect takes that long."""

FOUND: Final[dict[Plant, tuple[str, str]]] = {
    Plant.CALL_AGAIN: ("right answers", ""),
    Plant.READ_ANEW: ("right answers", ""),
    Plant.OTHER_CALL_IDS: ("right answers", r"call \d+ begins with"),
    Plant.CHANGE_TOKENS: ("right answers", ""),
    Plant.TELL_TWICE: ("right answers", ""),
    Plant.CHARGE_MORE: ("one record", "its rows count"),
    Plant.NEVER_RECLAIM: ("ends", ""),
    Plant.NEVER_DROP: ("nothing left over", "job: "),
    Plant.LEAVE_TASKS: ("nothing left over", "_wait_for_ever"),
    Plant.RESERVE_TWICE: ("nothing left over", r"open: [^.]+\.2$"),
    Plant.SKIP_SETTLING: ("nothing left over", r"open: [^.]+$"),
}
"""The invariant that each defect breaks, and how that is reported where another one of its round breaks the same."""


class Disturber:
    """Kills workers at the moments at which defects must show."""

    def __init__(self, run: Run) -> None:
        self._workers = run.deployment.named("worker")
        self._redis = run.books.redis

    async def not_at_all(self, load: Load, _havoc: Havoc) -> None:
        """Let each client ask once."""
        while len(load.stories) < CLIENTS:
            await asyncio.sleep(0)

    async def in_texts(self, load: Load, havoc: Havoc) -> None:
        """Kill a worker in the middle of some texts."""
        await self._cut(load, havoc, lambda story: story.transcript.tokens >= 10)

    async def in_calls(self, load: Load, havoc: Havoc) -> None:
        """Kill a worker in the middle of some calls."""
        await self._cut(load, havoc, _is_in_a_call)

    async def in_texts_and_leave(self, load: Load, havoc: Havoc) -> None:
        """Kill a worker in the middle of some texts, and let their clients go away."""
        await self.in_texts(load, havoc)
        load.leave()

    async def in_everything(self, load: Load, havoc: Havoc) -> None:
        """Do all of this."""
        await self.in_calls(load, havoc)
        await havoc.over()
        await self.in_texts_and_leave(load, havoc)

    async def _cut(self, load: Load, havoc: Havoc, is_middle: Callable[[Story], bool]) -> None:
        """Kill workers until one has left streams in the middle."""
        while True:
            await asyncio.sleep(0.02)
            for worker in self._workers:
                if worker.is_busy or not worker.was_ready:
                    continue
                pid = worker.pid
                if await self._streams(load, is_middle, pid) >= CUT:
                    await havoc.kill_worker(worker)
                    # Some may have come to their end just before.
                    if await self._streams(load, is_middle, pid) >= CUT:
                        return

    async def _streams(self, load: Load, is_middle: Callable[[Story], bool], pid: int) -> int:
        """Return how many streams are in the middle whose jobs Redis gives to a process."""
        found = 0
        for story in load.stories:
            if story.ending is Ending.UNFINISHED and is_middle(story):
                key = keys.job(MODEL, f"{story.request_id}-0")
                worker: Any = await self._redis.hget(key, "worker")
                found += f"-{pid}-" in (worker or b"").decode()
        return found


def _is_in_a_call(story: Story) -> bool:
    return any(call.arguments for each in story.transcript.choices.values() for call in each.calls)


def _rounds(run: Run) -> list[Round]:
    """Return what makes the defects show; those of one round do not hide each other. Without any, all of it."""
    disturber = Disturber(run)
    return [
        Round(disturb=disturber.in_everything),
        _round(disturber.in_calls, TALKATIVE, Plant.CALL_AGAIN),
        _round(disturber.in_calls, TALKATIVE, Plant.READ_ANEW),
        _round(disturber.in_texts, GREEDY, Plant.CHANGE_TOKENS, Plant.CHARGE_MORE),
        _round(disturber.in_texts, GREEDY, Plant.NEVER_RECLAIM, Plant.TELL_TWICE),
        _round(
            disturber.not_at_all,
            TALKATIVE,
            Plant.OTHER_CALL_IDS,
            Plant.LEAVE_TASKS,
            Plant.RESERVE_TWICE,
            Plant.SKIP_SETTLING,
        ),
        # Last: what it leaves takes a while to go.
        _round(disturber.in_texts_and_leave, GREEDY, Plant.NEVER_DROP),
    ]


def _round(disturb: Disturb, recipe: str, *plants: Plant) -> Round:
    invariants = {FOUND[plant][0] for plant in plants}
    return Round(
        disturb=disturb,
        plants=plants,
        recipes=(recipe,),
        patience=PATIENCE_SECONDS if "ends" in invariants else HUNG_SECONDS,
        settle_seconds=LEFT_OVER_SECONDS if "nothing left over" in invariants else HUNG_SECONDS,
    )


@pytest.fixture(scope="module")
def reports() -> dict[Plant | None, Report]:
    """What came of each defect, and of none."""

    async def all_rounds() -> dict[Plant | None, Report]:
        found: dict[Plant | None, Report] = {}
        async with running(OPTIONS) as run:
            for each in _rounds(run):
                report = await run.go(each)
                shown: list[Plant | None] = [*each.plants]
                found |= dict.fromkeys(shown or [None], report)
        return found

    return uvloop.run(all_rounds())


@pytest.mark.parametrize("plant", Plant)
def test_planted_fault_is_found(reports: dict[Plant | None, Report], plant: Plant) -> None:
    report, (invariant, pattern) = reports[plant], FOUND[plant]
    assert any(
        violation.invariant == invariant and re.search(pattern, violation.what)
        for violation in report.violations
    ), report.text()


def test_nothing_is_found_where_nothing_was_planted(reports: dict[Plant | None, Report]) -> None:
    assert not reports[None].violations, reports[None].text()
