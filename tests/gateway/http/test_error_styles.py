"""Conflict 18: one error in the style of each dialect."""

from collections.abc import Iterator
from types import SimpleNamespace

import httpx
from fastapi import FastAPI, Request
from redis.exceptions import ConnectionError as RedisConnectionError

from contract.dialect import Dialect
from gateway.dialects.profile import PROFILES
from gateway.http.draining import Draining
from gateway.http.error_handlers import install_error_handlers
from gateway.http.exchange import exchange_of
from gateway.http.front import FrontMiddleware
from gateway.http.services import Services
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.settings import Settings
from gateway.records import errors
from gateway.records.errors import (
    ApiError,
    AuthenticationError,
    ContextLengthExceededError,
    ErrorStyle,
    InternalError,
    InvalidGrammarError,
    InvalidParameterError,
    ModelNotFoundError,
    NoWorkerError,
    PermissionDeniedError,
    TenantQueueFullError,
    UnknownParameterError,
    UnsupportedParameterError,
)
from tests.support.cases import all_cases

NO_MONEY = errors.InsufficientQuotaError(
    "No.",
    refusing=errors.RefusingLimit(
        limit="budget", scope="key", limit_value=None, used=None, reset_seconds=None
    ),
    code="budget_exceeded",
    is_openai=True,
    headers={},
)
INVALID = InvalidParameterError("'n' must be at least 1. Given: 0.", param="n")


def classes() -> Iterator[type[ApiError]]:
    """Return every class of the tree."""
    for thing in vars(errors).values():
        if isinstance(thing, type) and issubclass(thing, ApiError):
            yield thing


