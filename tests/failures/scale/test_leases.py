"""Quota leases between cells: every history of a small model, and planted faults.

A limit of three units belongs to a tenant. Its home cell lends parts of it to another cell.
Messages arrive late, in any order, several times or never. The home moves once, or gives up its
move. The checker visits every state that these steps can reach. It compares what was used with the
limit, and with what the home has counted.
"""

from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from tests.support.cases import all_cases

LIMIT: Final = 3
MOST_LEASES: Final = 2
OLD, NEW = 0, 1
"""The homes: the tenant's, and the one to which it may move."""


class Fault(StrEnum):
    """A mistake in the protocol."""

    LENDS_UNRECORDED = "the home lends before it has recorded the lease"
    TAKES_BACK = "the home takes an expired lease back without a report"
    COUNTS_A_GRANT_TWICE = "a grant that arrives twice counts twice"
    COUNTS_A_REPORT_TWICE = "a report that arrives twice frees its lease twice"
    ADMITS_AFTER_THE_END = "a request is admitted after the end of the lease"
    REPORTS_EARLY = "a lease is reported while its requests run"
    COPIES_UNFROZEN = "the home lends while it is copied"
    KEEPS_THE_COPY = "the copy of a move that was given up becomes the home"
    NEVER_CORRECTS = "a report after the loss of its cell is ignored"


class Role(StrEnum):
    """What a home may do."""

    NONE = "none"
    ACTIVE = "active"
    FROZEN = "frozen"  # It answers that the tenant moves.


class Phase(StrEnum):
    """The state of a lease where it is used."""

    OPEN = "open"
    ENDED = "ended"  # It admits nothing more, but its requests run.
    REPORTED = "reported"


class Home(NamedTuple):
    """What a home cell has recorded."""

    role: Role
    used: int
    lent: int
    """The amounts of open leases."""
    leases: frozenset[tuple[int, int]]
    """Number and amount of each open lease."""
    lost: frozenset[tuple[int, int]]
    """Leases that count as used, because their cell was declared lost."""


class Lease(NamedTuple):
    """What the other cell knows of a lease."""

    number: int
    amount: int
    running: int
    """Reserved by requests that run."""
    used: int
    phase: Phase


class State(NamedTuple):
    """A state of the whole."""

    homes: tuple[Home, Home]
    guest: frozenset[Lease]
    sent: frozenset[tuple[str, int, int]]
    """Messages, which may arrive at any later time, and again: kind, lease, and amount."""
    granted: int
    used: int
    """What requests have really used."""


START: Final = State(
    (
        Home(Role.ACTIVE, 0, 0, frozenset(), frozenset()),
        Home(Role.NONE, 0, 0, frozenset(), frozenset()),
    ),
    frozenset(),
    frozenset(),
    0,
    0,
)


def steps(state: State, fault: Fault | None) -> Iterator[State]:
    """Yield the states after each possible step."""
    for at, home in enumerate(state.homes):
        if home.role is Role.ACTIVE:
            yield from _steps_of_home(state, at, home, fault)
    yield from _steps_of_move(state, fault)
    for lease in state.guest:
        yield from _steps_of_guest(state, lease, fault)
    known = {lease.number for lease in state.guest}
    for kind, number, amount in state.sent:
        if kind == "grant" and number not in known:
            yield state._replace(guest=state.guest | {Lease(number, amount, 0, 0, Phase.OPEN)})
        elif kind == "grant" and fault is Fault.COUNTS_A_GRANT_TWICE:
            for lease in state.guest:
                if lease.number == number and lease.amount == amount:
                    yield _changed(state, lease, lease._replace(amount=2 * amount))


def _steps_of_home(state: State, at: int, home: Home, fault: Fault | None) -> Iterator[State]:
    free = LIMIT - home.used - home.lent
    if free >= 1:
        yield _at_home(state, at, home._replace(used=home.used + 1))._replace(used=state.used + 1)
    if state.granted < MOST_LEASES:
        for amount in range(1, min(free, 2) + 1):
            number = state.granted
            lending = home._replace(
                lent=home.lent + amount, leases=home.leases | {(number, amount)}
            )
            recorded = home if fault is Fault.LENDS_UNRECORDED else lending
            yield _at_home(state, at, recorded)._replace(
                sent=state.sent | {("grant", number, amount)}, granted=number + 1
            )
    for number, amount in home.leases:
        closed = home._replace(lent=home.lent - amount, leases=home.leases - {(number, amount)})
        # The cell is declared lost: what it may have used counts as used.
        yield _at_home(
            state,
            at,
            closed._replace(used=home.used + amount, lost=home.lost | {(number, amount)}),
        )
        if fault is Fault.TAKES_BACK:
            yield _at_home(state, at, closed)
    for kind, number, used in state.sent:
        if kind == "report":
            yield from _after_report(state, at, home, number, used, fault)


