"""The suite must find defects that are planted into the processes.

All of them are in the same deployment. They are armed one by one, or together if that reveals both.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import uvloop

from contract import keys
from tests.failures.chaos.deployment import Size
from tests.failures.chaos.faults import FaultInjector, Kind
from tests.failures.chaos.history import Behaviour, Ending, History
from tests.failures.chaos.load import BEHAVIOURS, Load
from tests.failures.chaos.plants import Plant
from tests.failures.chaos.run import Disturb, Options, Report, Round, Run, running
from tests.support.stack import MODEL

GREEDY: Final = "greedy"
LINES: Final = "sluice_gateway_batch_lines_running"
BATCH_LINES: Final = 24
LINE_SECONDS: Final = 0.5
"""Part of the time that a line runs."""
TALKATIVE: Final = "chat, tools, n"
"""A recipe most of whose tokens are arguments of calls."""
CLIENTS: Final = 8
"""More than the five requests of which some defects affect one."""
CUT: Final = 2
"""The least number of streams that a killed worker interrupts."""
OPTIONS: Final = Options(
    size=Size(gateways=1, workers=2),
    clocked=(),
    clients=CLIENTS,
    behaviours={
        behaviour: BEHAVIOURS[behaviour] for behaviour in (Behaviour.STREAM, Behaviour.WHOLE)
    },
    is_planted=True,
    is_hasty=True,
    recipes=(GREEDY, TALKATIVE),
)
PATIENCE_SECONDS: Final = 8.0
"""Of clients whose responses no worker resumes: four times a worker's lease."""
LEFT_OVER_SECONDS: Final = 2.0
"""How long a leftover that stays is waited for."""
HUNG_SECONDS: Final = 60.0
"""How long anything else is waited for; only another defect takes that long."""

FOUND: Final[dict[Plant, tuple[str, str]]] = {
    Plant.CALL_AGAIN: ("right answers", ""),
    Plant.READ_ANEW: ("right answers", ""),
    Plant.OTHER_CALL_IDS: ("right answers", r"call \d+ begins with"),
    Plant.CHANGE_TOKENS: ("right answers", ""),
    Plant.DELIVER_TWICE: ("right answers", ""),
    Plant.CHARGE_MORE: ("one record", "its rows count"),
    Plant.NEVER_RECLAIM: ("ends", ""),
    Plant.NEVER_DROP: ("nothing left over", "job: "),
    Plant.LEAVE_TASKS: ("nothing left over", "_wait_for_ever"),
    Plant.RESERVE_TWICE: ("nothing left over", r"open: [^.]+\.2$"),
    Plant.SKIP_SETTLING: ("nothing left over", r"open: [^.]+$"),
    Plant.END_UNSETTLED: ("money", r"its client has the whole response for \d+, its rows cost 0"),
    Plant.RUN_LINES_TWICE: ("one record", "of no line"),
}
"""The invariant that each defect breaks, and the reported text.

The text is empty unless another defect of the same round breaks the same invariant.
"""
SLOW: Final = frozenset({Plant.CALL_AGAIN, Plant.READ_ANEW, Plant.NEVER_DROP})
"""Defects with a round of their own. Tests of the parsers and of the queue find them, too."""


class Disturber:
    """Kills workers at the moments at which defects must have an effect."""

    def __init__(self, run: Run) -> None:
        self._run = run
        (self._gateway,) = run.deployment.named("gateway")
        self._workers = run.deployment.named("worker")
        self._redis = run.books.redis

    async def not_at_all(self, load: Load, _injector: FaultInjector) -> None:
        """Let each client send one request."""
        while len(load.histories) < CLIENTS:
            await asyncio.sleep(0)

    async def in_ends(self, _load: Load, injector: FaultInjector) -> None:
        """Wait until a gateway has died when a response ended."""
        starts = self._gateway.starts
        while self._gateway.starts == starts:
            await asyncio.sleep(0.02)
        await injector.over()

    async def in_lines(self, _load: Load, injector: FaultInjector) -> None:
        """Kill the gateway while it runs lines of batches."""
        while not await self._run.metric(self._gateway, LINES):
            await asyncio.sleep(0.02)
        await asyncio.sleep(LINE_SECONDS)
        await injector.kill(self._gateway, Kind.KILL_GATEWAY)

    async def in_texts(self, load: Load, injector: FaultInjector) -> None:
        """Kill a worker in the middle of some texts."""
        await self._cut(load, injector, lambda history: history.transcript.tokens >= 10)

    async def in_calls(self, load: Load, injector: FaultInjector) -> None:
        """Kill a worker in the middle of some calls."""
        await self._cut(load, injector, _is_in_a_call)

    async def in_texts_and_leave(self, load: Load, injector: FaultInjector) -> None:
        """Kill a worker in the middle of some texts, and disconnect their clients."""
        await self.in_texts(load, injector)
        load.leave()

    async def in_everything(self, load: Load, injector: FaultInjector) -> None:
        """Do all of these."""
        await self.in_calls(load, injector)
        await injector.over()
        await self.in_texts_and_leave(load, injector)

    async def _cut(
        self, load: Load, injector: FaultInjector, is_middle: Callable[[History], bool]
    ) -> None:
        """Kill workers until one has interrupted enough streams."""
        while True:
            await asyncio.sleep(0.02)
            for worker in self._workers:
                if worker.is_busy or not worker.was_ready:
                    continue
                pid = worker.pid
                if await self._streams(load, is_middle, pid) >= CUT:
                    await injector.kill(worker)
                    # Some may have ended just before.
                    if await self._streams(load, is_middle, pid) >= CUT:
                        return

    async def _streams(self, load: Load, is_middle: Callable[[History], bool], pid: int) -> int:
        """Return the number of unfinished streams whose jobs this process has claimed."""
        found = 0
        for history in load.histories:
            if history.ending is Ending.UNFINISHED and is_middle(history):
                key = keys.job(MODEL, f"{history.request_id}-0")
                worker: Any = await self._redis.hget(key, "worker")
                found += f"-{pid}-" in (worker or b"").decode()
        return found


