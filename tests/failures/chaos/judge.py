"""The invariants that must hold after a run, and their violations."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.platform.database.tables import LATE
from gateway.records.usage_record import Outcome
from tests.failures.chaos.faults import REDIS, Fault, Kind
from tests.failures.chaos.history import Behaviour, Ending, History, Stretch
from tests.failures.chaos.machine import Standstill
from tests.failures.proofs.ledger import Row

GRACE_SECONDS: Final = 1.0
"""Tolerance between the times of a fault and of its effect on a client."""

_BREAKS_CONNECTIONS: Final = frozenset(
    {Kind.KILL_GATEWAY, Kind.RESTART_GATEWAY, Kind.STOP_GATEWAY, Kind.PARTITION_GATEWAY}
)
"""Faults of a gateway that may break a client's connection."""

_AWAY: Final = _BREAKS_CONNECTIONS | {
    *(Kind.KILL_REDIS, Kind.STOP_REDIS, Kind.LOSSY_NETWORK, Kind.KILL_BEHIND, Kind.CUT_SERVER)
}
"""Faults that stop all progress while they last: those of Redis, and of the stream's gateway."""
NOT_FOUND: Final = "status 404"
"""How the error of a response begins that no gateway can find."""
CHANGED_ID: Final = "the id became"
"""How the error of a request begins that runs again under its idempotency key."""
REFUSE_SECONDS: Final = 2.0
"""Time limit of a refusal while Redis is unavailable."""
RESUME_SECONDS: Final = 5.0
"""Time limit for a stream to resume after each loss of its worker."""
MARGIN_SECONDS: Final = 5.0
"""Allowance for a busy machine, mostly for process starts."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant."""

    invariant: str
    what: str
    history: History | None = None


def judge_histories(
    histories: Iterable[History], faults: Sequence[Fault], standstills: Sequence[Standstill] = ()
) -> list[Violation]:
    """Return the differences between what clients received and what they should have received."""
    found = []
    for history in histories:
        found += [
            Violation("right answers", what, history)
            for what in history.errors
            if not (what.startswith(NOT_FOUND) and _is_only_in_gateway(history, faults))
            and not (what.startswith(NOT_FOUND) and _is_lost(history, faults))
            and not _runs_again(history, faults)
        ]
        if history.ending is Ending.HUNG:
            found.append(Violation("ends", "nothing ended it", history))
        elif history.transcript.error is not None:
            what = f"it failed with {history.transcript.error.get('code')}"
            found.append(Violation("resumes", what, history))
        elif history.final_error and not _is_excused(history.stretches[-1], faults):
            what = f"its gateway ended it with {history.final_error}"
            found.append(Violation("resumes", what, history))
        if history.longest_gap > (allowed := _longest_pause(history, faults, standstills)):
            what = f"a pause of {history.longest_gap:.1f} s, explained: {allowed:.1f} s"
            found.append(Violation("soon", what, history))
        for stretch in history.stretches:
            seconds = stretch.ended - stretch.began
            if stretch.code == "store_unavailable" and seconds > _longest_refusal(
                stretch, faults, standstills
            ):
                what = f"{stretch.gateway} refused it after {seconds:.1f} s"
                found.append(Violation("soon", what, history))
            if stretch.is_broken and not _is_excused(stretch, faults):
                what = f"{stretch.gateway} broke the connection without a fault"
                found.append(Violation("connections", what, history))
    return found


def _is_only_in_gateway(history: History, faults: Sequence[Fault]) -> bool:
    """Whether a gateway was killed with a stream that it could not store without Redis."""
    return any(
        stretch.is_broken
        and killed.kind is Kind.KILL_GATEWAY
        and killed.target == stretch.gateway
        and abs(killed.began - stretch.ended) < GRACE_SECONDS
        and _is_away(away, ())
        and away.began < killed.began
        and (not away.ended or away.ended > stretch.began)
        for stretch in history.stretches
        for killed in faults
        for away in faults
    )


def _longest_pause(
    history: History, faults: Sequence[Fault], standstills: Sequence[Standstill]
) -> float:
    """Return the longest pause of a stream that its faults explain."""
    began, ended = history.longest_gap_began, history.longest_gap_began + history.longest_gap
    gateways = {stretch.gateway for stretch in history.stretches}
    allowed = MARGIN_SECONDS
    for standstill in standstills:
        overlap = min(ended, standstill.ended) - max(began - RESUME_SECONDS, standstill.began)
        if overlap > 0:
            # Leases expire during the fault.
            allowed += overlap + RESUME_SECONDS
    for fault in faults:
        overlap = min(ended, fault.ended or ended) - max(began - RESUME_SECONDS, fault.began)
        if overlap < 0:
            continue
        if _is_away(fault, gateways):
            allowed += overlap
        allowed += RESUME_SECONDS
    return allowed


