"""Concurrent clients on two gateways and one key: exactly as many as allowed are served."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gateway.limits.replies import SubjectStatus
from gateway.limits.store import QuotaStore
from gateway.records.limits import LimitName, Limits, LimitScope, SubjectLimits
from tests.failures.proofs.accounts import Accounts, Credential
from tests.failures.proofs.client import Answer, ask
from tests.failures.proofs.conftest import Scale
from tests.failures.proofs.ledger import Books, totals
from tests.support.stack import Stack

CLIENTS = 40
"""On each gateway."""
REQUESTS, TOKENS = 50, 20_000
LIMITS = {"requests_per_minute": REQUESTS, "tokens_per_minute": TOKENS}
COMPLETION_TOKENS = 40
"""Completion tokens of each request; the prompt has the rest."""
MINUTE_MS = 60_000
SLOT_MS = 250


async def race(stack: Stack, key: Credential, sizes: list[int]) -> list[Answer]:
    """Send one request for each size in tokens concurrently, to both gateways in turn."""
    return await asyncio.gather(
        *(
            ask(
                stack.gateways[number % 2],
                key.text,
                prompt=[5] * (size - COMPLETION_TOKENS),
                max_tokens=COMPLETION_TOKENS,
                ignore_eos=True,
            )
            for number, size in enumerate(sizes)
        )
    )


def split(answers: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Return those that were served and those that were refused; fail on any other result."""
    counts = Counter(answer.status for answer in answers)
    assert set(counts) <= {200, 429}, counts
    assert all(answer.is_complete for answer in answers)
    return [a for a in answers if a.status == 200], [a for a in answers if a.status == 429]


async def used_by(books: Books, key: Credential) -> dict[LimitScope, SubjectStatus]:
    """Return the limiter's counts for the key, its project and its tenant."""
    holders = [
        (LimitScope.KEY, key.id),
        (LimitScope.PROJECT, key.project),
        (LimitScope.TENANT, key.tenant),
    ]
    subjects = [SubjectLimits(scope, str(id_), Limits()) for scope, id_ in holders]
    status = await QuotaStore(books.redis).status(key.tenant, subjects)
    return {subject.scope: each for subject, each in zip(subjects, status, strict=True)}


def check_refusal(answer: Answer, limit: LimitName) -> None:
    """A refusal names the limit, its size, and when to retry."""
    code = "requests" if limit is LimitName.REQUESTS_PER_MINUTE else "tokens"
    error, headers = answer.error, answer.headers
    value = LIMITS[limit.value]
    assert (error["type"], error["code"]) == ("rate_limit_error", code)
    assert (error["limit"], error["scope"], error["limit_value"]) == (limit, "key", value)
    assert 0 <= error["used"] <= value
    retry_ms = int(headers["retry-after-ms"])
    assert 0 < retry_ms <= MINUTE_MS + SLOT_MS
    assert retry_ms <= int(headers["retry-after"]) * 1000 < retry_ms + 1000
    assert error["reset_seconds"] == pytest.approx(retry_ms / 1000)
    assert headers["x-should-retry"] == "true"
    for family, most in (("requests", REQUESTS), ("tokens", TOKENS)):
        assert headers[f"x-ratelimit-limit-{family}"] == str(most)
        assert 0 <= int(headers[f"x-ratelimit-remaining-{family}"]) <= most
        assert headers[f"x-ratelimit-reset-{family}"].endswith("s")


def check_admission(answer: Answer) -> None:
    """The headers of a response report what is left after it."""
    assert 0 <= int(answer.headers["x-ratelimit-remaining-requests"]) < REQUESTS
    assert 0 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < TOKENS


async def check_used(books: Books, key: Credential, served: list[Answer], *, tokens: int) -> None:
    """Refused requests took nothing of any limit."""
    for status in (await used_by(books, key)).values():
        assert status.requests_of_minute == len(served)
        assert status.completion_tokens_of_minute == COMPLETION_TOKENS * len(served)
        assert status.prompt_tokens_of_minute + status.completion_tokens_of_minute == tokens
        assert status.requests_today == len(served)
        assert status.tokens_today == tokens
        assert status.concurrent_requests == 0
    await books.settled()
    rows = await books.rows(key.tenant)
    assert {row["request_id"] for row in rows} == {answer.request_id for answer in served}
    assert len(rows) == len(served)
    (sums,) = totals(rows, "tenant_id").values()
    assert sums["prompt_tokens"] + sums["completion_tokens"] == tokens


async def holder(accounts: Accounts, tenant: str) -> Credential:
    """Make a key with the limits of the race, and wide ones for its tenant and project."""
    wide: dict[str, Any] = {
        "requests_per_minute": 10_000,
        "tokens_per_minute": 10_000_000,
        "requests_per_day": 100_000,
        "tokens_per_day": 100_000_000,
        "concurrent_requests": 1_000,
    }
    await accounts.tenant(tenant, limits=wide)
    project = await accounts.project(tenant, limits=wide)
    return await accounts.key(tenant, project, limits={**wide, **LIMITS})


@pytest.mark.parametrize("tokens_each", [100, 1_000], ids=["requests", "tokens"])
async def test_exactly_as_many_requests_are_served_as_the_limit_allows(
    stack: Stack,
    accounts: Accounts,
    books: Books,
    name: Callable[[], str],
    scale: Scale,
    tokens_each: int,
) -> None:
    limit = LimitName.REQUESTS_PER_MINUTE if tokens_each == 100 else LimitName.TOKENS_PER_MINUTE
    for _ in range(scale.races):
        key = await holder(accounts, name())
        answers = await race(stack, key, [tokens_each] * (2 * CLIENTS))
        served, refused = split(answers)

        assert len(served) == min(REQUESTS, TOKENS // tokens_each)
        for answer in served:
            check_admission(answer)
        for answer in refused:
            check_refusal(answer, limit)
        await check_used(books, key, served, tokens=tokens_each * len(served))


async def test_requests_of_all_sizes_fill_the_token_limit_and_never_exceed_it(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str], scale: Scale
) -> None:
    for run in range(scale.races):
        rng = random.Random(run)
        key = await holder(accounts, name())
        sizes = [rng.randint(200, 1_500) for _ in range(2 * CLIENTS)]
        answers = await race(stack, key, sizes)
        served, refused = split(answers)

        tokens = sum(
            size for size, answer in zip(sizes, answers, strict=True) if answer.status == 200
        )
        smallest = min(s for s, answer in zip(sizes, answers, strict=True) if answer.status == 429)
        assert TOKENS - smallest < tokens <= TOKENS
        assert len(served) <= REQUESTS
        for answer in refused:
            check_refusal(answer, LimitName.TOKENS_PER_MINUTE)
        await check_used(books, key, served, tokens=tokens)


async def test_both_gateways_report_the_same_usage_and_limits(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    key = await holder(accounts, name())
    answers = await race(stack, key, [100] * REQUESTS)
    assert Counter(answer.status for answer in answers) == {200: REQUESTS}
    for url in stack.gateways:
        limits = await accounts.limits(url, key)
        reported = {scope["scope"]: scope["limits"] for scope in limits["scopes"]}
        assert reported["key"]["requests_per_minute"]["used"] == REQUESTS
        assert reported["key"]["requests_per_minute"]["remaining"] == 0
        assert reported["key"]["tokens_per_minute"]["used"] == REQUESTS * 100
        assert reported["tenant"]["requests_per_day"]["used"] == REQUESTS
