"""Job failures as API errors: one error for each failure code."""

from typing import assert_never

from contract.messages import JobFailed
from contract.outcomes import FailureCode
from gateway.completions.prompt.window import too_long
from gateway.records import errors

RETRY_AFTER_SECONDS = 1.0
OVERLOADED_RETRY_AFTER_SECONDS = 5.0


def to_api_error(failed: JobFailed) -> errors.ApiError:  # noqa: C901, PLR0911, PLR0912  (one for each)
    """Return the error that the client receives."""
    match failed.code:
        case FailureCode.INVALID_REQUEST:
            return _rejected(failed)
        case FailureCode.DEADLINE_EXCEEDED:
            return errors.GenerationTimeoutError("The request exceeded its time limit.")
        case FailureCode.QUEUE_TIMEOUT:
            return errors.OverloadedError(
                "The request exceeded the queue timeout.",
                retry_after_seconds=OVERLOADED_RETRY_AFTER_SECONDS,
            )
        case FailureCode.NO_WORKER:
            return errors.NoWorkerError(
                "No worker currently serves this model.",
                retry_after_seconds=OVERLOADED_RETRY_AFTER_SECONDS,
            )
        case FailureCode.SHED:
            return errors.OverloadedError(
                "The queue is full, and a request of higher priority replaced this one.",
                retry_after_seconds=failed.retry_after_seconds or OVERLOADED_RETRY_AFTER_SECONDS,
            )
        case FailureCode.GATEWAY_STOPPING:
            return errors.GatewayStoppingError(
                "The gateway is shutting down. Retry the request.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        case FailureCode.STORED_BYTES:
            return errors.StorageFullError(failed.message)
        case FailureCode.RATE_LIMITED:
            return errors.TokensExhaustedError(
                failed.message, retry_after_seconds=failed.retry_after_seconds
            )
        case FailureCode.OUT_OF_QUOTA:
            return errors.OutOfQuotaError(failed.message)
        case FailureCode.CANCELLED:
            return errors.RequestCancelledError("The request was cancelled.")
        case FailureCode.ADAPTER_FAILED:
            return errors.AdapterFailedError(
                "The adapter could not be loaded. Retry the request.",
                retry_after_seconds=OVERLOADED_RETRY_AFTER_SECONDS,
            )
        case FailureCode.POISONOUS:
            return errors.PoisonousRequestError(
                "The engine crashed twice while it ran this request, which is not retried."
            )
        case FailureCode.TAKEN_OVER:
            return errors.TakenOverError(
                "Another gateway continues this request. Retry the request.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        case FailureCode.WORKER_LOST | FailureCode.ENGINE_ERROR | FailureCode.REPLIES_LOST:
            return errors.GenerationFailedError(
                "The worker failed while it ran this request. Retry the request.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        case _:
            assert_never(failed.code)


def _rejected(failed: JobFailed) -> errors.BadRequestError:
    if (excess := failed.excess) is None:
        return errors.BadRequestError(failed.message, param=failed.param)
    return too_long(
        excess.prompt_tokens,
        excess.max_tokens,
        window=excess.window,
        param=failed.param or "prompt",
    )
