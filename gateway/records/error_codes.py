"""What each error code means, and what to do."""

import re
from typing import Final, NamedTuple

import msgspec

from gateway.records import errors
from gateway.records.errors import ApiError, ErrorStyle

_TABLE: Final = """
invalid_json: Send one JSON object in UTF-8.
invalid_value InvalidParameterError:
  Change the parameter that `param` names; the message has the bound and your value.
missing_required_parameter: Add the parameter that `param` names.
unsupported_parameter: Omit the parameter, or use what the message names instead.
unknown_parameter: Check the spelling of the parameter.
invalid_grammar: Correct the grammar, schema or expression; the message says where it fails.
context_length_exceeded: Shorten the prompt or lower `max_tokens`. The message has both numbers.
invalid_api_key:
  Check that the header is `Authorization: Bearer YOUR_KEY`, with a whole key that is not revoked.
expired_token: Create a new key, or get a new token.
budget_exceeded: Raise the budget, or wait for the next month. The error names the budget.
insufficient_credits InsufficientQuotaError: Buy credits.
insufficient_quota: Raise the budget or buy credits; `limit` names which of them.
insufficient_scope: Use a key with the scope that the message names.
account_suspended: Ask your provider.
ip_not_allowed: Send from an allowed address, or change the addresses of the key.
not_found: Check the path and the id. Objects of other accounts do not exist for you.
output_lost: Send the request again. A failover of Redis lost the response.
previous_response_not_found:
  Send the whole conversation as `input`. Responses are kept for a limited time, unless `store` is
  false.
model_not_found: Use a model of `GET /v1/models`.
method_not_allowed: Use a method of the header `allow`.
request_timeout: Send the whole request at once.
already_exists: Choose another name, or use the object that exists.
conflict: Read the object: its state has changed.
request_cancelled: Send a new request.
idempotency_conflict:
  Use a new Idempotency-Key for each request, and the same one for its retries only.
idempotency_in_progress: Retry with the same Idempotency-Key.
response_deleted: Use a new Idempotency-Key to run the request again.
payload_too_large: Send less; the message has the limit.
uri_too_long: Shorten the query.
headers_too_large: Send fewer or shorter headers, such as cookies.
unsupported_media_type: Send the header `Content-Type: application/json`, or a form for uploads.
range_not_satisfiable: Begin before the end of the file.
requests: Send fewer requests in the period, or ask for a higher limit. The error names the limit.
tokens RateLimitError:
  Send fewer or shorter requests in the period, or lower `max_tokens`. The error names the limit.
audio_seconds RateLimitError:
  Send shorter audio, or wait for the next day. The error names the limit.
concurrency RateLimitError: Wait for the end of running requests before you send more.
stored_bytes RateLimitError: Let stored responses expire, or delete files.
unpaid_requests TooManyUnpaidError: Send fewer requests that fail or cost nothing.
failed_logins TooManyUnpaidError: Correct the credential before you send it again.
internal_error InternalError: Report it to your provider with the header `x-request-id`.
poisonous_request:
  Change the request, and report it to your provider with the header `x-request-id`.
service_unavailable: Retry.
no_worker: Retry, or use another model.
model_loading: Retry: the model is about to be ready.
model_misconfigured: Use another model, and report it to your provider.
overloaded: Retry. A higher `service_tier` waits less.
store_unavailable: Retry.
gateway_stopping: Retry at once.
adapter_failed: Use the base model, and report it to your provider.
engine_dead: Retry.
slow_reader: Read the stream as it arrives, and resume it.
generation_timeout: Lower `max_tokens`, or send the request as a batch or with `background`.
"""
"""Each code, its class unless it is the first class that has the code, and what to do."""


class ErrorCode(NamedTuple):
    """A code of the API's errors."""

    code: str
    meaning: str
    advice: str
    status: int
    others: dict[str, int]
    """Other statuses, by the style of errors."""
    type: str
    may_retry: bool
    example: str


def _classes() -> dict[str, type[ApiError]]:
    classes: list[type[ApiError]] = [ApiError]
    for each in classes:
        classes += each.__subclasses__()
    return {each.code: each for each in reversed(classes)}


_CLASSES: Final = _classes()


def _read(text: str) -> ErrorCode:
    heading, _, advice = text.partition(":")
    code, *name = heading.split()
    found: type[ApiError] = getattr(errors, name[0]) if name else _CLASSES[code]
    meaning = " ".join((found.__doc__ or "").split("\n\n")[0].split())
    # Each class has parameters of its own, which an example does not need.
    error = found.__new__(found)
    ApiError.__init__(error, meaning)
    error.code = code
    statuses = {style.value: error.status_for(style) for style in ErrorStyle}
    return ErrorCode(
        code=code,
        meaning=meaning,
        advice=advice.strip(),
        status=error.status,
        others={name: each for name, each in statuses.items() if each != error.status},
        type=error.type,
        may_retry=error.headers()["x-should-retry"] == "true",
        example=msgspec.json.format(error.content(), indent=2).decode(),
    )


CODES: Final = {each.code: each for each in map(_read, re.split(r"\n(?=\w)", _TABLE.strip()))}
