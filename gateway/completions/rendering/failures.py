"""Job failures as API errors: one error for each failure code."""

from collections.abc import Callable, Mapping
from typing import Final

from contract.messages import JobFailed
from contract.outcomes import FailureCode
from gateway.completions.prompt.window import too_long
from gateway.records import errors

RETRY_AFTER_SECONDS = 1.0
OVERLOADED_RETRY_AFTER_SECONDS = 5.0


def to_api_error(failed: JobFailed, *, max_tokens_param: str = "max_tokens") -> errors.ApiError:
    """Return the error that the client receives, who gives `max_tokens` by this name."""
    if failed.code is FailureCode.INVALID_REQUEST:
        return _rejected(failed, max_tokens_param)
    return _ERRORS[failed.code](failed)


def _rejected(failed: JobFailed, max_tokens_param: str) -> errors.BadRequestError:
    if (excess := failed.excess) is None:
        return errors.BadRequestError(failed.message, param=failed.param)
    return too_long(
        excess.prompt_tokens,
        excess.max_tokens,
        window=excess.window,
        param=failed.param or "prompt",
        max_tokens_param=max_tokens_param,
    )


def _generation_failed(_: JobFailed) -> errors.GenerationFailedError:
    return errors.GenerationFailedError(
        "The worker failed while it ran this request. Retry the request.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


_ERRORS: Final[Mapping[FailureCode, Callable[[JobFailed], errors.ApiError]]] = {
    FailureCode.DEADLINE_EXCEEDED: lambda _: errors.GenerationTimeoutError(
        "The request exceeded its time limit."
    ),
    FailureCode.QUEUE_TIMEOUT: lambda _: errors.OverloadedError(
        "The request exceeded the queue timeout.",
        retry_after_seconds=OVERLOADED_RETRY_AFTER_SECONDS,
    ),
    FailureCode.NO_WORKER: lambda _: errors.NoWorkerError(
        "No worker currently serves this model.",
        retry_after_seconds=OVERLOADED_RETRY_AFTER_SECONDS,
    ),
    FailureCode.SHED: lambda failed: errors.OverloadedError(
        "The queue is full, and a request of higher priority replaced this one.",
        retry_after_seconds=failed.retry_after_seconds or OVERLOADED_RETRY_AFTER_SECONDS,
    ),
    FailureCode.GATEWAY_STOPPING: lambda _: errors.GatewayStoppingError(
        "The gateway is shutting down. Retry the request.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    ),
    FailureCode.STORED_BYTES: lambda failed: errors.StorageFullError(failed.message),
    FailureCode.RATE_LIMITED: lambda failed: errors.TokensExhaustedError(
        failed.message, retry_after_seconds=failed.retry_after_seconds
    ),
    FailureCode.OUT_OF_QUOTA: lambda failed: errors.OutOfQuotaError(failed.message),
    FailureCode.CANCELLED: lambda _: errors.RequestCancelledError("The request was cancelled."),
    FailureCode.ADAPTER_FAILED: lambda _: errors.AdapterFailedError(
        "The adapter could not be loaded. Retry the request.",
        retry_after_seconds=OVERLOADED_RETRY_AFTER_SECONDS,
    ),
    FailureCode.POISONOUS: lambda _: errors.PoisonousRequestError(
        "The engine crashed twice while it ran this request, which is not retried."
    ),
    FailureCode.TAKEN_OVER: lambda _: errors.TakenOverError(
        "Another gateway continues this request. Retry the request.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    ),
    FailureCode.OUTPUT_LOST: lambda _: errors.OutputLostError(
        "The output of this response is lost. Send the request again."
    ),
    FailureCode.WORKER_LOST: _generation_failed,
    FailureCode.ENGINE_ERROR: _generation_failed,
    FailureCode.REPLIES_LOST: _generation_failed,
}
"""One error for each code but that of an invalid request."""
