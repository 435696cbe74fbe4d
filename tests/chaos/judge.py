"""What must hold when everything has settled, and what did not."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.tenancy.usage_record import Outcome
from tests.chaos.faults import Fault, Kind
from tests.chaos.machine import Standstill
from tests.chaos.story import Ending, Manner, Story, Stretch
from tests.proofs.ledger import Row

GRACE_SECONDS: Final = 1.0
"""How far the times of a fault and of what it does to a client may be apart."""

_BREAKS_CONNECTIONS: Final = frozenset(
    {Kind.KILL_GATEWAY, Kind.RESTART_GATEWAY, Kind.STOP_GATEWAY, Kind.PARTITION_GATEWAY}
)
"""Faults of a gateway in which it may end a client's connection."""

_AWAY: Final = _BREAKS_CONNECTIONS | {Kind.KILL_REDIS, Kind.STOP_REDIS, Kind.LOSSY_NETWORK}
"""Faults that nothing gets past while they last: those of Redis, and of a stream's own gateway."""
REFUSE_SECONDS: Final = 2.0
"""In which a request is refused while Redis is away."""
RESUME_SECONDS: Final = 5.0
"""In which a stream goes on after its worker was lost, each time."""
MARGIN_SECONDS: Final = 5.0
"""What a crowded machine needs, to start a process above all."""


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold."""

    invariant: str
    what: str
    story: Story | None = None


def judge_stories(
    stories: Iterable[Story], faults: Sequence[Fault], standstills: Sequence[Standstill] = ()
) -> list[Violation]:
    """Return what clients were told that they must not be told, or were not told."""
    found = []
    for story in stories:
        found += [Violation("right answers", what, story) for what in story.complaints]
        if story.ending is Ending.HUNG:
            found.append(Violation("ends", "nothing ended it", story))
        elif story.transcript.error is not None:
            what = f"it failed with {story.transcript.error.get('code')}"
            found.append(Violation("resumes", what, story))
        elif story.farewell and not _is_excused(story.stretches[-1], faults):
            what = f"its gateway gave it up with {story.farewell}"
            found.append(Violation("resumes", what, story))
        if story.longest_gap > (allowed := _longest_pause(story, faults, standstills)):
            what = f"a pause of {story.longest_gap:.1f} s, of which {allowed:.1f} s are explained"
            found.append(Violation("soon", what, story))
        for stretch in story.stretches:
            seconds = stretch.ended - stretch.began
            if stretch.code == "store_unavailable" and seconds > _longest_refusal(
                stretch, faults, standstills
            ):
                what = f"{stretch.gateway} refused it after {seconds:.1f} s"
                found.append(Violation("soon", what, story))
            if stretch.is_broken and not _is_excused(stretch, faults):
                what = f"{stretch.gateway} broke the connection, and nothing was done to it"
                found.append(Violation("connections", what, story))
    return found


def _longest_pause(
    story: Story, faults: Sequence[Fault], standstills: Sequence[Standstill]
) -> float:
    """Return how long a stream may have paused, given what happened meanwhile."""
    began, ended = story.longest_gap_began, story.longest_gap_began + story.longest_gap
    gateways = {stretch.gateway for stretch in story.stretches}
    allowed = MARGIN_SECONDS
    for standstill in standstills:
        overlap = min(ended, standstill.ended) - max(began - RESUME_SECONDS, standstill.began)
        if overlap > 0:
            # Leases run out meanwhile.
            allowed += overlap + RESUME_SECONDS
    for fault in faults:
        overlap = min(ended, fault.ended or ended) - max(began - RESUME_SECONDS, fault.began)
        if overlap < 0:
            continue
        if fault.kind in _AWAY and fault.target in {"redis", *gateways}:
            allowed += overlap
        allowed += RESUME_SECONDS
    return allowed


def _longest_refusal(
    stretch: Stretch, faults: Sequence[Fault], standstills: Sequence[Standstill]
) -> float:
    """Return how long a refusal without Redis may have taken, given what happened meanwhile."""
    stops = [
        (fault.began, fault.ended or stretch.ended)
        for fault in faults
        if fault.target == stretch.gateway and fault.kind in _BREAKS_CONNECTIONS
    ]
    overlaps = (
        min(stretch.ended, ended) - max(stretch.began, began)
        for began, ended in (*stops, *standstills)
    )
    return REFUSE_SECONDS + MARGIN_SECONDS + sum(each for each in overlaps if each > 0)


def _is_excused(stretch: Stretch, faults: Sequence[Fault]) -> bool:
    """Whether something was done to a connection's gateway that may end connections."""
    return any(
        fault.target == stretch.gateway
        and fault.kind in _BREAKS_CONNECTIONS
        and fault.began <= stretch.ended + GRACE_SECONDS
        and (not fault.ended or fault.ended >= stretch.began - GRACE_SECONDS)
        for fault in faults
    )