def test_conflict_18_openai_has_words_as_codes() -> None:
    assert INVALID.body(ErrorStyle.OPENAI) == INVALID.body()
    assert INVALID.body() == {
        "error": {
            "message": "'n' must be at least 1. Given: 0.",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }
    assert INVALID.status_for(ErrorStyle.OPENAI) == 400


def test_conflict_18_llamacpp_has_the_status_as_code() -> None:
    assert INVALID.body(ErrorStyle.LLAMACPP) == {
        "error": {
            "message": "'n' must be at least 1. Given: 0.",
            "type": "invalid_request_error",
            "code": 400,
        }
    }


def test_conflict_18_mistralrs_returns_422_in_the_envelope_of_openai() -> None:
    assert INVALID.body(ErrorStyle.MISTRALRS) == INVALID.body()
    assert INVALID.status_for(ErrorStyle.MISTRALRS) == 422
    assert NoWorkerError("No.").status_for(ErrorStyle.MISTRALRS) == 503


def test_conflict_18_vllm_has_classes_as_types() -> None:
    assert INVALID.body(ErrorStyle.VLLM) == {
        "error": {
            "message": "'n' must be at least 1. Given: 0.",
            "type": "BadRequestError",
            "param": "n",
            "code": 400,
        }
    }


@all_cases(
    ("error", "llamacpp", "vllm"),
    [
        (AuthenticationError("No."), "authentication_error", "AuthenticationError"),
        (PermissionDeniedError("No."), "permission_error", "PermissionDeniedError"),
        (ModelNotFoundError("x"), "not_found_error", "NotFoundError"),
        (TenantQueueFullError("No."), "rate_limit_error", "RateLimitError"),
        (InternalError(), "server_error", "InternalServerError"),
        (NoWorkerError("No."), "unavailable_error", "ServiceUnavailableError"),
    ],
)
def test_conflict_18_types_have_the_names_that_clients_know(
    error: ApiError, llamacpp: str, vllm: str
) -> None:
    assert error.body(ErrorStyle.LLAMACPP)["error"]["type"] == llamacpp
    assert error.body(ErrorStyle.VLLM)["error"]["type"] == vllm


@all_cases("style", ErrorStyle)
def test_every_error_has_a_type_in_every_style(style: ErrorStyle) -> None:
    for kind in classes():
        error = kind.__new__(kind)
        ApiError.__init__(error, "It failed.")
        error.n_prompt_tokens, error.n_ctx = None, 64  # type: ignore[attr-defined]
        error.llamacpp_message = ""  # type: ignore[attr-defined]
        body = error.body(style)["error"]
        assert body["type"], kind
        # Only a bug is an internal error.
        if style is ErrorStyle.VLLM and error.status != 500:
            assert body["type"] != "InternalServerError", kind


@all_cases(
    ("error", "status", "kind"),
    [
        (INVALID, 400, "invalid_request_error"),
        (AuthenticationError("No."), 401, "authentication_error"),
        (NO_MONEY, 402, "billing_error"),
        (errors.OutOfQuotaError("No."), 402, "billing_error"),
        (PermissionDeniedError("No."), 403, "permission_error"),
        (ModelNotFoundError("x"), 404, "not_found_error"),
        (errors.IdempotencyConflictError(), 409, "conflict_error"),
        (errors.PayloadTooLargeError("No."), 413, "request_too_large"),
        (TenantQueueFullError("No."), 429, "rate_limit_error"),
        (InternalError(), 500, "api_error"),
        (errors.GenerationTimeoutError("No."), 504, "timeout_error"),
        (errors.OverloadedError("No."), 529, "overloaded_error"),
        (NoWorkerError("No."), 529, "overloaded_error"),
    ],
)
def test_anthropics_clients_get_their_statuses_and_types(
    error: ApiError, status: int, kind: str
) -> None:
    assert error.status_for(ErrorStyle.ANTHROPIC) == status
    body = error.body(ErrorStyle.ANTHROPIC)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"]["message"] == error.message


def test_characters_that_do_not_show_are_escaped() -> None:
    error = errors.must("a\u200b", "be\nplain", "\x1b\x7f\x85é")
    assert error.param == "a\\u200b"
    assert error.message == "'a\\u200b' must be\nplain. Given: \"\\u001b\\x7f\\x85é\"."


def test_context_error_has_the_counts_in_llamacpp() -> None:
    excess = "you requested 70 tokens"
    error = ContextLengthExceededError(
        excess, advice="Be brief.", window=64, param="prompt", requested="70", n_prompt_tokens=70
    )
    assert error.body(ErrorStyle.LLAMACPP)["error"] == {
        "message": "request (70 tokens) exceeds the available context size (64 tokens), try "
        "increasing it: you requested 70 tokens. Be brief.",
        "type": "exceed_context_size_error",
        "code": 400,
        "n_prompt_tokens": 70,
        "n_ctx": 64,
    }
    for style in (ErrorStyle.OPENAI, ErrorStyle.MISTRALRS, ErrorStyle.VLLM):
        body = error.body(style)["error"]
        assert set(body) == {"message", "type", "param", "code"}
        assert body["message"] == (
            "This model's maximum context length is 64 tokens. However, you requested 70 tokens. "
            "Be brief."
        )
    without = ContextLengthExceededError(excess, advice="Be brief.", window=64, param="prompt")
    body = without.body(ErrorStyle.LLAMACPP)["error"]
    assert body["message"].startswith("request exceeds the available context size (64 tokens), ")
    assert "n_ctx" not in body


@all_cases(
    ("kind", "code"),
    [
        (UnsupportedParameterError, "unsupported_parameter"),
        (UnknownParameterError, "unknown_parameter"),
        (InvalidGrammarError, "invalid_grammar"),
    ],
)
def test_refused_parameters_are_client_errors(kind: type[ApiError], code: str) -> None:
    error = kind("No.", param="x")
    assert (error.status, error.code, error.param) == (400, code, "x")
    assert error.headers()["x-should-retry"] == "false"


def make_app() -> FastAPI:
    """Make an application whose routes fail in every way."""
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/invalid")
    async def _invalid() -> None:
        raise INVALID

    @app.get("/known/{style}")
    async def _known(style: ErrorStyle, request: Request) -> None:
        exchange_of(request.scope).error_style = style
        raise INVALID

    @app.get("/bug")
    async def _bug() -> None:
        raise RuntimeError("inside")

    @app.get("/redis")
    async def _redis() -> None:
        raise RedisConnectionError("inside")

    return app


async def ask(
    path: str, *, app: FastAPI | None = None, dialect: str | None = None
) -> httpx.Response:
    """Return the response of an application that also handles bugs."""
    transport = httpx.ASGITransport(app or make_app(), raise_app_exceptions=False)
    headers = {} if dialect is None else {b"x-api-dialect": dialect.encode("latin-1")}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.get(path, headers=headers)


@all_cases("dialect", Dialect)
async def test_conflict_18_header_chooses_the_style(dialect: Dialect) -> None:
    response = await ask("/invalid", dialect=str(dialect))
    style = PROFILES[dialect].error_style
    assert response.status_code == (422 if dialect is Dialect.MISTRALRS else 400)
    assert response.json() == INVALID.body(style)
    assert response.headers["x-should-retry"] == "false"


@all_cases("style", ErrorStyle)
async def test_style_of_the_route_overrides_the_header(style: ErrorStyle) -> None:
    response = await ask(f"/known/{style}", dialect="vllm")
    body = response.json()
    assert (body.pop("request_id", None) is None) == (style is not ErrorStyle.ANTHROPIC)
    assert body == INVALID.body(style)


@all_cases("dialect", [None, "", "nonsense", "\u00e9"])
async def test_default_dialect_chooses_the_style_otherwise(dialect: str | None) -> None:
    app = make_app()
    assert (await ask("/invalid", app=app, dialect=dialect)).json() == INVALID.body()
    settings = SimpleNamespace(default_dialect=Dialect.LLAMACPP)
    app.state.services = Services({Settings: settings})
    response = await ask("/invalid", app=app, dialect=dialect)
    assert response.json() == INVALID.body(ErrorStyle.LLAMACPP)


@all_cases(
    ("path", "status", "kind"),
    [
        ("/bug", 500, "server_error"),
        ("/redis", 503, "unavailable_error"),
        ("/nowhere", 404, "not_found_error"),
    ],
)
async def test_failures_outside_of_routes_have_the_style_too(
    path: str, status: int, kind: str
) -> None:
    response = await ask(path, dialect="llamacpp")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, status, kind)
    assert "inside" not in response.text


async def test_bug_after_the_route_chose_its_style_has_that_style() -> None:
    app = make_app()
    settings = SimpleNamespace(default_dialect=Dialect.OPENAI)
    app.state.services = Services({Settings: settings, LoopTurns: LoopTurns()})
    app.add_middleware(FrontMiddleware, application=app, wrap=lambda inner: inner, drain=Draining())

    @app.get("/late")
    async def _late(request: Request) -> None:
        exchange_of(request.scope).error_style = ErrorStyle.VLLM
        raise RuntimeError("inside")

    response = await ask("/late", app=app)
    assert response.json()["error"]["type"] == "InternalServerError"
    assert response.json()["error"]["code"] == 500
    assert response.headers["x-request-id"].startswith("req_")
