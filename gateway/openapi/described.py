"""Headers and errors that the OpenAPI page describes for every route."""

from typing import Any, Final

from gateway.openapi.schemas import reference

HEADER_TEXT: Final = {
    "x-request-id": "The request's own id if it sent a well-formed one.",
    "x-max-tokens-applied": "`max_tokens` after the context window; the lowest of all prompts.",
    "x-prompt-truncated": "Prompt tokens that were cut off, where any were.",
    "x-ignored-params": "Parameters of the body that have no effect here, where there are any.",
    "openai-processing-ms": "Milliseconds that the request took up to the first byte.",
}

LIMIT_TEXT: Final = {
    "x-ratelimit-limit-requests": "Of the tightest limit of key, project and tenant.",
    "x-ratelimit-remaining-requests": "What is left of it.",
    "x-ratelimit-reset-requests": "When all of it is left again, such as `6m0s`.",
    "x-ratelimit-limit-tokens": "The same for tokens.",
    "x-ratelimit-remaining-tokens": "What is left of it.",
    "x-ratelimit-reset-tokens": "When all of it is left again.",
    "x-ratelimit-limit-tokens-prompt": "The same for prompt tokens.",
    "x-ratelimit-remaining-tokens-prompt": "What is left of it.",
    "x-ratelimit-limit-tokens-generated": "The same for completion tokens.",
    "x-ratelimit-remaining-tokens-generated": "What is left of it.",
    "x-budget-remaining": "Dollars that budgets and credits still allow.",
}
"""Headers of rate-limited responses."""

_RETRY_TEXT = {
    "x-request-id": HEADER_TEXT["x-request-id"],
    "x-should-retry": "`true` or `false`: whether the same request may succeed later.",
    "retry-after": "Seconds after which to retry, where that makes sense.",
    "retry-after-ms": "The same in milliseconds.",
}


def header_objects(texts: dict[str, str]) -> dict[str, Any]:
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
