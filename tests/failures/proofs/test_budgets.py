"""Budgets and credits under many clients on two gateways: fully spent, never overspent."""

import asyncio
import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.records.limits import LimitScope, SpendScope
from gateway.records.records import Billing
from gateway.records.times import month_start, utc_now
from gateway.records.usage_record import MICRO
from tests.failures.proofs.accounts import Accounts, Credential
from tests.failures.proofs.client import Answer, ask, request
from tests.failures.proofs.conftest import COMPLETION_TOKENS, cost_of, token_of
from tests.failures.proofs.ledger import Books
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import Stack

CLIENTS = 100
"""On each gateway."""
PROMPT_TOKENS = 10
MAX_TOKENS = 40
"""More than a text has, so that each settlement returns some."""
MOST = cost_of(PROMPT_TOKENS, MAX_TOKENS)
COST = cost_of(PROMPT_TOKENS, COMPLETION_TOKENS)
MONEY = 25_003
"""Micro-dollars: enough for a third as many reservations at a time as there are clients."""

_LONG = pytest.mark.long
HOLDERS: dict[str, tuple[LimitScope, dict[str, int], Billing]] = {
    "key": (LimitScope.KEY, {"budget_micros": MONEY}, Billing.POSTPAID),
    "project": (LimitScope.PROJECT, {"budget_micros": MONEY}, Billing.POSTPAID),
    "tenant": (LimitScope.TENANT, {"budget_micros": MONEY}, Billing.POSTPAID),
    "credits": (LimitScope.TENANT, {}, Billing.PREPAID),
}
SPENDING = tuple(SpendScope)
USER = "ada"


async def spend(stack: Stack, key: Credential, number: int) -> list[Answer]:
    """Send requests until the money is spent; return all responses."""
    answers: list[Answer] = []
    while not answers or answers[-1].status == 200:
        answers.append(
            await ask(
                stack.gateways[number % 2],
                key.text,
                prompt=[5] * PROMPT_TOKENS,
                max_tokens=MAX_TOKENS,
                stream=number % 3 == 0,
                user=USER,
            )
        )
    return answers


@pytest.mark.parametrize(
    "holder",
    [
        "key",
        # Scopes differ only in the charged account (test_every_limit_of_every_scope_is_enforced).
        pytest.param("project", marks=_LONG),
        pytest.param("tenant", marks=_LONG),
        "credits",
        *(
            pytest.param(f"spend limit {scope}", marks=() if scope is SpendScope.USER else _LONG)
            for scope in SPENDING
        ),
    ],
)
async def test_budget_is_spent_fully_and_never_overspent(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str], holder: str
) -> None:
    is_spend_limit = holder.startswith("spend limit")
    scope, limits, billing = HOLDERS["credits" if is_spend_limit else holder]
    if is_spend_limit:
        billing = Billing.POSTPAID
    key = await accounts.holder(scope, name(), limits, billing=billing)
    if is_spend_limit:
        of = SpendScope(holder.rpartition(" ")[2])
        if of is SpendScope.MEMBER:
            key = await accounts.member(key.tenant, token_of(key.tenant, "ada"))
        await accounts.limit_spending(key, of, MONEY)
    if billing is Billing.PREPAID:
        await accounts.grant(key.tenant, MONEY)

    crowds = await asyncio.gather(*(spend(stack, key, number) for number in range(2 * CLIENTS)))
    # Reservations of running requests blocked some of the money; now there are none.
    last = await spend(stack, key, 0)

    answers = [answer for clients in crowds for answer in clients] + last
    served = [answer for answer in answers if answer.status == 200]
    for answer in answers:
        if answer.status != 200:
            check_refusal(answer, holder)
    await books.settled()
    rows = await books.rows(key.tenant)
    assert sorted(row["request_id"] for row in rows) == sorted(str(a.request_id) for a in served)
    assert {row["cost_micros"] for row in rows} == {COST}
    spent = sum(row["cost_micros"] for row in rows)
    assert MONEY - MOST < spent <= MONEY
    reported = await reports_of(stack, await accounts.key(key.tenant))
    assert set(reported.values()) == {spent}, reported
    if is_spend_limit:
        [own] = await accounts.spend_limits.uses(
            key.tenant, await accounts.spend_limits_of(key), user=USER
        )
        assert own.used_micros == spent
        return
    limits = await accounts.limits(stack.url, key)
    check_account(limits, holder, spent=spent)


