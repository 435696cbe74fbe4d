"""The history of one request as its client saw it."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.failures.chaos.transcript import Transcript


class Behaviour(StrEnum):
    """The behaviour of a client."""

    STREAM = "stream"  # Reads a stream, and does not reconnect if it breaks.
    RETURNING = "returning"  # Reconnects with `Last-Event-ID` wherever its connection breaks.
    WHOLE = "whole"  # Sends one request without a stream.
    REPEATING = (
        "repeating"  # Retries with the same Idempotency-Key until it has the whole response.
    )
    REPEATING_STREAM = "repeating stream"  # The same, of a stream.
    BACKGROUND = "background"  # Starts a background request and polls for its end.
    LEAVING = "leaving"  # Disconnects in the middle of a stream.
    CANCELLING = "cancelling"  # Starts a background request and cancels it.
    HOSTILE = "hostile"  # Sends a request that is expensive to reject.
    LINE = "line of a batch"


class Ending(StrEnum):
    """How a request ended for the client."""

    UNFINISHED = "unfinished"  # It has not ended yet.
    COMPLETE = "complete"  # Everything was received.
    UNREACHED = "unreached"  # Every gateway refused the connection.
    DENIED = "denied"  # A hostile request was rejected for good.
    REFUSED = "refused"  # A retryable status before the response began.
    FAILED = "failed"  # A final error.
    CUT = "cut"  # The connection broke, and its client did not reconnect.
    LEFT = "left"  # The client disconnected.
    CANCELLED = "cancelled"  # The client cancelled it.
    HUNG = "hung"  # It did not end within the client's timeout.


@dataclass(frozen=True, slots=True)
class Stretch:
    """One connection of a request."""

    gateway: str
    began: float
    ended: float
    is_broken: bool
    """Whether it broke before the end of the response."""
    code: str = ""
    """Of a 503 response."""


@dataclass(slots=True)
class History:
    """One request, with everything that its client did to get the response."""

    number: int
    recipe: str
    behaviour: Behaviour
    tenant: str
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    ending: Ending = Ending.UNFINISHED
    transcript: Transcript = field(default_factory=Transcript)
    request_id: str = ""
    stretches: list[Stretch] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    """Log lines with their times."""
    errors: list[str] = field(default_factory=list)
    """Errors that the client itself saw."""
    statuses: list[int] = field(default_factory=list)
    last_number: int = 0
    """Number of the last event."""
    last_at: float = 0.0
    longest_gap: float = 0.0
    """The longest time between two events, reconnecting included, in seconds."""
    longest_gap_began: float = 0.0
    final_error: str = ""
    """Code of the error with which a gateway ended a stream that another gateway could resume."""
    returns: int = 0
    """How often the client retried or reconnected."""

    def note(self, text: str) -> None:
        """Log a line with the current time."""
        self.lines.append((time.monotonic(), text))

    def add_error(self, text: str) -> None:
        """Log an error of the response."""
        self.note(f"WRONG: {text}")
        self.errors.append(text)

    def received(self, at: float) -> None:
        """Record the arrival of an event."""
        if self.last_at and at - self.last_at > self.longest_gap:
            self.longest_gap, self.longest_gap_began = at - self.last_at, self.last_at
        self.last_at = at

    def end(self, ending: Ending) -> None:
        """Record how the request ended for the client."""
        self.ending, self.ended = ending, time.monotonic()
        self.note(f"ended: {ending}")

    def identify(self, body: dict[str, Any]) -> None:
        """Record the request's id, which must stay the same."""
        request_id = body.get("id", "")
        if self.request_id and request_id and request_id != self.request_id:
            self.add_error(f"the id became {request_id} after {self.request_id}")
        self.request_id = request_id or self.request_id

    def reported(self, since: float) -> str:
        """Return the history as text, with times relative to a moment."""
        kind = f"{self.recipe}, {self.behaviour}, {self.tenant}"
        head = f"request {self.number} {self.request_id} ({kind})"
        return "\n".join([head, *(f"  {at - since:7.2f} s  {text}" for at, text in self.lines)])
