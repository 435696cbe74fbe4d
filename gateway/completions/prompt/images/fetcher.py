"""Fetch one image from a URL; neither the client nor the server is trusted."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import httpx

from gateway.dialects.images import MAX_IMAGE_BYTES, SIGNATURES
from gateway.dialects.request import ImageSource
from gateway.platform import telemetry
from gateway.platform.outbound.addresses import DEFAULT_PORTS, HostPattern, looks_public, split_url
from gateway.platform.outbound.client import (
    ForbiddenHostError,
    OutboundClient,
    OutboundError,
    Response,
)
from gateway.platform.settings import Settings
from gateway.records.errors import InvalidParameterError, OverloadedError, shown

MAX_URL_CHARACTERS: Final = 8192
"""Maximum URL length; signed URLs of object stores have a few thousand characters."""
MAX_REDIRECTS: Final = 3

MAX_REQUESTS: Final = 32
"""Requests that may fetch images at the same time: each may hold `max_bytes` in memory."""
MAX_REQUESTS_OF_TENANT: Final = 8
"""Maximum of MAX_REQUESTS for one tenant, who may name hosts that are slow on purpose."""

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = {
    "accept": ", ".join(SIGNATURES),
    "accept-encoding": "identity",
    "user-agent": "sluice-images",
}

IMAGES_AT_ONCE: Final = 4
"""Images of one request that are fetched at the same time."""


class FetchError(Exception):
    """An image cannot be fetched, or the URL is not allowed.

    The message continues a sentence that starts with the name of the parameter. It does not reveal
    to which host the URL resolves, which may be confidential.
    """


class ByteBudget:
    """Bytes that may still be fetched; all images of a request share it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._left = most_bytes

    def use(self, count: int) -> None:
        """Count received bytes. Raises FetchError above the limit."""
        self._left -= count
        if self._left < 0:
            raise FetchError(
                f"exceeds the limit of {self._most_bytes} bytes for all images that a request "
                "names by URL"
            )


