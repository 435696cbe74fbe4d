"""Every error that the API answers with, as one tree.

    ApiError
    ├── BadRequestError 400
    │   ├── InvalidJsonError
    │   ├── InvalidParameterError
    │   ├── MissingParameterError
    │   ├── UnsupportedParameterError
    │   ├── UnknownParameterError
    │   ├── InvalidGrammarError
    │   └── ContextLengthExceededError
    ├── AuthenticationError 401
    │   └── ExpiredCredentialError
    ├── InsufficientQuotaError 402
    ├── PermissionDeniedError 403
    │   ├── AccountSuspendedError
    │   └── AddressNotAllowedError
    ├── NotFoundError 404
    │   └── ModelNotFoundError
    ├── MethodNotAllowedError 405
    ├── RequestTimeoutError 408
    ├── ConflictError 409
    │   ├── IdempotencyConflictError
    │   ├── IdempotencyInProgressError
    │   └── RequestCancelledError
    ├── PayloadTooLargeError 413
    ├── TargetTooLongError 414
    ├── HeadersTooLargeError 431
    ├── UnsupportedMediaTypeError 415
    ├── RateLimitError 429
    ├── TenantQueueFullError 429
    ├── TooManyUnpaidError 429
    ├── InternalError 500
    ├── PoisonousRequestError 500
    ├── ServiceUnavailableError 503
    │   ├── UnservedModelError
    │   │   ├── NoWorkerError
    │   │   └── ModelLoadingError
    │   ├── ModelMisconfiguredError
    │   ├── OverloadedError
    │   ├── StoreUnavailableError
    │   │   └── ChangeNotAnnouncedError
    │   ├── GatewayStoppingError
    │   ├── GenerationFailedError
    │   └── SlowReaderError
    └── GenerationTimeoutError 504

A class knows its status, type and code; an instance knows its message, the parameter it is about and
when a retry makes sense. One renderer tells it in the style of the request's dialect, for a JSON body
and for a mid-stream event alike. Messages never carry a key, a token or a prompt.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, assert_never

import msgspec
from typing_extensions import override

MAX_SHOWN_CHARACTERS = 80
"""How much of a client's own value a message repeats."""


_UNPROCESSABLE = 422
"""The status of a request that mistral.rs cannot read or does not allow."""

_LLAMACPP_TYPES = {404: "not_found_error", 503: "unavailable_error"}
"""Types of llama.cpp that differ from OpenAI's, by status."""

_VLLM_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    402: "InsufficientQuotaError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    414: "UriTooLongError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
"""vLLM's types by status, and names in their manner for what vLLM has no name for."""


class ErrorStyle(StrEnum):
    """In whose shape an error is told."""

    OPENAI = "openai"  # {message, type, param, code}, where code is a word.
    LLAMACPP = "llamacpp"  # {message, type, code}, where code is the status.
    MISTRALRS = "mistralrs"  # As OpenAI's, with 422 in place of 400.
    VLLM = "vllm"  # {message, type, param, code}, where type is a class and code the status.


class StartupError(Exception):
    """The process cannot start; the message tells the operator why. Not an answer of the API."""


