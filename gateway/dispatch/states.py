"""Attempt states: the life of the attempt that a ticket follows, from the gateway's view.

A job's first attempt starts as QUEUED. When an attempt is presumed over, the ticket follows the
next attempt. That one is RECOVERING until Redis or a reply shows which of the two is current.
"""

from enum import Enum, auto
from typing import Final


class _Constant(Enum):
    # Hashing by identity needs no Python code, unlike that of other enumerations.
    __hash__ = object.__hash__


class AttemptState(_Constant):
    """The state of the attempt whose replies count."""

    QUEUED = auto()
    """No worker has replied."""
    RUNNING = auto()
    """A worker has replied, without a token."""
    GENERATING = auto()
    """The attempt has produced a token."""
    RECOVERING = auto()
    """The previous attempt is presumed over, but this one may not be enqueued."""
    ENDED = auto()
    """The job is no longer in flight."""


class AttemptEvent(_Constant):
    """What changes the state of an attempt."""

    CLAIMED = auto()
    """The first reply of the attempt arrived."""
    PROGRESSED = auto()
    """The first token of the attempt arrived."""
    PRESUMED_OVER = auto()
    """The attempt's lease expired, its worker returned the job, or its replies are lost."""
    CONFIRMED = auto()
    """Redis or a reply shows that the attempt is enqueued."""
    REPLACED = auto()
    """Redis or a reply shows that another attempt is current."""
    ENDED = auto()
    """The job finished, failed or was cancelled."""


QUEUED: Final = AttemptState.QUEUED
RUNNING: Final = AttemptState.RUNNING
GENERATING: Final = AttemptState.GENERATING
RECOVERING: Final = AttemptState.RECOVERING
ENDED: Final = AttemptState.ENDED

_NEXT: Final = {
    AttemptEvent.CLAIMED: {QUEUED: RUNNING},
    AttemptEvent.PROGRESSED: {RUNNING: GENERATING},
    AttemptEvent.PRESUMED_OVER: dict.fromkeys(
        (QUEUED, RUNNING, GENERATING, RECOVERING), RECOVERING
    ),
    AttemptEvent.CONFIRMED: {RECOVERING: QUEUED},
    AttemptEvent.REPLACED: dict.fromkeys((QUEUED, RUNNING, GENERATING, RECOVERING), QUEUED),
    AttemptEvent.ENDED: dict.fromkeys((QUEUED, RUNNING, GENERATING, RECOVERING), ENDED),
}


def next_state(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """Return the state after an event. Raises RuntimeError if the event is impossible."""
    try:
        return _NEXT[event][state]
    except KeyError:
        raise RuntimeError(
            f"{event.name} cannot happen to an attempt that is {state.name}"
        ) from None
