"""Mistakes that gateways make about limits, usage and money, each tested here (docs/lessons.md)."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.dialect import Dialect
from gateway.records.limits import LimitName, LimitScope
from gateway.records.records import Billing
from tests.failures.proofs.accounts import Accounts, Credential, named
from tests.failures.proofs.client import Answer, ask, request
from tests.failures.proofs.conftest import COMPLETION_TOKENS, STEP_SECONDS, WORKER, cost_of
from tests.failures.proofs.ledger import Books, Row
from tests.failures.proofs.until import engine_tokens, generating, leave, running, until
from tests.support.events import DONE, split_events
from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.parametrize("stack", ["sqlite"], indirect=True)

PROMPT_TOKENS = 10
CONTEXT_WINDOW = 2048
LARGE = 10**12

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def body(**fields: Any) -> dict[str, Any]:
    """Return a request body for ten tokens after a prompt of ten."""
    return {
        "model": MODEL,
        "prompt": [5] * PROMPT_TOKENS,
        "max_tokens": 10,
        "ignore_eos": True,
        **fields,
    }


async def rows_of(books: Books, key: Credential) -> list[Row]:
    """Return the ledger rows of a tenant once everything has been recorded."""
    await books.settled()
    return await books.rows(key.tenant)


# -- limits ------------------------------------------------------------------------------------


async def test_limits_apply_equally_to_every_dialect_streamed_or_not(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    ways = [(dialect, stream) for dialect in Dialect for stream in (False, True)]
    key = await accounts.holder(LimitScope.KEY, name(), {"requests_per_minute": len(ways)})
    for dialect, stream in ways:
        headers = {"x-api-dialect": dialect}
        answer = await request(stack.url, key.text, body(stream=stream), headers=headers)
        assert answer.status == 200, answer.body
    for dialect, stream in ways:
        headers = {"x-api-dialect": dialect}
        answer = await request(stack.gateways[1], key.text, body(stream=stream), headers=headers)
        assert answer.status == 429, answer.body


ONE_REQUEST = {
    LimitName.REQUESTS_PER_MINUTE: 1,
    LimitName.TOKENS_PER_MINUTE: 2 * 20 - 1,
    LimitName.PROMPT_TOKENS_PER_MINUTE: 2 * PROMPT_TOKENS - 1,
    LimitName.COMPLETION_TOKENS_PER_MINUTE: 2 * 10 - 1,
    LimitName.REQUESTS_PER_DAY: 1,
    LimitName.TOKENS_PER_DAY: 2 * 20 - 1,
    LimitName.CONCURRENT_REQUESTS: 1,
    LimitName.BUDGET: 2 * cost_of(PROMPT_TOKENS, 10) - 1,
}
"""Limits of each kind that a second request of this kind exceeds. Texts have no audio."""


async def test_every_limit_of_every_scope_is_enforced(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    holders = {
        (limit, scope): await accounts.holder(scope, name(), {limit: ONE_REQUEST[limit]})
        for limit in ONE_REQUEST
        for scope in LimitScope
    }
    of_time = [each for each in holders if each[0] is LimitName.CONCURRENT_REQUESTS]
    others = [each for each in holders if each not in of_time]
    first, second = stack.gateways

    async def ask_all(pairs: list[tuple[LimitName, LimitScope]], url: str) -> list[Answer]:
        return await asyncio.gather(*(request(url, holders[pair].text, body()) for pair in pairs))

    # Send one request after the other on each key; concurrently if concurrency is limited.
    served, refused = await ask_all(others, first), await ask_all(others, second)
    await books.settled()
    held = [Answer() for _ in of_time]
    asking = [
        asyncio.create_task(
            request(first, holders[pair].text, body(stream=True, max_tokens=1_900), answer=answer)
        )
        for pair, answer in zip(of_time, held, strict=True)
    ]
    await books.opened(len(of_time))
    refused += await ask_all(of_time, second)
    await until(lambda: all(answer.status for answer in held), what="the answers' beginning")
    served += held
    for each in asking:
        await leave(each)

    for (limit, scope), one, other in zip(others + of_time, served, refused, strict=True):
        assert (one.status, other.status) == (200, 429), (limit, scope, other.body)
        assert (other.error["limit"], other.error["scope"]) == (limit, scope)
        # The keys are those of projects, which cannot read the tenant's money.
        is_hidden = (limit, scope) == (LimitName.BUDGET, LimitScope.TENANT)
        expected = None if is_hidden else ONE_REQUEST[limit]
        assert other.error["limit_value"] == expected, (limit, scope)


async def test_request_refused_by_one_limit_uses_nothing_of_the_others(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    large = dict.fromkeys((each.value for each in LimitName), LARGE)
    keys = {}
    for refusing in ONE_REQUEST:
        tenant = await accounts.tenant(name(), limits=large)
        project = await accounts.project(tenant, limits=large)
        keys[refusing] = await accounts.key(tenant, project, limits={**large, refusing.value: 0})

    async def try_and_look(key: Credential) -> tuple[list[Answer], dict[str, Any]]:
        tries = [request(stack.gateways[number % 2], key.text, body()) for number in range(4)]
        refused = await asyncio.gather(*tries)
        return refused, await accounts.limits(stack.url, key)

    seen = await asyncio.gather(*map(try_and_look, keys.values()))
    for refusing, (refused, limits) in zip(keys, seen, strict=True):
        assert {answer.status for answer in refused} == {429}, refusing
        used = {
            (scope["scope"], limit): values["used"]
            for scope in limits["scopes"]
            for limit, values in scope["limits"].items()
            # Engines count their own sequences.
            if limit != LimitName.MODEL_SHARE
        }
        assert len(used) == len(LimitScope) * (len(LimitName) - 1), refusing
        assert set(used.values()) == {0}, (refusing, used)


async def test_without_max_tokens_prompt_and_default_completion_are_reserved(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    # In this dialect the default is the rest of the context window, or of a limit below it.
    given: dict[str, Any] = {"model": MODEL, "prompt": [5] * PROMPT_TOKENS, "ignore_eos": True}
    for limits, applied in (
        ({"tokens_per_minute": PROMPT_TOKENS + 30}, 30),
        ({"tokens_per_minute": PROMPT_TOKENS + 30, "tokens_per_day": PROMPT_TOKENS + 20}, 20),
        ({"completion_tokens_per_minute": 10}, 10),
    ):
        key = await accounts.holder(LimitScope.KEY, name(), limits)
        llamacpp = {"x-api-dialect": "llamacpp"}
        answer = await request(stack.url, key.text, given | {"n": 2}, headers=llamacpp)
        assert answer.status == 200, answer.body
        assert answer.headers["x-max-tokens-applied"] == str(applied // 2)
        assert answer.json["usage"]["completion_tokens"] == applied
        again = await request(stack.url, key.text, given, headers=llamacpp)
        assert again.status == 429, "the first one has used the limit"
    set_by_client = given | {"max_tokens": 40}
    answer = await request(stack.url, key.text, set_by_client, headers=llamacpp)
    assert answer.status == 429, answer.body
    assert "needs 40, " in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    # A limit that the prompt fills refuses the smallest request.
    key = await accounts.holder(LimitScope.KEY, name(), {"tokens_per_minute": PROMPT_TOKENS})
    answer = await request(stack.url, key.text, given | {"n": 2}, headers=llamacpp)
    assert f"needs {PROMPT_TOKENS + 2}, " in answer.error["message"]
    # Where the default is 16 tokens, they count with the prompt.
    key = await accounts.holder(LimitScope.KEY, name(), {"tokens_per_minute": PROMPT_TOKENS + 15})
    answer = await request(stack.url, key.text, {"model": MODEL, "prompt": [5] * PROMPT_TOKENS})
    assert answer.status == 429, answer.body


async def test_null_budget_overrides_the_plan_and_is_never_exceeded(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    plan = name()
    await accounts.plans.create(
        plan, limits={scope: named({"budget_micros": 0}) for scope in LimitScope}
    )
    nothing: Any = {"budget_micros": None}
    tenant = await accounts.tenant(name(), plan_id=plan, limits=nothing)
    project = await accounts.project(tenant, limits=nothing)
    free = await accounts.key(tenant, project, limits=nothing)
    bound = await accounts.key(tenant, project)

    assert (await request(stack.url, free.text, body())).status == 200
    refused = await request(stack.url, bound.text, body())
    assert (refused.status, refused.error["scope"]) == (429, "key")
    limits = await accounts.limits(stack.url, free)
    budgets = {scope["scope"]: scope["limits"]["budget_micros"] for scope in limits["scopes"]}
    assert all(each["limit"] is None and each["remaining"] is None for each in budgets.values())


async def test_retry_after_is_rounded_up_and_never_early(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    key = await accounts.holder(LimitScope.KEY, name(), {"requests_per_minute": 1})
    first = await request(stack.url, key.text, body())
    assert first.status == 200
    answer = await request(stack.url, key.text, body())
    told_ms = int(answer.headers["retry-after-ms"])
    assert int(answer.headers["retry-after"]) == math.ceil(told_ms / 1000)
    # The clocks of Redis and of this process may change a little meanwhile.
    earliest_ms = 60_000 - (answer.ended_at - first.sent_at) * 1000 - 10
    assert earliest_ms < told_ms <= 60_250


# -- usage -------------------------------------------------------------------------------------


@both_ways
async def test_disconnected_client_pays_exactly_for_the_generated_tokens(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str], stream: bool
) -> None:
    granted = 10**9
    key = await accounts.holder(LimitScope.KEY, name(), {}, billing=Billing.PREPAID)
    await accounts.grant(key.tenant, granted)
    await books.settled()
    before = engine_tokens(stack)
    asked = body(stream=stream, max_tokens=1_900, n=2)
    asking = asyncio.create_task(request(stack.url, key.text, asked))
    await generating(stack, after=before)
    await leave(asking)
    [row] = await rows_of(books, key)

    assert row["outcome"] == "cancelled"
    assert row["completion_tokens"] == engine_tokens(stack) - before
    assert 20 <= row["completion_tokens"] < 2 * 1_900
    assert row["prompt_tokens"] == PROMPT_TOKENS
    assert row["cost_micros"] == cost_of(PROMPT_TOKENS, row["completion_tokens"])
    limits = await accounts.limits(stack.url, key)
    assert limits["credits"]["remaining_micros"] == granted - row["cost_micros"]


@both_ways
async def test_request_without_a_generated_token_costs_nothing(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str], stream: bool
) -> None:
    key = await accounts.key(await accounts.tenant(name()))
    # Other requests of the tenant keep the engine full for a while: those of another would not.
    full = asyncio.create_task(
        ask(stack.url, key.text, prompt=["x"] * 64, n=4, max_tokens=1_900, ignore_eos=True)
    )
    await running(stack, 256)
    asking = asyncio.create_task(request(stack.url, key.text, body(stream=stream)))
    await books.opened(2)
    await leave(asking)
    # Only then there is room again.
    await books.open_at_most(1)
    await leave(full)
    rows = await rows_of(books, key)

    assert [row["outcome"] for row in rows] == ["cancelled", "cancelled"]
    row = min(rows, key=lambda each: int(each["completion_tokens"]))
    assert (row["prompt_tokens"], row["completion_tokens"], row["cost_micros"]) == (0, 0, 0)


async def test_streams_and_whole_responses_report_the_cost_of_the_ledger(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    key = await accounts.key(await accounts.tenant(name(), shows_cost=True))
    whole = await request(stack.url, key.text, body(n=3, best_of=4))
    streamed = await request(stack.url, key.text, body(stream=True))
    extra = await request(
        stack.url, key.text, body(stream=True, stream_options={"include_usage": True})
    )
    rows = {row["request_id"]: row for row in await rows_of(books, key)}

    assert len(rows) == 3
    for answer in (whole, streamed, extra):
        row = rows[str(answer.request_id)]
        assert answer.usage is not None
        assert row["cost_micros"] == cost_of(PROMPT_TOKENS, row["completion_tokens"])
        assert micros(answer.usage["cost"]) == row["cost_micros"]
    assert micros(whole.headers["x-cost"]) == rows[str(whole.request_id)]["cost_micros"]


def micros(dollars: str | float) -> int:
    """Convert dollars to micro-dollars."""
    return round(float(dollars) * 1_000_000)


async def test_token_counts_are_those_of_the_engine(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    key = await accounts.key(await accounts.tenant(name()))
    before = engine_tokens(stack)
    answers = [
        await request(stack.url, key.text, body(ignore_eos=False, max_tokens=50)),
        await request(stack.url, key.text, body(n=2, best_of=5)),
        await request(stack.url, key.text, body(prompt=[[5], [6, 7]], max_tokens=3, stream=True)),
    ]
    rows = {row["request_id"]: row for row in await rows_of(books, key)}

    reported = [rows[str(answer.request_id)]["completion_tokens"] for answer in answers]
    assert reported == [COMPLETION_TOKENS, 5 * 10, 2 * 3]
    assert sum(reported) == engine_tokens(stack) - before


# -- failures ----------------------------------------------------------------------------------


async def test_stream_that_no_worker_resumes_ends_with_an_error_and_is_charged_for_its_tokens(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    key = await accounts.holder(LimitScope.KEY, name(), {"concurrent_requests": 1})
    url = await asyncio.to_thread(stack.start_gateway, "impatient", SLUICE_QUEUE_TIMEOUT="2")
    await asyncio.to_thread(lambda: stack.start_worker("brief", **WORKER))
    stack.kill("worker")

    def ask_for_a_stream() -> "asyncio.Task[Answer]":
        return asyncio.create_task(request(url, key.text, body(stream=True, max_tokens=1_900)))

    def has_begun() -> bool:
        return stream.done() or engine_tokens(stack, "brief") >= 50

    stream = ask_for_a_stream()
    await until(has_begun, what="tokens being generated")
    while stream.done():
        # On a busy machine it was not claimed in time.
        assert stream.result().status == 504, stream.result().body
        stream = ask_for_a_stream()
        await until(has_begun, what="tokens being generated")
    stack.kill("brief")
    await books.expire_leases()
    answer = await stream
    stack.start_worker(**WORKER)
    rows = {row["request_id"]: row for row in await rows_of(books, key)}
    row = rows[str(answer.request_id)]
    stack.stop("impatient")
    stack.gateways.remove(url)

    assert answer.status == 200
    assert answer.is_complete
    assert split_events(answer.body)[-1] == DONE
    error = answer.events[-1]["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "engine_dead")
    assert sum(len(event.get("choices", [])) for event in answer.events) > 10
    assert (row["outcome"], row["code"]) == ("failed", "engine_dead")
    delivered = row["completion_tokens"] - row["free_completion_tokens"]
    assert 0 < delivered <= row["completion_tokens"]
    assert row["cost_micros"] == cost_of(PROMPT_TOKENS, delivered)
    assert (await request(stack.url, key.text, body())).status == 200


async def test_every_stream_ends_with_finish_reasons_or_an_error(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    key = await accounts.key(await accounts.tenant(name()))
    cases: list[tuple[int, dict[str, Any]]] = [
        (3, {"n": 3}),
        (4, {"prompt": [[5], [6]], "n": 2}),
        (1, {"ignore_eos": False, "max_tokens": 50}),
    ]
    for number, fields in cases:
        answer = await request(stack.url, key.text, body(stream=True, **fields))
        choices = [choice for event in answer.events for choice in event["choices"]]
        reasons = {choice["index"]: choice["finish_reason"] for choice in choices}
        assert split_events(answer.body)[-1] == DONE
        assert set(reasons.values()) <= {"stop", "length"}
        assert len(reasons) == number


# -- growth ------------------------------------------------------------------------------------

WARM_UP, REQUESTS, AT_ONCE = 150, 450, 32
MOST_GROWTH_KIB = 8 * 1024


async def lasting_keys(books: Books) -> int:
    """Count the keys in Redis except records and content of responses, which expire."""
    found = 0
    async for name in books.redis.scan_iter(count=1_000):
        if not (name.startswith(b"{r:") or b"}:request:" in name):
            found += 1
        else:
            assert await books.redis.pttl(name) != -1, name
    return found


async def test_memory_and_redis_stop_growing(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    limits = {"requests_per_minute": LARGE, "tokens_per_day": LARGE, "concurrent_requests": LARGE}
    key = await accounts.holder(LimitScope.KEY, name(), limits)
    await use(stack, key, WARM_UP)
    await books.settled()
    await books.nothing_left()
    keys_before, memory_before = await lasting_keys(books), memory_kib(stack)
    await use(stack, key, REQUESTS)
    await books.settled()
    await books.nothing_left()

    # Keys of processes, and some that expire after a minute, come and go.
    assert await lasting_keys(books) < keys_before + 20
    for process, kib in memory_kib(stack).items():
        assert kib - memory_before[process] < MOST_GROWTH_KIB, process


async def use(stack: Stack, key: Credential, number: int) -> None:
    """Send so many requests; a third of the clients disconnect."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> int:
        leave_after = None if index % 3 else STEP_SECONDS * (index % 40)
        async with places:
            while True:
                answer = await request(
                    stack.gateways[index % 2],
                    key.text,
                    body(stream=index % 2 == 0, ignore_eos=True),
                    leave_after=leave_after,
                )
                if answer.status != 503:
                    return answer.status
                # On a busy machine a gateway may miss a reply of Redis or of the worker, and sends
                # Retry-After.
                await asyncio.sleep(float(answer.headers["retry-after"]))

    statuses = Counter(await asyncio.gather(*(one(index) for index in range(number))))
    assert set(statuses) <= {0, 200}


def memory_kib(stack: Stack) -> dict[str, int]:
    """Return the resident memory of gateways and worker."""
    found = {}
    for process in ("gateway-1", "gateway-2", "worker"):
        status = Path(f"/proc/{stack.processes[process].pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match is not None
        found[process] = int(match[1])
    return found
