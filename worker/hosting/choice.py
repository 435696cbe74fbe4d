"""Choice of the model that a host serves, by the jobs that wait for each of its models."""

from collections.abc import Mapping
from typing import NamedTuple

from contract.queue import ModelStatus


class Hysteresis(NamedTuple):
    """How long a host keeps a model before it swaps."""

    least_seconds: float
    """Time for which a model with jobs is served, from when its worker is ready."""
    ratio: float
    """A model with jobs is left for one that has this many times as many jobs for each worker."""
    longest_wait_seconds: float
    """Wait of a job for a model without a worker after which its model is served in any case."""


def choose(
    current: str | None,
    statuses: Mapping[str, ModelStatus],
    *,
    served_seconds: float,
    hysteresis: Hysteresis,
) -> str | None:
    """Return the model to swap to; None to keep the current one.

    Requests go before batch jobs: a model for which only batch jobs wait is served if no request
    waits for another model, and the current one is idle.
    """
    own = None if current is None else statuses[current]
    others = {name: status for name, status in statuses.items() if name != current}
    wanted = {name: status for name, status in others.items() if status.waiting_jobs}
    if not wanted:
        batches = {name: each.waiting_batch_jobs for name, each in others.items()}
        most = max(batches, key=batches.__getitem__, default=None)
        is_free = own is None or not (own.waiting_batch_jobs or _is_used(own))
        return most if most is not None and batches[most] and is_free else None
    most_wanted = max(wanted, key=lambda name: _load(wanted[name], joining=1))
    if own is None or not _is_used(own):
        return most_wanted
    if served_seconds < hysteresis.least_seconds:
        return None
    if _load(wanted[most_wanted], joining=1) > hysteresis.ratio * _load(own):
        return most_wanted
    waits = {
        name: each.oldest_wait_seconds for name, each in wanted.items() if not each.ready_workers
    }
    longest = max(waits, key=waits.__getitem__, default=None)
    is_late = longest is not None and waits[longest] > hysteresis.longest_wait_seconds
    return longest if is_late else None


def _load(status: ModelStatus, *, joining: int = 0) -> float:
    """Return the waiting jobs for each worker, counting those that join."""
    return status.waiting_jobs / max(status.ready_workers + joining, 1)


def _is_used(status: ModelStatus) -> bool:
    """Whether requests wait, or jobs run that only this host may be running."""
    return bool(status.waiting_jobs or (status.leased_jobs and status.ready_workers <= 1))
