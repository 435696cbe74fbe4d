"""Errors that the API returns, as one class hierarchy.

    ApiError
    ├── BadRequestError 400
    │   ├── InvalidJsonError
    │   ├── InvalidParameterError
    │   ├── MissingParameterError
    │   ├── UnsupportedParameterError
    │   │   └── UnsupportedThreadError
    │   ├── PreviousResponseNotFoundError
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
    │   ├── OutputLostError
    │   ├── ModelNotFoundError
    │   └── ModelRetiredError
    ├── MethodNotAllowedError 405
    ├── RequestTimeoutError 408
    ├── ConflictError 409
    │   ├── IdempotencyConflictError
    │   ├── IdempotencyInProgressError
    │   ├── ResponseDeletedError
    │   ├── RequestCancelledError
    │   └── StateConflictError
    ├── PayloadTooLargeError 413
    ├── TargetTooLongError 414
    ├── HeadersTooLargeError 431
    ├── UnsupportedMediaTypeError 415
    ├── RangeNotSatisfiableError 416
    ├── RateLimitError 429
    ├── StorageFullError 429
    ├── TokensExhaustedError 429
    ├── OutOfQuotaError 429
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
    │   ├── AdapterFailedError
    │   ├── GenerationFailedError
    │   │   └── TakenOverError
    │   └── SlowReaderError
    └── GenerationTimeoutError 504

A class defines the status, type and code. An instance carries the message, the parameter it
concerns and the time after which to retry. One renderer formats an error in the style of the
request's dialect, for JSON bodies and mid-stream events alike. Messages never contain a key, a
token or a prompt.
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
"""Maximum length of a client's own value that a message repeats."""


_UNPROCESSABLE = 422
"""The status that mistral.rs returns for a request that it cannot parse or does not allow."""

_LLAMACPP_TYPES = {404: "not_found_error", 503: "unavailable_error"}
"""Error types of llama.cpp that differ from OpenAI's, by status."""

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
    416: "RangeNotSatisfiableError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
"""vLLM's error types by status, plus names in the same style where vLLM defines none."""


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's error types by status. Other statuses are of invalid requests."""
_OVERLOADED = 529
"""The status at which Anthropic's clients wait and retry; it replaces 503."""
_NO_MONEY = ("insufficient_quota", 402)
"""The type of errors of budgets and credits, and their status for Anthropic's clients."""


class ErrorStyle(StrEnum):
    """The format of an error body."""

    OPENAI = "openai"  # {message, type, param, code}, where code is a word.
    ANTHROPIC = "anthropic"  # {type: error, error: {type, message}}, with 529 instead of 503.
    LLAMACPP = "llamacpp"  # {message, type, code}, where code is the status.
    MISTRALRS = "mistralrs"  # Same as OpenAI's, with 422 instead of 400.
    VLLM = "vllm"  # {message, type, param, code}, where type is a class and code the status.


class StartupError(Exception):
    """The process cannot start; the message gives the operator the reason. Not an API response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Why a model cannot run a request now, and when it may, as named in the error body."""

    reason: str
    """The code of the error, or what it means of a queue: `queue_full` or `wait_too_long`."""
    model: str
    tier: str
    position: int | None = None
    """The place in the queue that the request would have got, counted from 1; None without one."""
    estimated_wait_seconds: float | None = None
    """None if it is unknown."""


