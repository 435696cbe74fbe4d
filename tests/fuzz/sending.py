"""Sending many requests at once."""

import asyncio
import ssl
from collections.abc import Iterable, Iterator

import httpx

from tests.fuzz.bodies import Case

IN_FLIGHT = 32
TIMEOUT_SECONDS = 60.0
PLAIN_HTTP = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Certificates, which are not needed, would take each client a while to read."""


async def answers_of(
    url: str, key: str, cases: Iterable[Case]
) -> list[tuple[Case, httpx.Response | Exception]]:
    """Send all requests, so many at a time; return each with its answer, or what came instead."""
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
    # A client for each sender: a shared one looks through all its connections at every request.
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, verify=PLAIN_HTTP
    ) as client:
        for case in queue:
            dialect = {"x-api-dialect": case.dialect} if case.dialect else {}
            try:
                response = await client.post(case.path, content=case.body, headers=dialect)
            except httpx.HTTPError as error:
                answers.append((case, error))
            else:
                answers.append((case, response))
