"""Each failure of a job has one error of the API."""

from contract.messages import ContextExcess, JobFailed
from contract.outcomes import FailureCode
from gateway.completions.rendering.failures import to_api_error
from gateway.records.errors import (
    AdapterFailedError,
    ApiError,
    BadRequestError,
    GatewayStoppingError,
    GenerationFailedError,
    GenerationTimeoutError,
    NoWorkerError,
    OutOfQuotaError,
    OutputLostError,
    OverloadedError,
    PoisonousRequestError,
    RequestCancelledError,
    StorageFullError,
    TakenOverError,
    TokensExhaustedError,
)
from tests.support.cases import all_cases

EXPECTED: dict[FailureCode, tuple[type[ApiError], int, bool]] = {
    FailureCode.INVALID_REQUEST: (BadRequestError, 400, False),
    FailureCode.DEADLINE_EXCEEDED: (GenerationTimeoutError, 504, True),
    FailureCode.QUEUE_TIMEOUT: (OverloadedError, 503, True),
    FailureCode.NO_WORKER: (NoWorkerError, 503, True),
    FailureCode.WORKER_LOST: (GenerationFailedError, 503, True),
    FailureCode.ENGINE_ERROR: (GenerationFailedError, 503, True),
    FailureCode.REPLIES_LOST: (GenerationFailedError, 503, True),
    FailureCode.POISONOUS: (PoisonousRequestError, 500, False),
    FailureCode.GATEWAY_STOPPING: (GatewayStoppingError, 503, True),
    FailureCode.TAKEN_OVER: (TakenOverError, 503, True),
    FailureCode.OUTPUT_LOST: (OutputLostError, 404, False),
    FailureCode.SHED: (OverloadedError, 503, True),
    FailureCode.STORED_BYTES: (StorageFullError, 429, True),
    FailureCode.RATE_LIMITED: (TokensExhaustedError, 429, False),
    FailureCode.OUT_OF_QUOTA: (OutOfQuotaError, 429, False),
    FailureCode.ADAPTER_FAILED: (AdapterFailedError, 503, True),
    FailureCode.CANCELLED: (RequestCancelledError, 409, False),
}


@all_cases("code", FailureCode)
def test_each_failure_has_its_own_error(code: FailureCode) -> None:
    expected, status, may_retry = EXPECTED[code]
    error = to_api_error(JobFailed(1, 1, code, "inside of the worker"))
    assert type(error) is expected
    assert error.status == status
    assert error.headers()["x-should-retry"] == ("true" if may_retry else "false")


@all_cases("code", [code for code in FailureCode if EXPECTED[code][1] == 503])
def test_temporary_failure_has_a_retry_time(code: FailureCode) -> None:
    headers = to_api_error(JobFailed(1, 1, code, "")).headers()
    assert int(headers["retry-after"]) >= 1
    assert int(headers["retry-after-ms"]) >= 1000


WRITTEN_HERE = {
    FailureCode.INVALID_REQUEST,
    FailureCode.STORED_BYTES,
    FailureCode.RATE_LIMITED,
    FailureCode.OUT_OF_QUOTA,
}
"""Failures whose messages are for clients."""


@all_cases("code", sorted(set(FailureCode) - WRITTEN_HERE))
def test_worker_internals_are_not_reported(code: FailureCode) -> None:
    assert "inside" not in to_api_error(JobFailed(1, 1, code, "inside of the worker")).message


@all_cases("code", [FailureCode.SHED, FailureCode.RATE_LIMITED])
def test_failure_may_bring_its_retry_time(code: FailureCode) -> None:
    headers = to_api_error(JobFailed(1, 1, code, "", 17.25)).headers()
    assert (headers["retry-after-ms"], headers["x-should-retry"]) == ("17250", "true")


def test_reason_of_a_rejected_request_is_reported() -> None:
    failed = JobFailed(1, 1, FailureCode.INVALID_REQUEST, "Token ids must be between 0 and 9.")
    assert to_api_error(failed).message == "Token ids must be between 0 and 9."


@all_cases(
    ("excess", "param", "requested"),
    [
        (ContextExcess(70, 5, 64), "messages", "75 tokens (70 in the messages, 5"),
        (ContextExcess(60, 5, 64), "n_predict", "65 tokens (60 in the messages, 5"),
    ],
)
def test_prompt_with_too_many_tokens_of_images_exceeds_the_window(
    excess: ContextExcess, param: str, requested: str
) -> None:
    code = FailureCode.INVALID_REQUEST
    failed = JobFailed(1, 1, code, "No.", param="messages", excess=excess)
    error = to_api_error(failed, max_tokens_param="n_predict")
    assert (error.code, error.param) == ("context_length_exceeded", param)
    assert error.message.startswith(
        f"This model's maximum context length is 64 tokens. However, you requested {requested}"
    )