class ApiError(Exception):
    """An answer other than success."""

    status: int = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    should_retry: bool | None = None
    """Whether a retry makes sense; None if the status says so."""

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def status_for(self, style: ErrorStyle) -> int:
        """Return the HTTP status under which clients of that style expect this error."""
        if style is ErrorStyle.MISTRALRS and self.status == BadRequestError.status:
            return _UNPROCESSABLE
        return self.status

    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> dict[str, Any]:
        """Return the error's envelope, OpenAI's unless another style is asked for."""
        described: dict[str, Any]
        match style:
            case ErrorStyle.OPENAI | ErrorStyle.MISTRALRS:
                described = {"type": self.type, "param": self.param, "code": self.code}
            case ErrorStyle.LLAMACPP:
                kind = _LLAMACPP_TYPES.get(self.status, self.type)
                described = {"type": kind, "code": self.status}
            case ErrorStyle.VLLM:
                kind = _VLLM_TYPES.get(self.status, "InternalServerError")
                described = {"type": kind, "param": self.param, "code": self.status}
            case _:
                assert_never(style)
        return {"error": {"message": self.message, **described}}

    def content(self, style: ErrorStyle = ErrorStyle.OPENAI) -> bytes:
        """Return the envelope as JSON."""
        return msgspec.json.encode(self.body(style))

    def headers(self) -> Mapping[str, str]:
        """Return whether and when to retry, in the headers that OpenAI's clients read."""
        retries = self.should_retry
        if retries is None:
            is_temporary = self.status in (408, 409, 429) or self.status >= 500
            retries = is_temporary or self.retry_after_seconds is not None
        headers = {"x-should-retry": "true" if retries else "false"}
        if self.retry_after_seconds is not None:
            # Rounded up, since an early retry is rejected again, but not for a float's last digits.
            milliseconds = math.ceil(round(self.retry_after_seconds * 1000, 3))
            headers["retry-after"] = str(-(-milliseconds // 1000))
            headers["retry-after-ms"] = str(milliseconds)
        return headers


class BadRequestError(ApiError):
    """The request cannot be understood or is not allowed as it stands."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidJsonError(BadRequestError):
    """The body is not the JSON that was expected."""

    code = "invalid_json"


class InvalidParameterError(BadRequestError):
    """A parameter has a wrong type or value."""


class MissingParameterError(BadRequestError):
    """A required parameter is absent."""

    code = "missing_required_parameter"

    def __init__(self, param: str) -> None:
        super().__init__(f"Missing required parameter: '{param}'.", param=param)


class UnsupportedParameterError(BadRequestError):
    """A parameter that would change the answer is not served, or not by this model."""

    code = "unsupported_parameter"


class UnknownParameterError(BadRequestError):
    """A parameter that nobody knows, where none may be ignored."""

    code = "unknown_parameter"


class InvalidGrammarError(BadRequestError):
    """A grammar, schema or regular expression cannot be used."""

    code = "invalid_grammar"


class ContextLengthExceededError(BadRequestError):
    """Prompt, or prompt and completion together, do not fit the context window."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        n_prompt_tokens: int | None = None,
        n_ctx: int | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.n_prompt_tokens = n_prompt_tokens
        """Tokens of the prompt, by the name under which llama.cpp's clients read them."""
        self.n_ctx = n_ctx
        """The context window in tokens, likewise."""

    @override
    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> dict[str, Any]:
        """Add the numbers that llama.cpp's clients read."""
        body = super().body(style)
        if style is ErrorStyle.LLAMACPP:
            error = body["error"]
            error["type"] = "exceed_context_size_error"
            if self.n_prompt_tokens is not None and self.n_ctx is not None:
                error |= {"n_prompt_tokens": self.n_prompt_tokens, "n_ctx": self.n_ctx}
        return body


class AuthenticationError(ApiError):
    """No valid credential was presented."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    @override
    def headers(self) -> Mapping[str, str]:
        """Add the challenge that HTTP asks for."""
        return {**super().headers(), "www-authenticate": "Bearer"}


class ExpiredCredentialError(AuthenticationError):
    """The credential was valid once."""

    code = "expired_token"


class PermissionDeniedError(ApiError):
    """The credential is valid but does not allow this."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class AccountSuspendedError(PermissionDeniedError):
    """The tenant is not served at present."""

    code = "account_suspended"


class AddressNotAllowedError(PermissionDeniedError):
    """The credential may not be used from where the request comes."""

    code = "ip_not_allowed"


class NotFoundError(ApiError):
    """No such route or thing."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """The model is unknown, or not for this principal: the answer is the same for both."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {shown(model)} does not exist or you do not have access to it.",
            param="model",
        )


class MethodNotAllowedError(ApiError):
    """The route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeoutError(ApiError):
    """The request's headers or its body did not arrive in time."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"

    @override
    def headers(self) -> Mapping[str, str]:
        """Say that the connection ends here, behind a body that was not read to its end."""
        return {**super().headers(), "connection": "close"}


class ConflictError(ApiError):
    """What was to be created exists already."""

    status = 409
    type = "conflict"
    code = "already_exists"


class RequestCancelledError(ConflictError):
    """What is to be read was cancelled, so there is no more of it."""

    code = "request_cancelled"
    should_retry = False


class IdempotencyConflictError(ConflictError):
    """The Idempotency-Key stands for a request that asks for something else."""

    code = "idempotency_conflict"
    should_retry = False

    def __init__(self) -> None:
        super().__init__(
            "The Idempotency-Key was used with another body, path or dialect before.",
            param="Idempotency-Key",
        )


class IdempotencyInProgressError(ConflictError):
    """A request with the same Idempotency-Key is being admitted right now."""

    code = "idempotency_in_progress"

    def __init__(self) -> None:
        super().__init__(
            "A request with this Idempotency-Key is being admitted right now.",
            param="Idempotency-Key",
            retry_after_seconds=1.0,
        )


class PayloadTooLargeError(ApiError):
    """The body is larger than the gateway reads."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"

    @override
    def headers(self) -> Mapping[str, str]:
        """Say that the connection ends here, behind a body that was not read to its end."""
        return {**super().headers(), "connection": "close"}


class TargetTooLongError(ApiError):
    """The path and query of the request are longer than the gateway reads."""

    status = 414
    type = "invalid_request_error"
    code = "uri_too_long"


class HeadersTooLargeError(ApiError):
    """The headers of the request are more, or larger, than the gateway reads."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class UnsupportedMediaTypeError(ApiError):
    """The body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusingLimit:
    """The limit that refused a request, as the error's body names it."""

    limit: str
    scope: str
    limit_value: int | None
    """None for an amount of money that the caller may not see; then `used` is None, too."""
    used: int | None
    reset_seconds: float | None
    """When the limit will allow the request; None: never, or nobody can know."""


class _LimitError(ApiError):
    """A limit or the money does not allow the request."""

    _refusing: RefusingLimit | None = None
    _headers: Mapping[str, str] = MappingProxyType({})

    def _refused_by(self, refusing: RefusingLimit, headers: Mapping[str, str]) -> None:
        self._refusing = refusing
        self._headers = headers

    @override
    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> dict[str, Any]:
        """Add the limit, whose it is, and when it resets."""
        body = super().body(style)
        if self._refusing is not None:
            body["error"] |= asdict(self._refusing)
        return body

    @override
    def headers(self) -> Mapping[str, str]:
        """Add the rate limit headers."""
        return {**self._headers, **super().headers()}


class InsufficientQuotaError(_LimitError):
    """The budget of the month or the prepaid credit does not suffice."""

    status = 402
    type = "insufficient_quota"
    code = "budget_exceeded"
    should_retry = False

    def __init__(
        self,
        message: str,
        *,
        refusing: RefusingLimit,
        code: str,
        is_openai: bool,
        headers: Mapping[str, str],
    ) -> None:
        """OpenAI's clients know another status and code than everybody else's."""
        super().__init__(message)
        self._refused_by(refusing, headers)
        self.status = 429 if is_openai else 402
        self.code = self.type if is_openai else code


class RateLimitError(_LimitError):
    """A limit of requests, tokens, concurrent requests or stored bytes is used up, or would be exceeded."""

    status = 429
    type = "rate_limit_error"
    code = "requests"

    def __init__(
        self,
        message: str,
        *,
        refusing: RefusingLimit,
        code: str,
        is_retryable: bool,
        headers: Mapping[str, str],
    ) -> None:
        """`is_retryable` is False if the limit would not allow the request either when nothing is used."""
        super().__init__(message, retry_after_seconds=refusing.reset_seconds)
        self._refused_by(refusing, headers)
        self.code = code
        self.should_retry = is_retryable


class TenantQueueFullError(ApiError):
    """The tenant has as many requests waiting as it may have."""

    status = 429
    type = "rate_limit_error"
    code = "concurrency"


class TooManyUnpaidError(ApiError):
    """The caller has reached a limit of requests that cost nothing.

    `code` names the limit.
    """

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, code: str, retry_after_seconds: float) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.code = code


