"""Sending many requests at once."""

import asyncio
from collections.abc import Iterable, Iterator

import httpx

from tests.fuzz.bodies import Case

IN_FLIGHT = 32
TIMEOUT_SECONDS = 60.0


async def answers_of(
    url: str, key: str, cases: Iterable[Case]
) -> list[tuple[Case, httpx.Response | Exception]]:
    """Send all requests, so many at a time; return each with its answer, or what came instead."""
    answers: list[tuple[Case, httpx.Response | Exception]] = []
    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, limits=limits
    ) as client:
        queue = iter(cases)
        senders = [_send(client, queue, answers) for _ in range(IN_FLIGHT)]
        await asyncio.gather(*senders)
    return answers


async def _send(
    client: httpx.AsyncClient,
    queue: Iterator[Case],
    answers: list[tuple[Case, httpx.Response | Exception]],
) -> None:
    for case in queue:
        dialect = {"x-api-dialect": case.dialect} if case.dialect else {}
        try:
            response = await client.post("/v1/completions", content=case.body, headers=dialect)
        except httpx.HTTPError as error:
            answers.append((case, error))
        else:
            answers.append((case, response))
