"""Outcomes: finish reasons of sequences, failure codes of jobs, and receipts of ended jobs.

Reasons and codes are encoded as short strings, so that a frame stays readable in `redis-cli`.
Decoding rejects an unknown value instead of misreading it.
"""

from enum import Enum, StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a sequence stopped; the values are those of the API."""

    STOP = "stop"  # End-of-text token, a stop token or a stop string.
    LENGTH = "length"  # max_tokens, or the context window, was reached.


class FailureCode(StrEnum):
    """Why a job ended without a result."""

    INVALID_REQUEST = "invalid_request"  # The engine rejected the client's parameters.
    DEADLINE_EXCEEDED = "deadline_exceeded"  # The deadline passed before the job finished.
    QUEUE_TIMEOUT = "queue_timeout"  # No worker claimed the job in time.
    NO_WORKER = "no_worker"  # The job waits, but no worker serves the model any more.
    WORKER_LOST = "worker_lost"  # The lease expired: the worker died, hung or was disconnected.
    REPLIES_LOST = "replies_lost"  # A reply frame of the worker never arrived.
    ADAPTER_FAILED = "adapter_failed"  # The adapter could not be loaded.
    ENGINE_ERROR = "engine_error"  # The engine failed on this job only.
    POISONOUS = "poisonous"  # Engines died while running the job; no other one runs it.
    GATEWAY_STOPPING = "gateway_stopping"  # The gateway shuts down and its drain time is over.
    TAKEN_OVER = "taken_over"  # Another gateway resumed the job.
    OUTPUT_LOST = "output_lost"  # A failover lost the stored output, and its gateway has died.
    STORED_BYTES = "stored_bytes"  # Redis would hold more of the tenant's output than allowed.
    RATE_LIMITED = "rate_limited"  # The tenant's limits allow no further tokens for now.
    OUT_OF_QUOTA = "out_of_quota"  # The tenant's money allows no further tokens.
    CANCELLED = "cancelled"  # A cancellation was requested.
    SHED = "shed"  # The queue was full, and a job of a higher tier replaced this one.


class JobState(Enum):
    """State of a job. A cancelled job becomes ENDED, or ABSENT if none of it was delivered."""

    ABSENT = 0  # Never enqueued, cancelled before it started, or its receipt was dropped.
    WAITING = 1  # On the queue; it may have been lost and requeued.
    RUNNING = 2  # Leased to a worker.
    ENDED = 3  # Finished, failed or dropped; only the receipt remains.


class JobReceipt(NamedTuple):
    """Tokens that the engine counted for a job.

    An ended job is replaced by its receipt. The process that settles the request reads the counts
    from it: the job's gateway, or another process if that gateway has died.

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