class InternalError(ApiError):
    """A bug; nothing about its inside is told."""

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request.")


class ServiceUnavailableError(ApiError):
    """The service cannot answer now; a later try may succeed."""

    status = 503
    type = "service_unavailable"
    code = "service_unavailable"


class UnservedModelError(ServiceUnavailableError):
    """The model is known but cannot be used now.

    Args:
        message: for the client.
        retry_after_seconds: when to come back.
        model: its own name, where the request was refused for that and nothing of it was run.
    """

    def __init__(
        self, message: str, *, retry_after_seconds: float | None = None, model: str = ""
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.model = model


class NoWorkerError(UnservedModelError):
    """Nobody serves the model at the moment."""

    code = "no_worker"


class ModelLoadingError(UnservedModelError):
    """A worker is loading the model."""

    code = "model_loading"


class ModelMisconfiguredError(ServiceUnavailableError):
    """The model was published with a part that cannot be used, which its operator has to mend."""

    code = "model_misconfigured"
    should_retry = False


class OverloadedError(ServiceUnavailableError):
    """The queue is full, or the request waited in it for too long."""

    code = "overloaded"


class StoreUnavailableError(ServiceUnavailableError):
    """Redis or the database cannot be reached."""

    code = "store_unavailable"


class ChangeNotAnnouncedError(StoreUnavailableError):
    """The change is in the database, but the gateways could not be told of it."""


class GatewayStoppingError(ServiceUnavailableError):
    """The gateway is being stopped; the same request succeeds on another one."""

    code = "gateway_stopping"


class GenerationFailedError(ServiceUnavailableError):
    """The worker or its engine failed under the request."""

    code = "engine_dead"


class PoisonousRequestError(ApiError):
    """Engines died while they ran the request, so it is given to no further one."""

    code = "poisonous_request"
    should_retry = False


class SlowReaderError(ServiceUnavailableError):
    """The client does not read what it asked for."""

    code = "slow_reader"


class GenerationTimeoutError(ApiError):
    """The request's deadline passed while it was running."""

    status = 504
    type = "timeout_error"
    code = "generation_timeout"


def queue_unavailable() -> StoreUnavailableError:
    """Return the error for a Redis that does not answer."""
    return StoreUnavailableError("The queue cannot be reached.", retry_after_seconds=1.0)


def shown(value: object) -> str:
    """Return a client's value as a message may repeat it: quoted like JSON and shortened."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    if len(text) > MAX_SHOWN_CHARACTERS:
        return text[: MAX_SHOWN_CHARACTERS - 3] + "..."
    return text