def _is_away(fault: Fault, gateways: Collection[str]) -> bool:
    """Whether a fault stops all progress of a request at these gateways."""
    return fault.kind in _AWAY and (fault.target.startswith(REDIS) or fault.target in gateways)


def _longest_refusal(
    stretch: Stretch, faults: Sequence[Fault], standstills: Sequence[Standstill]
) -> float:
    """Return the longest time that a refusal without Redis may take, given the faults meanwhile."""
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
    """Whether a fault of the gateway explains a broken connection."""
    return any(
        fault.target == stretch.gateway
        and fault.kind in _BREAKS_CONNECTIONS
        and fault.began <= stretch.ended + GRACE_SECONDS
        and (not fault.ended or fault.ended >= stretch.began - GRACE_SECONDS)
        for fault in faults
    )


def judge_rows(
    histories: Iterable[History], rows: Sequence[Row], faults: Sequence[Fault] = ()
) -> list[Violation]:
    """Return the differences between the ledger and what clients received."""
    by_request: dict[str, list[Row]] = {}
    for row in rows:
        by_request.setdefault(row["request_id"].partition(".")[0], []).append(row)
    twice = [
        name for name, times in Counter(row["request_id"] for row in rows).items() if times > 1
    ]
    found = [Violation("one record", f"{name} has several rows") for name in twice]
    found += [
        Violation("money", f"{row['request_id']} costs {row['cost_micros']} instead of {cost}")
        for row in rows
        # The cost of a later difference is a difference of two rounded costs.
        if LATE not in row["request_id"] and row["cost_micros"] != (cost := cost_of(row))
    ]
    for history in histories:
        if history.request_id:
            own = by_request.get(history.request_id, [])
            found += [
                Violation("one record", what, history) for what in _judge_row(history, own, faults)
            ]
            if (what := _unpaid(history, own, faults)) and not _runs_again(history, faults):
                found.append(Violation("money", what, history))
    return found


def judge_paid(histories: Collection[History], rows: Iterable[Row]) -> list[Violation]:
    """Return the paid rows of a tenant that none of its clients knows, if each knows its ids."""
    known = {"" if _has_changed(history) else history.request_id for history in histories}
    return [
        Violation("money", f"no client has the paid {row['request_id']} ({row['outcome']})")
        for row in rows
        if "" not in known and row["request_id"].partition(".")[0] not in known
        if row["cost_micros"]
    ]


def judge_totals(tenant: str, spent: Mapping[str, int]) -> list[Violation]:
    """Return the difference between the micro-dollars that a tenant has spent by each source."""
    if len(set(spent.values())) == 1:
        return []
    return [Violation("money", f"{tenant} has spent {dict(spent)}")]


