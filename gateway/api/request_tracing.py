"""Tracing span of an HTTP request and its generation attributes."""

import json
from collections.abc import Awaitable
from typing import Any

from opentelemetry.trace import StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract import logs
from contract.tracing import (
    CHAT,
    GEN_AI_INPUT,
    GEN_AI_OPERATION,
    GEN_AI_PROVIDER,
    GEN_AI_REQUEST_CHOICES,
    GEN_AI_REQUEST_MAX_TOKENS,
    GEN_AI_REQUEST_MODEL,
    GEN_AI_REQUEST_STREAM,
    GEN_AI_RESPONSE_ID,
    GEN_AI_RESPONSE_MODEL,
    HTTP_METHOD,
    HTTP_ROUTE,
    HTTP_STATUS,
    PROVIDER,
    REQUEST_ID,
    SERVER_ADDRESS,
    SERVER_PORT,
    TEXT_COMPLETION,
    URL_SCHEME,
)
from gateway import tracing
from gateway.api.draining import PROBES
from gateway.api.plan import Plan
from gateway.dialects.request import GenerationRequest


class TracingMiddleware:
    """Gives every request a span, except health checks and metrics."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        with tracing.request_span(scope["method"], Headers(scope=scope), _described(scope)) as span:
            if not span.is_recording():
                await self._app(scope, receive, send)
                return

            def note_and_send(message: Message) -> Awaitable[None]:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute(HTTP_STATUS, status)
                    if status >= 500:
                        span.set_status(StatusCode.ERROR)
                return send(message)

            try:
                await self._app(scope, receive, note_and_send)
            finally:
                if route := _route(scope):
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute(HTTP_ROUTE, route)


def note_plan(plan: Plan, completion_id: str) -> None:
    """Set the generation attributes of the current request's span."""
    if not tracing.is_on():
        return
    request = plan.request
    attributes: dict[str, str | bool | int | float] = {
        GEN_AI_OPERATION: TEXT_COMPLETION if request.chat is None else CHAT,
        GEN_AI_PROVIDER: PROVIDER,
        GEN_AI_REQUEST_CHOICES: request.n,
        GEN_AI_REQUEST_MAX_TOKENS: plan.prepared.applied_max_tokens,
        GEN_AI_REQUEST_MODEL: plan.model,
        GEN_AI_REQUEST_STREAM: request.stream,
        GEN_AI_RESPONSE_ID: completion_id,
        GEN_AI_RESPONSE_MODEL: plan.card.model,
    }
    if tracing.shows_content():
        attributes[GEN_AI_INPUT] = json.dumps(_input(request))[: tracing.MOST_CONTENT]
    tracing.note(attributes)


def _described(scope: Scope) -> tracing.Attributes:
    host, port = scope.get("server") or ("", None)
    described: dict[str, str | bool | int | float] = {
        HTTP_METHOD: scope["method"],
        REQUEST_ID: logs.request_id.get(),
        SERVER_ADDRESS: host,
        URL_SCHEME: scope["scheme"],
    }
    if port is not None:
        described[SERVER_PORT] = port
    return described


def _route(scope: Scope) -> str:
    """Return the route template of a request; empty if no route matched.

    Never export the path itself: a client may have put a key into it.
    """
    if "endpoint" not in scope:
        return ""
    path: str = getattr(scope.get("route"), "path", "") or scope["path"]
    for name, value in scope.get("path_params", {}).items():
        path = path.replace(str(value), f"{{{name}}}", 1)
    return path


def _input(request: GenerationRequest) -> list[dict[str, Any]]:
    """Return the client's input in the format of OpenTelemetry's conventions."""
    if request.chat is not None:
        return [
            {
                "role": message.get("role"),
                "parts": [{"type": "text", "content": message.get("content")}],
            }
            for message in request.chat.messages
        ]
    return [
        {"role": "user", "parts": [{"type": "text", "content": prompt}]}
        for prompt in request.prompts
    ]
