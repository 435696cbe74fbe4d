"""How a sequence ends, and how a job fails.

Both travel as short strings, so that a frame stays readable in `redis-cli` and an unknown value is
refused when it is decoded instead of being misread.
"""

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence stopped, in the words of the API."""

    STOP = "stop"  # End-of-text token, a stop token or a stop string.
    LENGTH = "length"  # max_tokens, or the context window, was reached.


class FailureCode(StrEnum):
    """Why a job ended without a result."""

    INVALID_REQUEST = "invalid_request"  # The engine refused the parameters: the client's fault.
    DEADLINE_EXCEEDED = "deadline_exceeded"  # The job's deadline passed before it was finished.
    QUEUE_TIMEOUT = "queue_timeout"  # No worker claimed the job in time.
    NO_WORKER = "no_worker"  # It waits, but nobody serves the model any more.
    WORKER_LOST = "worker_lost"  # Its lease ran out: the worker died, hung or was cut off.
    REPLIES_LOST = "replies_lost"  # A reply frame of its worker never arrived.
    ENGINE_ERROR = "engine_error"  # The engine gave up on this one job.
    POISONOUS = "poisonous"  # Engines died with it aboard: it is not given to another one.
    GATEWAY_STOPPING = "gateway_stopping"  # Its gateway stops, and its time to finish is over.
    TAKEN_OVER = "taken_over"  # Another gateway goes on with it.
    CANCELLED = "cancelled"  # Somebody asked for it to be.
    SHED = "shed"  # It waited in a full queue, and a more urgent job took its place.