class ApiError(Exception):
    """Base class of all error responses of the API."""

    status: int = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    should_retry: bool | None = None
    """Whether a retry can succeed; None if the status already determines it."""
    closes_connection: bool = False
    """Whether the response announces the end of the connection: its request was not read whole."""
    is_recorded: bool = False
    """Whether a usage record has the failure of the request."""
    more_headers: Mapping[str, str] = MappingProxyType({})
    """Headers besides those about a retry."""
    availability: Availability | None = None
    """Of the model of a refused request, if it may run later."""

    @override
    def __init_subclass__(
        cls,
        *,
        status: int | None = None,
        type_: str | None = None,
        code: str | None = None,
        should_retry: bool | None = None,
    ) -> None:
        """Set the attributes of a class that differ from those of its base.

        Errors of clients have the type `invalid_request_error` unless they name another one.
        """
        super().__init_subclass__()
        if type_ is None and status is not None and status < ApiError.status:
            type_ = "invalid_request_error"
        own = {"status": status, "type": type_, "code": code, "should_retry": should_retry}
        for name, value in own.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None
    ) -> None:
        message = printable(message)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else printable(param)
        self.retry_after_seconds = retry_after_seconds

    def status_for(self, style: ErrorStyle) -> int:
        """Return the HTTP status that clients of this style expect for the error."""
        if style is ErrorStyle.MISTRALRS and self.status == BadRequestError.status:
            return _UNPROCESSABLE
        if style is not ErrorStyle.ANTHROPIC:
            return self.status
        if self.type == _NO_MONEY[0]:
            return _NO_MONEY[1]
        return _OVERLOADED if self.status == ServiceUnavailableError.status else self.status

    def concerns(self, model: str, tier: str) -> None:
        """Describe the availability of the model that refuses a request, if it may run later."""
        is_temporary = self.status in (RateLimitError.status, ServiceUnavailableError.status)
        if is_temporary and self.should_retry is not False and self.availability is None:
            wait = self.retry_after_seconds
            self.availability = Availability(
                reason=self.code, model=model, tier=tier, estimated_wait_seconds=wait
            )

    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> dict[str, Any]:
        """Return the error envelope, in OpenAI's style by default."""
        body = self._envelope(style)
        if self.availability is not None:
            body["error"]["availability"] = asdict(self.availability)
        return body

    def _envelope(self, style: ErrorStyle) -> dict[str, Any]:
        described: dict[str, Any]
        match style:
            case ErrorStyle.OPENAI | ErrorStyle.MISTRALRS:
                described = {"type": self.type, "param": self.param, "code": self.code}
            case ErrorStyle.ANTHROPIC:
                kind = _ANTHROPIC_TYPES.get(self.status_for(style), BadRequestError.type)
                return {"type": "error", "error": {"type": kind, "message": self.message}}
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

    def link(self) -> Mapping[str, str]:
        """Return the header that leads to the page of the code."""
        return {"link": f'</docs/errors/{self.code}>; rel="help"'}

    def headers(self) -> Mapping[str, str]:
        """Return the headers, from which OpenAI's clients read whether and when to retry."""
        retries = self.should_retry
        if retries is None:
            is_temporary = self.status in (408, 409, 429) or self.status >= 500
            retries = is_temporary or self.retry_after_seconds is not None
        headers = {**self.more_headers, "x-should-retry": "true" if retries else "false"}
        if self.closes_connection:
            headers["connection"] = "close"
        if self.retry_after_seconds is not None:
            # Round up, since an early retry is rejected again, but ignore float rounding errors.
            milliseconds = math.ceil(round(self.retry_after_seconds * 1000, 3))
            headers["retry-after"] = str(-(-milliseconds // 1000))
            headers["retry-after-ms"] = str(milliseconds)
        return headers


class BadRequestError(ApiError, status=400, code="invalid_value"):
    """The request is malformed or not allowed."""


class InvalidJsonError(BadRequestError, code="invalid_json"):
    """The body is not the expected JSON."""


class InvalidParameterError(BadRequestError):
    """A parameter has an invalid type or value."""


class MissingParameterError(BadRequestError, code="missing_required_parameter"):
    """A required parameter is missing."""

    def __init__(self, param: str) -> None:
        super().__init__(f"Missing required parameter: '{param}'.", param=param)


class UnsupportedParameterError(BadRequestError, code="unsupported_parameter"):
    """A parameter that would change the output is not supported, or not by this model."""


class UnsupportedThreadError(UnsupportedParameterError):
    """A message asks the server to keep its conversation.

    By the details, Anthropic's SDKs send the whole conversation instead.
    """

    @override
    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> dict[str, Any]:
        body = super().body(style)
        if style is ErrorStyle.ANTHROPIC:
            code = "thread_unsupported_request"
            body["error"]["details"] = {"error_code": code, "unsupported": ["thread"]}
        return body


class PreviousResponseNotFoundError(BadRequestError, code="previous_response_not_found"):
    """The response that a request continues is not kept, or is another project's."""


class UnknownParameterError(BadRequestError, code="unknown_parameter"):
    """A parameter is unknown in a place where unknown parameters are not ignored."""


class InvalidGrammarError(BadRequestError, code="invalid_grammar"):
    """A grammar, schema or regular expression cannot be used."""


class ContextLengthExceededError(BadRequestError, code="context_length_exceeded"):
    """The prompt, or prompt and completion together, exceed the context window.

    The message has the words by which clients recognize this error: OpenAI's, or llama.cpp's in its
    dialect, or Anthropic's, upon which agents compact their conversation.

    Args:
        excess: A clause that says what does not fit.
        advice: Sentences that name the parameter, its bound and its value.
        window: The context window in tokens.
        param: The parameter that the error concerns.
        requested: The tokens of the request as text, such as `at least 65`; empty if unknown.
        n_prompt_tokens: Number of prompt tokens; None if unknown.
    """

    def __init__(
        self,
        excess: str,
        *,
        advice: str,
        window: int,
        param: str,
        requested: str = "",
        n_prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(
            f"This model's maximum context length is {window} tokens. However, {excess}. {advice}",
            param=param,
        )
        request = f"request ({requested} tokens)" if requested else "request"
        self.llamacpp_message = (
            f"{request} exceeds the available context size ({window} tokens), try increasing it: "
            f"{excess}. {advice}"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = window

    @override
    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> dict[str, Any]:
        """Use the messages, type and token counts that llama.cpp's and Anthropic's clients read."""
        body = super().body(style)
        if style is ErrorStyle.LLAMACPP:
            error = body["error"]
            error |= {"message": self.llamacpp_message, "type": "exceed_context_size_error"}
            if self.n_prompt_tokens is not None:
                error |= {"n_prompt_tokens": self.n_prompt_tokens, "n_ctx": self.n_ctx}
        if style is ErrorStyle.ANTHROPIC:
            # The prompt leaves no room for one token: more for the completion is accepted.
            tokens, most = self.n_prompt_tokens or self.n_ctx + 1, self.n_ctx - 1
            words = f"prompt is too long: {tokens} tokens > {most} maximum"
            body["error"]["message"] = f"{words}. {self.message}"
        return body


class AuthenticationError(
    ApiError, status=401, type_="authentication_error", code="invalid_api_key"
):
    """The request has no valid credential."""

    # The authentication challenge that HTTP requires.
    more_headers = MappingProxyType({"www-authenticate": "Bearer"})


class ExpiredCredentialError(AuthenticationError, code="expired_token"):
    """The credential has expired."""

    principal: Any = None
    """The Principal that a key was of; None for a token."""


class PermissionDeniedError(
    ApiError, status=403, type_="permission_error", code="insufficient_scope"
):
    """The credential is valid but does not permit the request."""


class AccountSuspendedError(PermissionDeniedError, code="account_suspended"):
    """The tenant is suspended."""


class AddressNotAllowedError(PermissionDeniedError, code="ip_not_allowed"):
    """The credential may not be used from the request's address."""


class NotFoundError(ApiError, status=404, code="not_found"):
    """The route or resource does not exist."""


class OutputLostError(NotFoundError, code="output_lost"):
    """A failover of Redis lost the output of a stored response, and its gateway has died."""


class ModelNotFoundError(NotFoundError, code="model_not_found"):
    """The model is unknown, or not visible to the principal; both return the same response."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {shown(model)} does not exist or you do not have access to it.",
            param="model",
        )


class ModelRetiredError(NotFoundError, code="model_not_found"):
    """The sunset date of an alias has passed."""

    def __init__(
        self, alias: str, *, retired_at: str, replacement: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(
            f"The model {shown(alias)} was retired at {retired_at}. "
            f"Use {shown(replacement)} instead.",
            param="model",
        )
        self.more_headers = headers


class MethodNotAllowedError(ApiError, status=405, code="method_not_allowed"):
    """The route exists, but not for this method."""


class RequestTimeoutError(ApiError, status=408, type_="timeout_error", code="request_timeout"):
    """The request's headers or body did not arrive in time."""

    closes_connection = True


class ConflictError(ApiError, status=409, type_="conflict", code="already_exists"):
    """The resource to create already exists."""


class StateConflictError(ConflictError, code="conflict", should_retry=False):
    """The state of a resource does not allow the change."""


class RequestCancelledError(ConflictError, code="request_cancelled", should_retry=False):
    """The response to read was cancelled and has no further content."""


class IdempotencyConflictError(ConflictError, code="idempotency_conflict", should_retry=False):
    """The Idempotency-Key belongs to a different request."""

    def __init__(self) -> None:
        super().__init__(
            "The Idempotency-Key was already used with a different body, path or dialect.",
            param="Idempotency-Key",
        )


class IdempotencyInProgressError(ConflictError, code="idempotency_in_progress"):
    """A request with the same Idempotency-Key is currently being admitted."""

    def __init__(self) -> None:
        super().__init__(
            "A request with this Idempotency-Key is still being admitted.",
            param="Idempotency-Key",
            retry_after_seconds=1.0,
        )


class ResponseDeletedError(ConflictError, code="response_deleted", should_retry=False):
    """The response to which an Idempotency-Key maps was deleted."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"The response {request_id} of this Idempotency-Key was deleted.",
            param="Idempotency-Key",
        )


class PayloadTooLargeError(ApiError, status=413, code="payload_too_large"):
    """The body exceeds the size limit."""

    closes_connection = True


class TargetTooLongError(ApiError, status=414, code="uri_too_long"):
    """The path and query of the request exceed the size limit."""


class HeadersTooLargeError(ApiError, status=431, code="headers_too_large"):
    """The request's headers exceed the limit on their number or size."""


class UnsupportedMediaTypeError(ApiError, status=415, code="unsupported_media_type"):
    """The body is not declared as JSON, or an upload not as a form."""


class RangeNotSatisfiableError(ApiError, status=416, code="range_not_satisfiable"):
    """The range of a download begins after the end of the file."""

    def __init__(self, size: int) -> None:
        super().__init__(f"The range begins after the end of the file, which has {size} bytes.")
        # HTTP requires that they name the size of the file.
        self.more_headers = {"content-range": f"bytes */{size}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusingLimit:
    """The limit that rejected a request, as named in the error body."""

    limit: str
    scope: str
    limit_value: int | None
    """None for an amount of money that the caller may not see; then `used` is None, too."""
    used: int | None
    reset_seconds: float | None
    """When the limit will allow the request; None if never or unknown."""


class _LimitError(ApiError):
    """A limit, a budget or the credit balance does not allow the request."""

    refusing: RefusingLimit | None = None
    """The limit; None for a rejection that no limit of the account caused."""

    @override
    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> dict[str, Any]:
        body = super().body(style)
        if self.refusing is not None:
            body["error"] |= asdict(self.refusing)
        return body


class InsufficientQuotaError(
    _LimitError, status=402, type_="insufficient_quota", code="budget_exceeded", should_retry=False
):
    """The monthly budget or the prepaid credit is insufficient."""

    def __init__(
        self,
        message: str,
        *,
        refusing: RefusingLimit,
        code: str,
        is_openai: bool,
        headers: Mapping[str, str],
    ) -> None:
        """Use another status and code for OpenAI's clients than for all others."""
        super().__init__(message)
        self.refusing, self.more_headers = refusing, headers
        self.status = 429 if is_openai else 402
        self.code = self.type if is_openai else code


class RateLimitError(_LimitError, status=429, type_="rate_limit_error", code="requests"):
    """A limit on requests, tokens, concurrent requests or stored bytes is or would be exceeded."""

    def __init__(
        self,
        message: str,
        *,
        refusing: RefusingLimit,
        code: str,
        is_retryable: bool,
        headers: Mapping[str, str],
    ) -> None:
        """`is_retryable` is False if the limit would reject the request even with nothing used."""
        super().__init__(message, retry_after_seconds=refusing.reset_seconds)
        self.refusing, self.more_headers = refusing, headers
        self.code = code
        self.should_retry = is_retryable


class StorageFullError(ApiError, status=429, type_="rate_limit_error", code="stored_bytes"):
    """A running response would exceed the limit of stored bytes, and has ended."""


class TokensExhaustedError(ApiError, status=429, type_="rate_limit_error", code="tokens"):
    """A limit allows a running response no further tokens, and it has ended.

    Without a time to retry after, the limit never allows so many tokens.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.should_retry = retry_after_seconds is not None


class OutOfQuotaError(
    ApiError, status=429, type_="insufficient_quota", code="insufficient_quota", should_retry=False
):
    """The budget or credit allows a running response no further tokens, and it has ended."""


class TenantQueueFullError(ApiError, status=429, type_="rate_limit_error", code="concurrency"):
    """The tenant has reached its limit of waiting requests or of request bodies in memory."""


class TooManyUnpaidError(ApiError, status=429, type_="rate_limit_error"):
    """The caller has reached a rate limit on unpaid requests or failed logins.

    `code` names the limit.
    """

    def __init__(self, message: str, *, code: str, retry_after_seconds: float) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.code = code


class InternalError(ApiError):
    """A bug in the gateway; the response reveals no internals."""

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request.")


class ServiceUnavailableError(
    ApiError, status=503, type_="service_unavailable", code="service_unavailable"
):
    """The service is unavailable at the moment; a retry may succeed."""


class UnservedModelError(ServiceUnavailableError):
    """The model is known but not available at the moment.

    `model` is its own name if the request was rejected before any of its jobs ran, else empty.
    """

    def __init__(
        self, message: str, *, retry_after_seconds: float | None = None, model: str = ""
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.model = model


class NoWorkerError(UnservedModelError, code="no_worker"):
    """No worker serves the model at the moment."""


class ModelLoadingError(UnservedModelError, code="model_loading"):
    """A worker is loading the model."""


class ModelMisconfiguredError(
    ServiceUnavailableError, code="model_misconfigured", should_retry=False
):
    """Part of the model's published configuration is unusable, and its operator must fix it."""


class OverloadedError(ServiceUnavailableError, code="overloaded"):
    """The queue is full, or the request waited in it for too long."""


class StoreUnavailableError(ServiceUnavailableError, code="store_unavailable"):
    """Redis or the database cannot be reached.

    `detail` is for the operator, with the store's address and the cause; clients do not receive it.
    """

    def __init__(
        self, message: str, *, detail: str = "", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.detail = detail

    @override
    def __str__(self) -> str:
        return self.detail or self.message


class ChangeNotAnnouncedError(StoreUnavailableError):
    """The change is in the database, but could not be announced to the gateways."""


class GatewayStoppingError(ServiceUnavailableError, code="gateway_stopping"):
    """The gateway is shutting down; the same request succeeds on another gateway."""


class AdapterFailedError(ServiceUnavailableError, code="adapter_failed"):
    """No worker could load the adapter of the request."""


class GenerationFailedError(ServiceUnavailableError, code="engine_dead"):
    """The worker or its engine failed while it ran the request."""


class TakenOverError(GenerationFailedError):
    """Another gateway continues the response, which has not failed."""


class PoisonousRequestError(ApiError, code="poisonous_request", should_retry=False):
    """Engines crashed while they ran the request, so it is not retried."""


class SlowReaderError(ServiceUnavailableError, code="slow_reader"):
    """The client does not read the response."""


class GenerationTimeoutError(
    ApiError, status=504, type_="timeout_error", code="generation_timeout"
):
    """The request's deadline passed while it was running."""


def codes_of_clients() -> frozenset[str]:
    """Return the codes that only errors of clients have, not failures of the service."""
    is_ours: dict[str, bool] = {}
    classes = [ApiError]
    while classes:
        each = classes.pop()
        is_ours[each.code] = is_ours.get(each.code, False) or each.status >= InternalError.status
        classes += each.__subclasses__()
    return frozenset(code for code, ours in is_ours.items() if not ours)


def queue_unavailable() -> StoreUnavailableError:
    """Return the error for when Redis does not respond."""
    return StoreUnavailableError("The queue cannot be reached.", retry_after_seconds=1.0)


def must(path: str, rule: str, given: object, *, param: str | None = None) -> InvalidParameterError:
    """Return the error for a value that breaks a rule, such as "be an object".

    `param` is the parameter, if `path` is a place inside of it.
    """
    return invalid(path, f"must {rule}. Given: {shown(given)}.", param=param)


def invalid(path: str, rule: str, *, param: str | None = None) -> InvalidParameterError:
    """Return the error for a parameter that breaks a rule, such as "must not be empty."."""
    return InvalidParameterError(f"'{path}' {rule}", param=param or path)


def invalid_header(name: str, rule: str, given: object) -> InvalidParameterError:
    """Return the error for a header that breaks a rule, such as "be true or false"."""
    message = f"The header '{name}' must {rule}. Given: {shown(given)}."
    return InvalidParameterError(message, param=name)


def unsupported(path: str, reason: str, *, param: str | None = None) -> UnsupportedParameterError:
    """Return the error for a parameter that is not supported, such as "is not read here."."""
    return UnsupportedParameterError(f"'{path}' {reason}", param=param or path)


def shown(value: object) -> str:
    """Return a client's value for use in a message: quoted like JSON and truncated."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    text = printable(text)
    if len(text) > MAX_SHOWN_CHARACTERS:
        return text[: MAX_SHOWN_CHARACTERS - 3] + "..."
    return text


def printable(text: str) -> str:
    """Return text with escapes for the characters that do not show, except line ends.

    Such characters hide a part of a message, or control the terminal that shows it.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text
    )
