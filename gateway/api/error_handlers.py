"""Every failure in OpenAI's envelope, those of the router and the unforeseen ones included."""

import logging

from fastapi import FastAPI, Request, Response
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from gateway.errors import (
    ApiError,
    BadRequestError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    StoreUnavailableError,
)

logger = logging.getLogger(__name__)


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every exception with an ApiError."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RedisError, _on_redis_error)
    app.add_exception_handler(Exception, _on_bug)


def to_response(error: ApiError) -> Response:
    """Render an error."""
    return Response(
        error.content(),
        status_code=error.status,
        headers=dict(error.headers()),
        media_type="application/json",
    )


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101 - FastAPI's registration guarantees it
    return to_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - FastAPI's registration guarantees it
    path, method = request.url.path, request.method
    if error.status_code == NotFoundError.status:
        return to_response(NotFoundError(f"There is no route {method} {path[:200]}."))
    if error.status_code == MethodNotAllowedError.status:
        response = to_response(MethodNotAllowedError(f"{method} is not allowed on {path[:200]}."))
        response.headers.update(error.headers or {})
        return response
    return to_response(BadRequestError("The request cannot be read."))


async def _on_redis_error(_request: Request, error: Exception) -> Response:
    logger.warning("Redis failed a request: %s", type(error).__name__)
    return to_response(
        StoreUnavailableError("The queue cannot be reached.", retry_after_seconds=1.0)
    )


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return to_response(InternalError())
