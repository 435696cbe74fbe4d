"""Requests of tests, each in its own trace."""

import secrets
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.events import parse_chunks
from tests.support.stack import MODEL, Stack

PROMPT = "Wherefore whispers the walrus"
"""This text occurs nowhere else in the system."""


@dataclass(frozen=True, slots=True)
class TracedResponse:
    """The result of a request."""

    response: httpx.Response
    trace_id: str
    client_span_id: str

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks of a stream."""
        return parse_chunks(self.response.content)


def start_scripted_worker(stack: Stack, name: str = "worker", **environment: str) -> None:
    """Start a worker with the scripted engine and wait until it is ready."""
    settings = {"SLUICE_ENGINE": "scripted", "SLUICE_SCRIPTED_STEP_SECONDS": "0.002", **environment}
    stack.start_worker(name, **settings)


def client_trace(*, sampled: bool = True) -> tuple[str, str, dict[str, str]]:
    """Return the ids of a client's trace and span, and the `traceparent` header."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-0{int(sampled)}"}


def ask(
    stack: Stack,
    *,
    path: str = "/v1/completions",
    url: str = "",
    key: str = "",
    sampled: bool = True,
    headers: dict[str, str] | None = None,
    **body: Any,
) -> TracedResponse:
    """Send a completion request in a new trace of the client."""
    trace_id, span_id, header = client_trace(sampled=sampled)
    content = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, **body}
    response = httpx.post(
        f"{url or stack.url}{path}",
        headers={"authorization": f"Bearer {key or stack.key()}", **header, **(headers or {})},
        json={name: value for name, value in content.items() if value is not None},
        timeout=60,
    )
    return TracedResponse(response, trace_id, span_id)
