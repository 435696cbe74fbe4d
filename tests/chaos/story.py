"""What happened to one request, from its client's point of view."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.chaos.transcript import Transcript


class Manner(StrEnum):
    """How a client asks."""

    STREAM = "stream"  # Reads a stream, and does not come back if it breaks.
    RETURNING = "returning"  # Comes back with `Last-Event-ID` wherever its connection breaks.
    WHOLE = "whole"  # Asks once, without a stream.
    REPEATING = (
        "repeating"  # Asks again with the same Idempotency-Key until it has the whole answer.
    )
    REPEATING_STREAM = "repeating stream"  # The same, of a stream.
    BACKGROUND = "background"  # Starts it in the background and looks for its end.
    LEAVING = "leaving"  # Goes away in the middle of a stream.
    CANCELLING = "cancelling"  # Starts it in the background and cancels it.
    HOSTILE = "hostile"  # Sends what is expensive to reject.


class Ending(StrEnum):
    """How it ended for the client."""

    UNFINISHED = "unfinished"  # It has not ended yet.
    COMPLETE = "complete"  # All was told.
    UNREACHED = "unreached"  # Nobody took its connection.
    DENIED = "denied"  # A hostile request was rejected for good.
    REFUSED = "refused"  # A status that says to come again, before anything was told.
    FAILED = "failed"  # An error that says that it will not go on.
    CUT = "cut"  # The connection broke, and its client did not come back.
    LEFT = "left"  # Its client went away.
    CANCELLED = "cancelled"  # Its client had it cancelled.
    HUNG = "hung"  # Nothing ended it within the client's patience.


@dataclass(frozen=True, slots=True)
class Stretch:
    """One connection of a story."""

    gateway: str
    began: float
    ended: float
    is_broken: bool
    """Whether it broke, without an end of the answer."""
    code: str = ""
    """Of a 503 that was its answer."""


@dataclass(slots=True)
class Story:
    """One request, with all that its client did to get its answer."""

    number: int
    recipe: str
    manner: Manner
    tenant: str
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    ending: Ending = Ending.UNFINISHED
    transcript: Transcript = field(default_factory=Transcript)
    request_id: str = ""
    stretches: list[Stretch] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    """What happened when."""
    complaints: list[str] = field(default_factory=list)
    """What the client itself saw to be wrong."""
    statuses: list[int] = field(default_factory=list)
    last_number: int = 0
    """Number of the last event."""
    last_at: float = 0.0
    longest_gap: float = 0.0
    """The longest time between two events, reconnecting included, in seconds."""
    longest_gap_began: float = 0.0
    farewell: str = ""
    """Code of the error with which its gateway ended a stream whose answer could be had elsewhere."""
    returns: int = 0
    """How often the client came back."""

    def note(self, text: str) -> None:
        """Write down what happens now."""
        self.lines.append((time.monotonic(), text))

    def complain(self, text: str) -> None:
        """Write down something that must not be."""
        self.note(f"WRONG: {text}")
        self.complaints.append(text)

    def received(self, at: float) -> None:
        """An event came."""
        if self.last_at and at - self.last_at > self.longest_gap:
            self.longest_gap, self.longest_gap_began = at - self.last_at, self.last_at
        self.last_at = at

    def end(self, ending: Ending) -> None:
        """The client has got what it will get."""
        self.ending, self.ended = ending, time.monotonic()
        self.note(f"ended: {ending}")

    def identify(self, body: dict[str, Any]) -> None:
        """Learn the request's id, which must stay the same."""
        request_id = body.get("id", "")
        if self.request_id and request_id and request_id != self.request_id:
            self.complain(f"the id became {request_id} after {self.request_id}")
        self.request_id = request_id or self.request_id

    def reported(self, since: float) -> str:
        """Return the story as text, with times since a moment."""
        head = (
            f"request {self.number} {self.request_id} ({self.recipe}, {self.manner}, {self.tenant})"
        )
        return "\n".join([head, *(f"  {at - since:7.2f} s  {text}" for at, text in self.lines)])