class ImageFetcher:
    """Fetches images from allowed hosts.

    Args:
        hosts: Hosts from which images may be fetched, redirects included; empty rejects every URL.
        client: Sends the HTTP requests.
        timeout_seconds: Time limit for all images of a request together.
        max_bytes: Size limit for all images of a request together.
    """

    def __init__(
        self,
        hosts: Sequence[HostPattern],
        client: OutboundClient,
        *,
        timeout_seconds: float,
        max_bytes: int,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_bytes = max_bytes
        self._hosts = hosts
        self._client = client
        self._places = asyncio.Semaphore(MAX_REQUESTS)
        self._places_by_tenant = WeakValueDictionary[str, asyncio.Semaphore]()

    @classmethod
    def from_settings(cls, settings: Settings) -> "ImageFetcher":
        """Return a fetcher configured from the settings."""
        timeout_seconds = settings.image_url_timeout.total_seconds()
        return cls(
            settings.image_url_hosts,
            OutboundClient(timeout_seconds=timeout_seconds),
            timeout_seconds=timeout_seconds,
            max_bytes=settings.image_url_max_bytes,
        )

    @asynccontextmanager
    async def place(self, tenant_id: str) -> AsyncIterator[None]:
        """Hold a slot for a request that fetches images. Raises OverloadedError."""
        of_tenant = self._places_by_tenant.setdefault(
            tenant_id, asyncio.Semaphore(MAX_REQUESTS_OF_TENANT)
        )
        async with AsyncExitStack() as places:
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    await places.enter_async_context(of_tenant)
                    await places.enter_async_context(self._places)
            except TimeoutError:
                raise OverloadedError(
                    "Too many images are being fetched.", retry_after_seconds=1.0
                ) from None
            yield

    def check(self, url: str) -> httpx.URL:
        """Return the URL if its host is allowed. Raises FetchError.

        Nothing is sent or resolved.
        """
        parts = split_url(url, most_characters=MAX_URL_CHARACTERS)
        if parts is None or parts.hostname is None:
            raise FetchError(
                "must be a data URI, or an http or https URL of at most "
                f"{MAX_URL_CHARACTERS} characters, with spaces and non-ASCII characters "
                "percent-encoded"
            )
        if not self._hosts:
            raise FetchError("must be a data URI: this gateway fetches no images from URLs")
        if "@" in parts.netloc:
            raise FetchError("must not contain a user name or password")
        port = parts.port or DEFAULT_PORTS[parts.scheme]
        if not any(pattern.allows(parts.hostname, port) for pattern in self._hosts):
            raise FetchError(f"must name an allowed host and port. Given: {shown(parts.netloc)}")
        if parts.hostname.endswith(".") or not looks_public(parts.hostname):
            raise FetchError(
                f"must name a host on the public internet. Given: {shown(parts.netloc)}"
            )
        return _same_to_client(url, parts.hostname, port)

    async def fetch(self, url: httpx.URL, allowance: ByteBudget) -> bytes:
        """Return the image file at a checked URL. Raises FetchError.

        There is no time limit here: the caller sets one.
        """
        try:
            return await self._follow(url, allowance)
        except FetchError:
            raise
        except ForbiddenHostError:
            # Do not report which of them: that would reveal the operator's network.
            raise FetchError("must resolve to a host on the public internet") from None
        except OutboundError as error:
            raise FetchError(str(error)) from None
        except Exception as error:  # A hostile server may cause any error.
            raise FetchError(f"cannot be fetched: {type(error).__name__}") from None

    async def _follow(self, url: httpx.URL, allowance: ByteBudget) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            async with self._client.stream("GET", url, headers=_HEADERS) as response:
                if response.status not in _REDIRECTS:
                    return await _read(response, allowance)
                url = self._redirected(url, response.headers.get("location", ""))
        raise FetchError(f"redirects more than {MAX_REDIRECTS} times")

    def _redirected(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            following = self.check(str(url.join(location)))
        except (FetchError, httpx.InvalidURL):
            raise FetchError("redirects to a URL that is not allowed") from None
        if url.scheme == "https" and following.scheme != "https":
            raise FetchError("redirects from https to http")
        return following


def _same_to_client(url: str, host: str, port: int) -> httpx.URL:
    """Return the URL for httpx, which must see the same host and port as were checked."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise FetchError("must be a valid URL") from None
    if (parsed.raw_host.decode(), parsed.port or DEFAULT_PORTS[parsed.scheme]) != (host, port):
        raise FetchError("must be an unambiguous URL")
    return parsed


async def _read(response: Response, allowance: ByteBudget) -> bytes:
    if response.status != 200:
        raise FetchError(f"returned status {response.status}")
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in SIGNATURES:
        raise FetchError(f"returned none of these content types: {', '.join(SIGNATURES)}")
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise FetchError("returned a content encoding, which is not supported")
    announced = response.headers.get("content-length", "")
    if announced.isdecimal():
        _check_size(int(announced))
    content = await _body(response, allowance)
    if not content.startswith(SIGNATURES[media_type]):
        raise FetchError(f"returned a file that is not {media_type} as declared")
    return content


async def _body(response: Response, allowance: ByteBudget) -> bytes:
    content = bytearray()
    async for piece in response.pieces:
        allowance.use(len(piece))
        content += piece
        _check_size(len(content))
    return bytes(content)


def _check_size(count: int) -> None:
    if count > MAX_IMAGE_BYTES:
        raise FetchError(f"must be an image of at most {MAX_IMAGE_BYTES} bytes")


async def fetch_images(
    sources: Sequence[ImageSource], *, fetcher: ImageFetcher, tenant_id: str
) -> list[bytes]:
    """Return an image file for each source in order; inline files are returned as they are.

    Nothing is fetched unless all URLs are allowed. After one fetch fails, the others are cancelled.
    Raises InvalidParameterError, which names the URL's place in the body, and OverloadedError.
    """
    checked = [_checked(source, fetcher) for source in sources]
    files = [source for source in checked if isinstance(source, bytes)]
    if len(files) == len(sources):
        return files
    async with fetcher.place(tenant_id):
        fetching = _Fetching(fetcher)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetching.file(source)) for source in checked]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class _Target:
    url: httpx.URL
    param: str


def _checked(source: ImageSource, fetcher: ImageFetcher) -> bytes | _Target:
    if source.file is not None:
        return source.file
    try:
        return _Target(fetcher.check(source.url), source.param)
    except FetchError as error:
        telemetry.IMAGE_FETCHES.labels("refused").inc()
        raise _refusal(source.param, error) from None


class _Fetching:
    """State that the image fetches of a request share."""

    def __init__(self, fetcher: ImageFetcher) -> None:
        self._fetcher = fetcher
        self._allowance = ByteBudget(fetcher.max_bytes)
        self._places = asyncio.Semaphore(IMAGES_AT_ONCE)
        self._deadline = asyncio.get_running_loop().time() + fetcher.timeout_seconds

    async def file(self, source: bytes | _Target) -> bytes:
        if isinstance(source, bytes):
            return source
        try:
            async with asyncio.timeout_at(self._deadline), self._places:
                image = await self._fetcher.fetch(source.url, self._allowance)
        except TimeoutError:
            telemetry.IMAGE_FETCHES.labels("late").inc()
            late = FetchError(f"did not arrive within {self._fetcher.timeout_seconds:g} seconds")
            raise _refusal(source.param, late) from None
        except FetchError as error:
            telemetry.IMAGE_FETCHES.labels("failed").inc()
            raise _refusal(source.param, error) from None
        telemetry.IMAGE_FETCHES.labels("fetched").inc()
        return image


def _refusal(param: str, error: FetchError) -> InvalidParameterError:
    return InvalidParameterError(f"'{param}' {error}.", param=param)