def _after_report(
    state: State, at: int, home: Home, number: int, used: int, fault: Fault | None
) -> Iterator[State]:
    for lease in home.leases:
        if lease[0] == number:
            yield _at_home(
                state,
                at,
                home._replace(
                    used=home.used + used,
                    lent=home.lent - lease[1],
                    leases=home.leases - {lease},
                ),
            )
    for lease in home.lost:
        if lease[0] == number and fault is not Fault.NEVER_CORRECTS:
            yield _at_home(
                state,
                at,
                home._replace(used=home.used - lease[1] + used, lost=home.lost - {lease}),
            )
    is_known = number in {each for each, _ in home.leases | home.lost}
    if fault is Fault.COUNTS_A_REPORT_TWICE and not is_known and home.lent:
        yield _at_home(state, at, home._replace(lent=home.lent - 1))


def _steps_of_move(state: State, fault: Fault | None) -> Iterator[State]:
    """Freeze, copy, and switch the map; or give up before the switch."""
    old, new = state.homes
    if old.role is Role.ACTIVE and new.role is not Role.ACTIVE:
        yield state._replace(homes=(old._replace(role=Role.FROZEN), new))
    may_copy = old.role is Role.FROZEN or fault is Fault.COPIES_UNFROZEN
    if may_copy and old.role is not Role.NONE and new.role is Role.NONE:
        yield state._replace(homes=(old, old._replace(role=Role.FROZEN)))
    if new.role is Role.FROZEN and (old.role is Role.FROZEN or fault is Fault.KEEPS_THE_COPY):
        switched = old._replace(role=Role.NONE), new._replace(role=Role.ACTIVE)
        yield state._replace(homes=switched)
    if old.role is Role.FROZEN and new.role is not Role.ACTIVE:
        copy = new if fault is Fault.KEEPS_THE_COPY else START.homes[NEW]
        yield state._replace(homes=(old._replace(role=Role.ACTIVE), copy))


def _steps_of_guest(state: State, lease: Lease, fault: Fault | None) -> Iterator[State]:
    is_open = lease.phase is Phase.OPEN or fault is Fault.ADMITS_AFTER_THE_END
    if is_open and lease.running + lease.used < lease.amount:
        yield _changed(state, lease, lease._replace(running=lease.running + 1))
    if lease.running:
        for used in (0, 1):
            settled = lease._replace(running=lease.running - 1, used=lease.used + used)
            yield _changed(state, lease, settled)._replace(used=state.used + used)
    if lease.phase is Phase.OPEN:
        yield _changed(state, lease, lease._replace(phase=Phase.ENDED))
    is_settled = not lease.running or fault is Fault.REPORTS_EARLY
    if lease.phase is Phase.ENDED and is_settled:
        yield _changed(state, lease, lease._replace(phase=Phase.REPORTED))._replace(
            sent=state.sent | {("report", lease.number, lease.used)}
        )


def _at_home(state: State, at: int, home: Home) -> State:
    homes = (home, state.homes[NEW]) if at == OLD else (state.homes[OLD], home)
    return state._replace(homes=homes)


def _changed(state: State, before: Lease, after: Lease) -> State:
    return state._replace(guest=state.guest - {before} | {after})


def violation(state: State, fault: Fault | None) -> str | None:
    """Return which rule a state violates."""
    running = sum(lease.running for lease in state.guest)
    if state.used + running > LIMIT:
        return "more is used than the limit allows"
    active = [home for home in state.homes if home.role is Role.ACTIVE]
    if len(active) > 1:
        return "two homes decide"
    for home in active:
        reported = {lease.number for lease in state.guest if lease.phase is Phase.REPORTED}
        is_settled = len(reported) == state.granted and not home.leases
        # A report of a lost cell corrects what counts, so it is still to come.
        can_correct = any(number in reported for number, _ in home.lost)
        if fault is Fault.NEVER_CORRECTS:
            can_correct = False
        if is_settled and not can_correct and home.used != state.used:
            return "the home has counted another use than there was"
    return None


def find_violation(fault: Fault | None) -> tuple[str | None, int]:
    """Return the first violation of any history, and the number of states that were visited."""
    seen, due = {START}, deque([START])
    while due:
        for state in steps(due.popleft(), fault):
            if state in seen:
                continue
            if (found := violation(state, fault)) is not None:
                return found, len(seen)
            seen.add(state)
            due.append(state)
    return None, len(seen)


def test_no_history_exceeds_the_limit_or_loses_use() -> None:
    found, states = find_violation(None)
    assert found is None
    assert states > 10_000


@all_cases("fault", Fault)
def test_planted_fault_is_found(fault: Fault) -> None:
    found, _ = find_violation(fault)
    assert found is not None
