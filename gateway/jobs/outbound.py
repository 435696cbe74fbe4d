"""Outbound requests to customers' URLs, restricted to the public internet."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final

import httpx

from gateway.outbound.addresses import is_public
from gateway.outbound.client import OutboundClient, OutboundError
from gateway.outbound.urls import HTTPS_PORTS

TIMEOUT_SECONDS: Final = 5.0
"""For DNS, connecting, sending and the response status together."""


class DeliveryError(Exception):
    """A request could not be delivered; the message gives the reason and no part of the URL."""


class Outbound:
    """Posts to URLs.

    Args:
        allows_private: Whether plain http, private addresses and any port are allowed too.
        trust: Certificates to trust; the default ones if not given.
    """

    def __init__(self, *, allows_private: bool, trust: ssl.SSLContext | None = None) -> None:
        self._allows_private = allows_private
        self._client = OutboundClient(
            timeout_seconds=TIMEOUT_SECONDS,
            is_allowed=_is_any if allows_private else is_public,
            ports=None if allows_private else HTTPS_PORTS,
            trust=trust,
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send `body`. Raises DeliveryError unless the response is a success (2xx)."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status = await self._post(_parse(url), body, headers)
        except TimeoutError:
            raise DeliveryError("no response in time") from None
        except OutboundError as error:
            raise DeliveryError(str(error)) from None
        except DeliveryError:
            raise
        except Exception as error:  # No URL may block the events for the others.
            raise DeliveryError(f"cannot be reached: {type(error).__name__}") from None
        if 300 <= status < 400:
            raise DeliveryError(f"responded with a redirect ({status}), which is not followed")
        if not 200 <= status < 300:
            raise DeliveryError(f"responded with status {status}")

    async def _post(self, url: httpx.URL, body: bytes, headers: Mapping[str, str]) -> int:
        if url.scheme != "https" and not (self._allows_private and url.scheme == "http"):
            raise DeliveryError("is not an https URL")
        # The response body is not read, however long it is.
        async with self._client.stream("POST", url, headers=headers, content=body) as reply:
            return reply.status


def _is_any(_address: str) -> bool:
    return True


def _parse(url: str) -> httpx.URL:
    parsed = httpx.URL(url)
    if not parsed.host:
        raise DeliveryError("is not a URL")
    return parsed
