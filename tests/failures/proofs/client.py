"""Sends completions as a customer does, and disconnects, stalls or waits as a test wants."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
from typing_extensions import override

from tests.support import http_client
from tests.support.events import DONE, PREFIX
from tests.support.http_client import Reading, exchange, request_bytes
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL

ANSWER_SECONDS = 2 * PATIENCE_SECONDS

_REQUEST_ID = re.compile(rb'"id": ?"(cmpl-[a-z2-7]{26})"')


@dataclass(slots=True)
class Answer(http_client.Answer):
    """The response to one request, with times."""

    sent_at: float = 0.0
    ended_at: float = 0.0

    @property
    def request_id(self) -> str | None:
        """Id of the completion, as soon as any of it has arrived."""
        found = _REQUEST_ID.search(self.body)
        return found[1].decode() if found else None

    @property
    def is_finished(self) -> bool:
        """Whether this is a completion that is whole."""
        return self.status == 200 and self.is_complete and self.usage is not None

    @property
    def error(self) -> dict[str, Any]:
        """The error of a failed request."""
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[dict[str, Any]]:
        """The complete events of a stream, without `[DONE]`."""
        lines = [event.split(b"\n")[0] for event in self.body.split(b"\n\n")[:-1]]
        return [json.loads(line.removeprefix(PREFIX)) for line in lines if line != DONE]

    @property
    def received_tokens(self) -> int:
        """The number of tokens that have arrived of a stream with `return_token_ids`."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return sum(len(choice.get("token_ids") or ()) for choice in choices)

    @property
    def usage(self) -> dict[str, Any] | None:
        """The usage in the response, if it has arrived."""
        if not self.is_stream:
            usage: dict[str, Any] | None = self.json.get("usage") if self.is_complete else None
            return usage
        reported = [event["usage"] for event in self.events if event.get("usage")]
        return reported[-1] if reported else None


class _ShortReading(Reading):
    """Disconnects after so many bytes of the body, if the response is not complete by then."""

    def __init__(self, answer: Answer, leave_at: int | None) -> None:
        super().__init__(answer)
        self._leave_at = leave_at

    @property
    @override
    def leaves(self) -> bool:
        if self._leave_at is None or self.answer.is_complete:
            return False
        return len(self.answer.body) >= self._leave_at


async def ask(
    url: str,
    key: str,
    *,
    leave_after: float | None = None,
    leave_at: int | None = None,
    answer: Answer | None = None,
    **body: Any,
) -> Answer:
    """Send a completion request on a new connection.

    The client disconnects after so many seconds or bytes of the body. A gateway that is unreachable
    or dies gives an incomplete response. The response is read into `answer`, which can be observed
    meanwhile.
    """
    return await request(
        url,
        key,
        {"model": MODEL, **body},
        leave_after=leave_after,
        leave_at=leave_at,
        answer=answer,
    )


async def request(
    url: str,
    key: str,
    body: dict[str, Any] | None = None,
    *,
    path: str = "/v1/completions",
    leave_after: float | None = None,
    leave_at: int | None = None,
    stall_after: float | None = None,
    headers: Mapping[str, str] | None = None,
    answer: Answer | None = None,
) -> Answer:
    """Send a request, a GET if it has no body, and return its response; see `ask`.

    With `stall_after` the client reads nothing for so many seconds, and then disconnects.
    """
    answer = answer or Answer()
    answer.sent_at = time.monotonic()
    limit = ANSWER_SECONDS if leave_after is None else leave_after
    try:
        async with asyncio.timeout(limit):
            content = request_bytes(url, key, path, body, headers or {})
            if stall_after is None:
                await exchange(url, content, _ShortReading(answer, leave_at))
            else:
                await _stall(url, content, answer, stall_after)
    except TimeoutError:
        if leave_after is None:
            raise
        answer.has_left = True
    except (OSError, httptools.HttpParserError):
        answer.is_complete = False
    answer.ended_at = time.monotonic()
    return answer


async def _stall(url: str, content: bytes, answer: Answer, seconds: float) -> None:
    """Send a request and read nothing of its response from the kernel."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        # A larger buffer would take in much of a response that is not read.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(connection, (address.hostname, address.port))
        await loop.sock_sendall(connection, content)
        await asyncio.sleep(seconds)
    answer.has_left = True
