"""Headers and errors that the OpenAPI page describes for every route."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.json_types import reference

HEADER_TEXT: Final = {
    "x-request-id": "Id of the request: the client's if it is well-formed, else a new one.",
    "x-max-tokens-applied": "Effective `max_tokens`: the lowest of all prompts.",
    "x-prompt-truncated": "Number of truncated prompt tokens, if any.",
    "x-ignored-params": "Parameters of the body that have no effect, if any.",
    "openai-processing-ms": "Milliseconds from the request to the first byte of the response.",
}

LIMIT_TEXT: Final = {
    "x-ratelimit-limit-requests": "Limit of requests: the tightest of key, project and tenant.",
    "x-ratelimit-remaining-requests": "Remaining requests.",
    "x-ratelimit-reset-requests": "Time until the limit is fully available, such as `6m0s`.",
    "x-ratelimit-limit-tokens": "Limit of tokens.",
    "x-ratelimit-remaining-tokens": "Remaining tokens.",
    "x-ratelimit-reset-tokens": "Time until the limit is fully available.",
    "x-ratelimit-limit-tokens-prompt": "Limit of prompt tokens.",
    "x-ratelimit-remaining-tokens-prompt": "Remaining prompt tokens.",
    "x-ratelimit-limit-tokens-generated": "Limit of completion tokens.",
    "x-ratelimit-remaining-tokens-generated": "Remaining completion tokens.",
    **{
        f"anthropic-ratelimit-{family}-{part}": f"{text} {tokens}, in Anthropic's API."
        for family, tokens in (
            ("requests", "requests"),
            ("tokens", "tokens"),
            ("input-tokens", "prompt tokens"),
            ("output-tokens", "completion tokens"),
        )
        for part, text in (
            ("limit", "Limit of"),
            ("remaining", "Remaining"),
            ("reset", "Time at which the limit is fully available, for"),
        )
    },
    "x-budget-remaining": "Remaining dollars of budgets and credits.",
}
"""Headers of rate-limited responses."""

ID_TEXT: Final = {"x-request-id": HEADER_TEXT["x-request-id"]}

_RETRY_TEXT = ID_TEXT | {
    "x-should-retry": "`true` if a retry of the same request may succeed, else `false`.",
    "retry-after": "Seconds after which to retry, if a retry may succeed.",
    "retry-after-ms": "The same in milliseconds.",
}

OTHER_TEXT: Final = {
    "request-id": "The id of the request in Anthropic's API.",
    "x-cost": "Cost in dollars, if the account or the request enables it; not in streams.",
    "sunset": "When requests for this alias begin to fail (RFC 8594), if the alias has a date.",
    "deprecation": "When the alias got this date (RFC 9745).",
    "idempotent-replayed": "`true` for the response of an earlier request with the same "
    "Idempotency-Key.",
}

RESPONSE_HEADERS: Final = tuple(HEADER_TEXT | LIMIT_TEXT | OTHER_TEXT | _RETRY_TEXT)
"""Names of all described headers."""


def header_objects(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the OpenAPI description of response headers."""
    return {
        name: {"description": text, "schema": {"type": "string"}} for name, text in texts.items()
    }


def error_response(description: str) -> dict[str, Any]:
    """Return the OpenAPI description of an error response."""
    return {
        "description": description,
        "headers": header_objects(_RETRY_TEXT),
        "content": {"application/json": {"schema": reference("Error")}},
    }
