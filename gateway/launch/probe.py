"""Readiness probe: query a gateway as a client would."""

import asyncio
import http.client
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.errors import StartupError
from gateway.launch.ports import LOOPBACK

REQUEST_TIMEOUT_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.2


async def wait_until_ready(port: int) -> None:
    """Return once the gateway's /readyz returns 200."""
    await _until(lambda: _request(port, "GET", "/readyz")[0] == 200)


async def wait_until_serving(port: int, key: str, model: str) -> None:
    """Return once a worker serves the model and the gateway completes a prompt with it."""
    # Requests before that are rejected, and would count as failures on the status page.
    await _until(lambda: _is_served(port, key, model))
    await _until(lambda: _completes(port, key, model))


async def _until(is_true: Callable[[], bool]) -> None:
    while True:
        if await asyncio.to_thread(is_true):
            return
        await asyncio.sleep(POLL_SECONDS)


def _is_served(port: int, key: str, model: str) -> bool:
    status, reply = _request(port, "GET", "/v1/models", key=key)
    if status in (401, 403):
        raise StartupError(f"The demo key is rejected with status {status}: {_text(reply)}")
    if status != 200 or not isinstance(reply, dict):
        return False
    return any(each.get("id") == model and each.get("ready") for each in reply.get("data", []))


def _completes(port: int, key: str, model: str) -> bool:
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    status, reply = _request(port, "POST", "/v1/completions", key=key, body=body)
    # The worker may end again, or be busy.
    if status not in (0, 200, 404, 503):
        raise StartupError(f"A trial completion failed with status {status}: {_text(reply)}")
    return status == 200


def _request(
    port: int, method: str, path: str, *, key: str = "", body: Any = None
) -> tuple[int, Any]:
    """Return status and decoded body; status 0 if there is no response."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=REQUEST_TIMEOUT_SECONDS)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    content = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        content = msgspec.json.encode(body)
    try:
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, _decode(response.read())
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()


def _decode(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return None


def _text(reply: Any) -> str:
    try:
        return str(reply["error"]["message"])
    except (KeyError, TypeError):
        return "no explanation"
