"""Outbound requests to URLs of customers (restricted to the public internet) and operators."""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httpcore
import httpx

from gateway.platform.outbound.addresses import HTTPS_PORTS, is_public
from gateway.platform.outbound.client import OutboundClient, OutboundError, ResponseTooLargeError

TIMEOUT_SECONDS: Final = 5.0
"""For DNS, connecting, sending and the response status together."""


class DeliveryError(Exception):
    """A request could not be delivered; the message gives the reason and no part of the URL.

    Args:
        reason: the message.
        was_sent: whether the receiver may have processed the request.
    """

    def __init__(self, reason: str, *, was_sent: bool = False) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A response."""

    status: int
    headers: httpx.Headers
    content: bytes
    """The beginning of the body, as much as was requested of this status."""


class Outbound:
    """Posts to URLs.

    Args:
        allows_private: Whether plain http, private addresses and any port are allowed too.
        trust: Certificates to trust; the default ones if not given.
        timeout_seconds: Timeout of a whole request.
    """

    def __init__(
        self,
        *,
        allows_private: bool,
        trust: ssl.SSLContext | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._allows_private = allows_private
        self._timeout_seconds = timeout_seconds
        self._client = OutboundClient(
            timeout_seconds=timeout_seconds,
            is_allowed=(lambda _: True) if allows_private else is_public,
            ports=None if allows_private else HTTPS_PORTS,
            trust=trust,
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send `body`. Raises DeliveryError unless the response is a success (2xx)."""
        status = (await self.exchange(url, body, headers)).status
        if 300 <= status < 400:
            raise DeliveryError(f"responded with a redirect ({status}), which is not followed")
        if not 200 <= status < 300:
            raise DeliveryError(f"responded with status {status}")

    async def exchange(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        error_bytes: int = 0,
        bytes_: int = 0,
    ) -> HttpReply:
        """Send `body` and return the response, with so many bytes of its body or of an error's.

        Raises DeliveryError if there is no response.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._post(httpx.URL(url), body, headers, error_bytes, bytes_)
        except TimeoutError:
            raise DeliveryError("no response in time", was_sent=True) from None
        except OutboundError as error:
            was_sent = isinstance(error, ResponseTooLargeError)
            raise DeliveryError(str(error), was_sent=was_sent) from None
        except DeliveryError:
            raise
        except Exception as error:  # No URL may block the events for the others.
            is_unsent = isinstance(error, (httpcore.ConnectError, httpcore.ConnectTimeout))
            raise DeliveryError(
                f"cannot be reached: {type(error).__name__}", was_sent=not is_unsent
            ) from None

    async def _post(
        self,
        url: httpx.URL,
        body: bytes,
        headers: Mapping[str, str],
        error_bytes: int,
        other_bytes: int,
    ) -> HttpReply:
        if not url.host:
            raise DeliveryError("is not a URL")
        if url.scheme != "https" and not (self._allows_private and url.scheme == "http"):
            raise DeliveryError("is not an https URL")
        async with self._client.stream("POST", url, headers=headers, content=body) as reply:
            content, most = b"", error_bytes if reply.status >= 400 else other_bytes
            # The rest of the body is not read, however long it is.
            if most:
                async for piece in reply.pieces:
                    content += piece
                    if len(content) >= most:
                        break
            return HttpReply(reply.status, reply.headers, content[:most])