def judge_rows(
    stories: Iterable[Story], rows: Sequence[Row], faults: Sequence[Fault] = ()
) -> list[Violation]:
    """Return where the ledger does not say what clients were told."""
    by_request: dict[str, list[Row]] = {}
    for row in rows:
        by_request.setdefault(row["request_id"].partition(".")[0], []).append(row)
    twice = [
        name for name, times in Counter(row["request_id"] for row in rows).items() if times > 1
    ]
    found = [Violation("one record", f"{name} has several rows") for name in twice]
    for story in stories:
        if story.request_id:
            own = by_request.get(story.request_id, [])
            found += [
                Violation("one record", what, story) for what in _judge_row(story, own, faults)
            ]
    return found


def _judge_row(story: Story, rows: Sequence[Row], faults: Sequence[Fault]) -> list[str]:
    if not rows:
        return ["it has no row in the ledger"]
    prompt = sum(row["prompt_tokens"] for row in rows)
    completion = sum(row["completion_tokens"] for row in rows)
    if story.ending is Ending.COMPLETE:
        found = []
        usage = story.transcript.usage
        if usage is not None and (prompt, completion) != tuple(usage.values()):
            found.append(f"its rows count {prompt} and {completion} tokens, its client {usage}")
        outcomes = [row["outcome"] for row in rows]
        if Outcome.FINISHED not in outcomes and not _died_before_it_could_settle(story, faults):
            found.append(f"its client has everything, its outcome is {outcomes}")
        return found
    if story.ending is Ending.LEFT and completion < story.transcript.tokens:
        outcomes = [row["outcome"] for row in rows]
        if Outcome.LOST not in outcomes:
            reported = story.transcript.tokens
            return [f"its client had {reported} tokens, its rows count {completion} ({outcomes})"]
    return []


def _died_before_it_could_settle(story: Story, faults: Sequence[Fault]) -> bool:
    """Whether Redis was away when a request ended, and its gateway was killed before it came back.

    Then nobody is left who knows that the client has everything: it is recorded as lost, and costs nothing.
    """
    gateways = {stretch.gateway for stretch in story.stretches}
    return any(
        away.kind in _AWAY
        and away.target in {"redis", *gateways}
        and away.began - GRACE_SECONDS <= story.ended <= (away.ended or story.ended) + GRACE_SECONDS
        and killed.kind is Kind.KILL_GATEWAY
        and killed.target in gateways
        and story.ended - GRACE_SECONDS
        <= killed.began
        <= (away.ended or killed.began) + MARGIN_SECONDS
        for away in faults
        for killed in faults
    )


def judge_growth(
    name: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    allowed: Mapping[str, float],
) -> list[Violation]:
    """Return what a process holds more of than it may after everything has settled."""
    return [
        Violation("nothing left over", f"{name}: {what} went from {before.get(what, 0)} to {value}")
        for what, value in after.items()
        if value > before.get(what, 0) + allowed.get(what, 0)
    ]


def judge_manners(stories: Collection[Story]) -> list[Violation]:
    """Return manners none of whose requests was completed: such a run proves nothing about them."""
    asked = {story.manner for story in stories} - completed_manners(stories)
    return [Violation("all kinds", f"no request was completed: {each}") for each in asked]


def completed_manners(stories: Collection[Story]) -> set[Manner]:
    """Return the manners of which a request was completed, as far as its client wanted it to be."""
    done = (Ending.COMPLETE, Ending.LEFT, Ending.CANCELLED, Ending.DENIED)
    return {story.manner for story in stories if story.ending in done}
