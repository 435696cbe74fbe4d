"""The figures of a run."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.failures.chaos.faults import Fault
from tests.failures.chaos.history import Ending, History

PAUSE_SECONDS = 0.5
"""A longer gap between two events of a stream counts as a pause."""


@dataclass(slots=True)
class Figures:
    """Numbers of one run, for people and for docs/reliability.md."""

    seed: int
    seconds: float
    database: str
    faults: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Kinds of faults that were not possible, with the reason."""
    batches: int = 0
    lines: int = 0
    """Of the batches."""
    requests: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    """Completion tokens that clients received."""
    returns: int = 0
    """Retries and reconnects of clients after a refusal or a broken connection."""
    resumed_jobs: int = 0
    """Counted by the gateways, less what a gateway counted just before it was killed."""
    preempted_sequences: int = 0
    """Counted by the workers, less what a worker counted just before it was killed."""
    paused_streams: int = 0
    pause_p50_seconds: float = 0.0
    pause_p99_seconds: float = 0.0
    pause_most_seconds: float = 0.0
    standstill_seconds: float = 0.0
    """Time in which the machine itself ran or wrote nothing, for other reasons than a fault."""
    violations: int = 0

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def table(self) -> str:
        """Return the table of docs/reliability.md."""
        pauses = " / ".join(
            f"{seconds:.1f}"
            for seconds in (
                self.pause_p50_seconds,
                self.pause_p99_seconds,
                self.pause_most_seconds,
            )
        )
        rows = [
            (
                "seed, length, database",
                f"{self.seed}, {self.seconds / 60:.1f} min, {self.database}",
            ),
            ("faults", f"{sum(self.faults.values())}"),
            *((f"— {kind}", f"{count}") for kind, count in sorted(self.faults.items())),
            ("batches", f"{self.batches}"),
            ("— their lines", f"{self.lines}"),
            ("requests", f"{self.requests}"),
            *((f"— {ending}", f"{count}") for ending, count in sorted(self.endings.items())),
            ("completion tokens received", f"{self.tokens}"),
            ("retries and reconnects of clients", f"{self.returns}"),
            ("jobs resumed on another worker", f"{self.resumed_jobs}"),
            ("sequences preempted", f"{self.preempted_sequences}"),
            ("streams with a pause over half a second", f"{self.paused_streams}"),
            ("length of such a pause, p50 / p99 / longest", f"{pauses} s"),
            ("seconds in which the machine stalled", f"{self.standstill_seconds:.1f}"),
            ("violated invariants", f"{self.violations}"),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def figures_of(
    figures: Figures, histories: Sequence[History], faults: Sequence[Fault], *, resumed_jobs: float
) -> Figures:
    """Fill in the figures that follow from client records and faults."""
    figures.faults = dict(Counter(str(fault.kind) for fault in faults))
    figures.requests = len(histories)
    figures.endings = dict(Counter(str(history.ending) for history in histories))
    figures.tokens = sum(
        max(history.transcript.tokens, (history.transcript.usage or {}).get("completion_tokens", 0))
        for history in histories
        if history.ending is not Ending.REFUSED
    )
    figures.returns = sum(history.returns for history in histories if history.request_id)
    figures.resumed_jobs = round(resumed_jobs)
    pauses = sorted(s.longest_gap for s in histories if s.longest_gap > PAUSE_SECONDS)
    figures.paused_streams = len(pauses)
    if pauses:
        figures.pause_p50_seconds = _quantile(pauses, 0.5)
        figures.pause_p99_seconds = _quantile(pauses, 0.99)
        figures.pause_most_seconds = pauses[-1]
    return figures


def _quantile(values: Sequence[float], part: float) -> float:
    return values[min(int(len(values) * part), len(values) - 1)]