def cost_of(row: Row) -> int:
    """Return the price of the tokens in a row that are not free, in micro-dollars."""
    prompt, cached, completion = (
        int(row[f"{kind}_tokens"] - row[f"free_{kind}_tokens"])
        for kind in ("prompt", "cached", "completion")
    )
    cost: int = (prompt - cached) * row["prompt_price"] + cached * row["cached_price"]
    cost += completion * row["completion_price"]
    cost += (row["audio_seconds"] - row["free_audio_seconds"]) * row["audio_price"]
    return -(-cost // 1_000_000)


def _unpaid(history: History, rows: Sequence[Row], faults: Sequence[Fault]) -> str:
    """Return how much of what a client received is in no row that it pays for.

    A gateway's death is the operator's loss, as far as no receipt of a worker is left, unless the
    client has the whole response: then its cost is what the response says, and no less.
    """
    outcomes = [row["outcome"] for row in rows]
    paid = sum(row["completion_tokens"] - row["free_completion_tokens"] for row in rows)
    received, cost = history.transcript.tokens, history.transcript.cost_micros
    if history.ending is Ending.COMPLETE:
        received = (history.transcript.usage or {}).get("completion_tokens", received)
    is_whole = history.ending is Ending.COMPLETE and Outcome.FINISHED not in outcomes
    if not rows or (is_whole and _gateway_died_before_settlement(history, faults)):
        return ""
    if history.ending is Ending.COMPLETE and cost is not None:
        charged = sum(row["cost_micros"] for row in rows)
        # The cost of each part of a response that was settled before its end is rounded up.
        if not cost <= charged < cost + len(rows):
            return f"its client has the whole response for {cost}, its rows cost {charged}"
    if paid >= received or (Outcome.LOST in outcomes and history.ending is not Ending.COMPLETE):
        return ""
    return f"its client received {received} tokens and pays for {paid} ({outcomes})"


def _judge_row(history: History, rows: Sequence[Row], faults: Sequence[Fault]) -> list[str]:
    if not rows:
        return [] if _is_lost(history, faults) else ["it has no row in the ledger"]
    completion = sum(row["completion_tokens"] for row in rows)
    if history.ending is Ending.COMPLETE:
        found = []
        outcomes = [row["outcome"] for row in rows]
        is_finished = Outcome.FINISHED in outcomes
        is_excused = not is_finished and _gateway_died_before_settlement(history, faults)
        for kind, used in (history.transcript.usage or {}).items():
            count = sum(row[kind] for row in rows)
            # What a lost attempt has processed is free if no client received it, and runs again.
            charged = count - sum(row[f"free_{kind}"] for row in rows)
            # Without a settlement, the counts are those that Redis had, perhaps of earlier tokens.
            if charged > used or (count < used and not is_excused):
                parts = [f"{e['request_id']} {e['outcome']} {e[kind]}" for e in rows]
                found.append(
                    f"its rows count {count} {kind} ({charged} charged: {', '.join(parts)}), its "
                    f"client {used}"
                )
        if not (is_finished or is_excused):
            found.append(f"its client has the whole response, its outcome is {outcomes}")
        return found
    if history.ending is Ending.LEFT and completion < history.transcript.tokens:
        outcomes = [row["outcome"] for row in rows]
        if Outcome.LOST not in outcomes:
            reported = history.transcript.tokens
            return [f"its client had {reported} tokens, its rows count {completion} ({outcomes})"]
    return []


def _gateway_died_before_settlement(history: History, faults: Sequence[Fault]) -> bool:
    """Whether Redis was away when a request ended, and its gateway was killed, or had stopped,
    before Redis came back.

    No process then has a record that the client received everything. The ledger records the request
    as lost, at no cost.
    """
    gateways = {stretch.gateway for stretch in history.stretches}
    # The client of a background response sees its end later.
    is_background = history.behaviour in (Behaviour.BACKGROUND, Behaviour.CANCELLING)
    earliest_end = history.began if is_background else history.ended - GRACE_SECONDS
    return any(
        _is_away(away, gateways)
        # Another gateway takes the responses over of one that is gone.
        and away.kind not in (Kind.KILL_GATEWAY, Kind.RESTART_GATEWAY)
        and away.began - GRACE_SECONDS
        <= history.ended
        <= (away.ended or history.ended) + GRACE_SECONDS
        and dead.target in gateways
        and earliest_end <= died_at <= (away.ended or died_at) + MARGIN_SECONDS
        for away in faults
        for dead in faults
        if away is not dead and (died_at := _died_at(dead))
    )


def _died_at(fault: Fault) -> float:
    """Return when a gateway was gone; 0 for other faults, and for a gateway that still stops."""
    if fault.kind is Kind.KILL_GATEWAY:
        return fault.began
    return fault.ended if fault.kind is Kind.RESTART_GATEWAY else 0.0


def _runs_again(history: History, faults: Sequence[Fault]) -> bool:
    """Whether a request ran twice because what Redis had of it is lost, its idempotency key too.

    What its client received is then of two responses.
    """
    return _has_changed(history) and _is_lost(history, faults)


def _has_changed(history: History) -> bool:
    return any(what.startswith(CHANGED_ID) for what in history.errors)


def _is_lost(history: History, faults: Sequence[Fault]) -> bool:
    """Whether a failover lost what Redis had of a request, and its gateway was killed before it
    wrote that again: reservation, settlement, stored response and idempotency key.
    """
    return any(
        not stretch.code
        and lost.began - GRACE_SECONDS <= stretch.began <= lost.lost_until
        and killed.kind is Kind.KILL_GATEWAY
        and killed.target == stretch.gateway
        and stretch.began <= killed.began <= (lost.ended or killed.began) + MARGIN_SECONDS
        for stretch in history.stretches
        for lost in faults
        for killed in faults
    )


def judge_growth(
    name: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    allowed: Mapping[str, float],
) -> list[Violation]:
    """Return the growth of a process beyond its allowance after everything has settled."""
    return [
        Violation("nothing left over", f"{name}: {what} went from {before.get(what, 0)} to {value}")
        for what, value in after.items()
        if value > before.get(what, 0) + allowed.get(what, 0)
    ]


def judge_behaviours(histories: Collection[History]) -> list[Violation]:
    """Return the behaviours without a completed request: the run proves nothing about them."""
    asked = {history.behaviour for history in histories} - completed_behaviours(histories)
    return [Violation("all kinds", f"no request was completed: {each}") for each in asked]


def completed_behaviours(histories: Collection[History]) -> set[Behaviour]:
    """Return the behaviours of which a request ran to the end that its client wanted."""
    done = (Ending.COMPLETE, Ending.LEFT, Ending.CANCELLED, Ending.DENIED)
    return {history.behaviour for history in histories if history.ending in done}