def _is_in_a_call(history: History) -> bool:
    return any(
        call.arguments for each in history.transcript.choices.values() for call in each.calls
    )


def _rounds(run: Run, *, is_long: bool) -> list[Round]:
    """Return a round for each group of defects that do not hide each other, and one without any."""
    disturber = Disturber(run)
    slow = [
        _round(disturber.in_calls, TALKATIVE, Plant.CALL_AGAIN),
        _round(disturber.in_calls, TALKATIVE, Plant.READ_ANEW),
        _round(disturber.in_texts_and_leave, GREEDY, Plant.NEVER_DROP),
    ]
    quick = [
        Round(disturb=disturber.in_everything),
        _round(disturber.in_texts, GREEDY, Plant.CHANGE_TOKENS, Plant.CHARGE_MORE),
        _round(disturber.in_texts, GREEDY, Plant.NEVER_RECLAIM, Plant.DELIVER_TWICE),
        _round(disturber.in_ends, GREEDY, Plant.END_UNSETTLED, only=Behaviour.REPEATING),
        _round(
            disturber.in_lines,
            GREEDY,
            Plant.RUN_LINES_TWICE,
            only=Behaviour.REPEATING,
            lines=BATCH_LINES,
        ),
        _round(
            disturber.not_at_all,
            TALKATIVE,
            Plant.OTHER_CALL_IDS,
            Plant.LEAVE_TASKS,
            Plant.RESERVE_TWICE,
            Plant.SKIP_SETTLING,
        ),
    ]
    # The leftovers of the last one take a while to expire.
    return [*quick, *slow] if is_long else quick


def _round(
    disturb: Disturb, recipe: str, *plants: Plant, only: Behaviour | None = None, lines: int = 0
) -> Round:
    invariants = {FOUND[plant][0] for plant in plants}
    return Round(
        disturb=disturb,
        plants=plants,
        behaviours=None if only is None else {only: 1},
        lines=lines,
        recipes=(recipe,),
        patience=PATIENCE_SECONDS if "ends" in invariants else HUNG_SECONDS,
        settle_seconds=LEFT_OVER_SECONDS if "nothing left over" in invariants else HUNG_SECONDS,
    )


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> dict[Plant | None, Report]:
    """The report of the round of each defect, and of the round without any."""

    async def all_rounds() -> dict[Plant | None, Report]:
        found: dict[Plant | None, Report] = {}
        async with running(OPTIONS) as run:
            for each in _rounds(run, is_long=request.config.getoption("--long")):
                report = await run.go(each)
                shown: list[Plant | None] = [*each.plants]
                found |= dict.fromkeys(shown or [None], report)
        return found

    return uvloop.run(all_rounds())


@pytest.mark.parametrize(
    "plant",
    [pytest.param(each, marks=pytest.mark.long if each in SLOW else ()) for each in Plant],
)
def test_planted_fault_is_found(reports: dict[Plant | None, Report], plant: Plant) -> None:
    report, (invariant, pattern) = reports[plant], FOUND[plant]
    assert any(
        violation.invariant == invariant and re.search(pattern, violation.what)
        for violation in report.violations
    ), report.text()


def test_nothing_is_reported_without_a_planted_fault(reports: dict[Plant | None, Report]) -> None:
    assert not reports[None].violations, reports[None].text()
