"""Sends many concurrent requests."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Iterator

import httpx

from tests.failures.fuzz.bodies import Case
from tests.failures.fuzz.verdict import OVERLOADED
from tests.support.patience import PATIENCE_SECONDS

IN_FLIGHT = 32
TIMEOUT_SECONDS = 2 * PATIENCE_SECONDS
"""Timeout of one request, and of the retries of one that finds the deployment too busy."""
PLAIN_HTTP = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Each client would take a while to read the certificates, which are not needed."""


async def answers_of(
    url: str, key: str, cases: Iterable[Case]
) -> list[tuple[Case, httpx.Response | Exception]]:
    """Send all requests with limited concurrency; return each with its responses, or the error."""
    answers: list[tuple[Case, httpx.Response | Exception]] = []
    queue = iter(cases)
    await asyncio.gather(*(_send(url, key, queue, answers) for _ in range(IN_FLIGHT)))
    return answers


async def _send(
    url: str,
    key: str,
    queue: Iterator[Case],
    answers: list[tuple[Case, httpx.Response | Exception]],
) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    # A client for each sender: a shared one checks all its connections at every request.
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, verify=PLAIN_HTTP
    ) as client:
        for case in queue:
            answers += [(case, answer) async for answer in _answers(client, case)]


async def _answers(
    client: httpx.AsyncClient, case: Case
) -> AsyncIterator[httpx.Response | Exception]:
    """Send a request, and retry after Retry-After while the deployment is too busy."""
    dialect = {"x-api-dialect": case.dialect} if case.dialect else {}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            response = await client.post(case.path, content=case.body, headers=dialect)
        except httpx.HTTPError as error:
            yield error
            return
        yield response
        if response.status_code != OVERLOADED or time.monotonic() > deadline:
            return
        await asyncio.sleep(float(response.headers.get("retry-after", 1)))
