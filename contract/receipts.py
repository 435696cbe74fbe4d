"""Receipts: the state of a job and the engine's token counts for it.

An ended job is replaced by a receipt. The process that settles the request reads the engine's
counts from it. This is the job's gateway, or another process if that gateway has died.
"""

from enum import Enum
from typing import NamedTuple


class JobState(Enum):
    """State of a job. A cancelled job becomes ENDED, or ABSENT if none of it was delivered."""

    ABSENT = 0  # Never enqueued, cancelled before it started, or its receipt was dropped.
    WAITING = 1  # On the queue; it may have been lost and requeued.
    RUNNING = 2  # Leased to a worker.
    ENDED = 3  # Finished, failed or dropped; only the receipt remains.


class JobReceipt(NamedTuple):
    """Tokens that the engine counted for a job.

    The counts are final once the job has ended. Those of a running job are its worker's last
    report. A lost job counts only what its gateway had received, after which the next attempt
    continues.
    """

    state: JobState
    completion_tokens: int = 0
    """Tokens of all sequences, including those that `best_of` discards."""
    prompt_tokens: int = 0
    """0 until the engine has processed the prompt."""
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its prefix cache."""
    engine: str = ""
    """Name and version of the last worker's engine; empty if no worker claimed the job."""
