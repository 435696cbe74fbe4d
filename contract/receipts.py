"""Where a job stands, and the engine's counts for it.

A job that has ended leaves a receipt in place of itself, so that whoever settles its request, its own
gateway or another process after that one's death, finds what the engine counted.
"""

from enum import Enum
from typing import NamedTuple


class JobState(Enum):
    """Where a job is in its life. Cancelling takes a job to ENDED, or to ABSENT if nothing was delivered of it."""

    ABSENT = 0  # Never enqueued, cancelled before anybody began it, or its receipt was forgotten.
    WAITING = 1  # Nobody has it; it may have been lost and requeued.
    RUNNING = 2  # Leased to a worker.
    ENDED = 3  # Finished, failed or dropped; what is left is the receipt.


class JobReceipt(NamedTuple):
    """Tokens that the engine counted for a job.

    Final once the job has ended. Those of a running job are its worker's last report. A job that was lost
    counts what its gateway had received, behind which another attempt goes on, and no more.
    """

    state: JobState
    completion_tokens: int = 0
    """Tokens of all sequences, those that `best_of` discards included."""
    prompt_tokens: int = 0
    """0 until the engine has read the prompt."""
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its prefix cache."""