async def reports_of(stack: Stack, key: Credential) -> dict[str, int]:
    """Return the micro-dollars that a tenant has spent, as each report has them."""
    now = utc_now()
    month, start = f"{now:%Y-%m}", int(month_start(now).timestamp())

    async def read(path: str) -> Any:
        return (await request(stack.url, key.text, path=path)).json

    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_SECONDS) as console:
        [token] = re.findall(
            r'name="csrf" value="([^"]+)"', (await console.get("/console/login")).text
        )
        await console.post("/console/login", data={"csrf": token, "key": key.text})
        table = (await console.get(f"/console/invoices/{month}.csv")).text
    async with asyncio.timeout(PATIENCE_SECONDS):  # Until the sums of hours are made.
        while not (usage := (await read("/v1/usage?bucket=total"))["data"]):
            await asyncio.sleep(0.1)
    costs = await read(f"/v1/organization/costs?start_time={start}&limit=31")
    return {
        "usage": sum(each["cost_micros"] for each in usage),
        "invoice": (await read(f"/v1/invoices/{month}"))["total_micros"],
        "costs": round(
            sum(e["amount"]["value"] for day in costs["data"] for e in day["results"]) * MICRO
        ),
        "console": sum(int(row["cost_micros"]) for row in csv.DictReader(io.StringIO(table))),
    }


def check_refusal(answer: Answer, holder: str) -> None:
    """The refusal names the lack of money; its dialect's code is OpenAI's."""
    assert answer.status == 429
    error = answer.error
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert error["scope"] == ("tenant" if holder == "credits" else holder.rpartition(" ")[2])
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after-ms" not in answer.headers


def check_account(limits: dict[str, Any], holder: str, *, spent: int) -> None:
    """Redis, the customer's page and the ledger agree."""
    if holder == "credits":
        assert limits["credits"]["remaining_micros"] == MONEY - spent, json.dumps(limits)
        return
    budgets: dict[str, Any] = {
        s["scope"]: s["limits"].get("budget_micros") for s in limits["scopes"]
    }
    assert budgets[holder]["used"] == spent
    assert budgets[holder]["remaining"] == MONEY - spent


async def test_repeated_request_is_stopped_until_it_is_lifted(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    most = 12
    key = await accounts.holder(LimitScope.KEY, name(), {}, anomaly_repeats=most)
    await accounts.learn_limits()
    [limit] = await accounts.spend_limits_of(key)

    async def send(number: int, prompt: str = "x") -> Answer:
        return await ask(stack.gateways[number % 2], key.text, prompt=prompt, max_tokens=1)

    answers = await asyncio.gather(*(send(number) for number in range(2 * most)))
    stopped = [answer for answer in answers if answer.status != 200]
    assert len(stopped) == most
    for answer in stopped:
        assert (answer.status, answer.error["code"], answer.error["scope"]) == (
            429,
            "repeats",
            "key",
        )
        assert f"/v1/spend_limits/{limit.id}/lift" in answer.error["message"]
        assert answer.headers["x-should-retry"] == "false"
    assert [(await send(0, prompt)).status for prompt in ("y", "x")] == [200, 429]
    await accounts.spend_limits.lift(key.tenant, limit.id)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await send(0)).status != 200:
            await asyncio.sleep(0.1)
    await books.settled()
    assert len(await books.rows(key.tenant)) == most + 2


async def test_dialect_with_402_uses_it_for_an_exceeded_budget(
    stack: Stack, accounts: Accounts, name: Callable[[], str]
) -> None:
    key = await accounts.holder(LimitScope.KEY, name(), {"budget_micros": 0})
    answer = await request(
        stack.url,
        key.text,
        {"model": "sluice-tiny", "prompt": "x", "max_tokens": 1},
        headers={"x-api-dialect": "fireworks"},
    )
    assert (answer.status, answer.error["code"]) == (402, "budget_exceeded")
