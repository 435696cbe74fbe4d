"""Fetch the images of one request: inline files and files at URLs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from gateway import telemetry
from gateway.dialects.request import ImageSource
from gateway.errors import InvalidParameterError
from gateway.images.fetcher import Allowance, FetchError, ImageFetcher

IMAGES_AT_ONCE: Final = 4
"""Images of one request that are fetched at the same time."""


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
        telemetry.image_named("refused")
        raise _refusal(source.param, error) from None


class _Fetching:
    """State that the image fetches of a request share."""

    def __init__(self, fetcher: ImageFetcher) -> None:
        self._fetcher = fetcher
        self._allowance = Allowance(fetcher.max_bytes)
        self._places = asyncio.Semaphore(IMAGES_AT_ONCE)
        self._deadline = asyncio.get_running_loop().time() + fetcher.timeout_seconds

    async def file(self, source: bytes | _Target) -> bytes:
        if isinstance(source, bytes):
            return source
        try:
            async with asyncio.timeout_at(self._deadline), self._places:
                image = await self._fetcher.fetch(source.url, self._allowance)
        except TimeoutError:
            telemetry.image_named("late")
            late = FetchError(f"did not arrive within {self._fetcher.timeout_seconds:g} seconds")
            raise _refusal(source.param, late) from None
        except FetchError as error:
            telemetry.image_named("failed")
            raise _refusal(source.param, error) from None
        telemetry.image_named("fetched")
        return image


def _refusal(param: str, error: FetchError) -> InvalidParameterError:
    return InvalidParameterError(f"'{param}' {error}.", param=param)
