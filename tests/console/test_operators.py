"""What operators do in their console."""

import asyncio
import re

from gateway.tenancy.scopes import TENANT_SCOPES
from tests.console.conftest import HOSTILE, OTHER, TENANT, Visit, visiting
from tests.gateway.conftest import complete, eventually, gateway_client
from tests.support.stack import MODEL, Stack


async def test_operator_creates_finds_changes_and_suspends_a_tenant(
    stack: Stack, operator: Visit
) -> None:
    refused = await operator.send("/console/tenants/new", name="x", id="Not Valid", weight="1")
    assert (refused.status_code, "Not Valid" in refused.text) == (400, True)
    created = await operator.send(
        "/console/tenants/new",
        name=f"100%_{HOSTILE}",
        id="made-here",
        weight="2.5",
        billing="prepaid",
        limit_budget_micros="12.5",
    )
    assert created.headers["location"] == "/console/tenants/made-here?done=created"
    found = await operator.get("/console/tenants?search=100%25_")
    assert found.text.count('href="/console/tenants/made-here"') == 1
    assert HOSTILE not in found.text
    # Signs of patterns are text.
    assert "made-here" not in (await operator.get("/console/tenants?search=1_0")).text
    page = (await operator.get("/console/tenants/made-here")).text
    assert "Budget per month, in dollars: 12.50" in page
    changed = await operator.send(
        "/console/tenants/made-here/edit", name="Made", weight="3", limit_budget_micros=""
    )
    assert changed.headers["location"] == "/console/tenants/made-here?done=changed"
    page = (await operator.get("/console/tenants/made-here")).text
    assert ("<dd>3</dd>" in page, "Budget" in page) == (True, False)
    key = await asyncio.to_thread(stack.key, "made-here", scopes=TENANT_SCOPES)
    async with visiting(stack.url, key) as customer:
        asked = await operator.get("/console/tenants/made-here/suspend")
        assert "Suspend the tenant" in asked.text
        await operator.send("/console/tenants/made-here/suspend")
        refused = await customer.get("/console")
        while refused.status_code == 200:
            refused = await customer.get("/console")
        assert (refused.status_code, "is suspended" in refused.text) == (403, True)
        await operator.send("/console/tenants/made-here/activate")
        while (await customer.get("/console")).status_code != 200:
            await asyncio.sleep(0.02)
        log = (await customer.get("/console/audit")).text
        assert "tenant.suspend" in log
        # Customers do not see which operator it was.
        assert ">operator<" in log
        assert "operator:key" not in log
    log = (await operator.get("/console/audit?tenant=made-here")).text
    assert "operator:key:" in log
    state = await operator.send("/console/audit/verify")
    assert "entries are intact" in state.text


async def test_money_changes_only_after_a_confirmation(operator: Visit) -> None:
    path = f"/console/tenants/{OTHER}/credits"
    asked = await operator.send(path, kind="grant", amount="12.50", note="welcome")
    assert (asked.status_code, "Grant $12.50" in asked.text) == (200, True)
    assert "welcome" not in (await operator.get(f"/console/tenants/{OTHER}")).text
    confirmed = {"kind": "grant", "amount": "12.50", "note": "welcome", "confirmed": "yes"}
    assert (await operator.send(path, **confirmed)).status_code == 303
    page = (await operator.get(f"/console/tenants/{OTHER}")).text
    assert ("$12.50 granted" in page, "welcome" in page) == (True, True)
    refused = await operator.send(path, **(confirmed | {"kind": "adjustment", "note": ""}))
    assert (refused.status_code, "note" in refused.text) == (400, True)
    price = {"model": "priced", "prompt_micros": "0.15", "completion_micros": "0.60"}
    asked = await operator.send("/console/prices/new", **price)
    assert "Add this price?" in asked.text
    assert "priced" not in (await operator.get("/console/prices")).text
    await operator.send("/console/prices/new", **price, confirmed="yes")
    listed = (await operator.get("/console/prices?model=priced&history=true")).text
    assert ("$0.15" in listed, "$0.60" in listed) == (True, True)
    refused = await operator.send("/console/prices/new", **(price | {"prompt_micros": "cheap"}))
    assert (refused.status_code, "cheap" in refused.text) == (400, True)


async def test_operator_sees_money_models_and_requests_of_all_tenants(
    stack: Stack, operator: Visit
) -> None:
    key = await asyncio.to_thread(stack.key, "staff", scopes=TENANT_SCOPES)
    async with gateway_client(stack.url, key) as client:
        await client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    home = (await operator.get("/console")).text
    assert ("$77.00" in home, "$114.50" in home) == (True, True)
    models = (await operator.get("/console/models")).text
    assert (MODEL in models, "scripted" in models) == (True, True)
    usage = (await operator.get("/console/usage")).text
    for tenant in (TENANT, OTHER):
        assert f"/console/requests?tenant={tenant}" in usage
    requests = (await operator.get(f"/console/requests?tenant={OTHER}")).text
    assert ("$77.00" in requests, "$1.25" in requests) == (True, False)


async def test_operator_cancels_a_live_request_after_a_confirmation(
    stack: Stack, operator: Visit
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    home = f"/console/tenants/{TENANT}/live"
    async with gateway_client(stack.url, key) as client:
        running = asyncio.create_task(complete(client, max_tokens=1900))
        # Its worker reports tokens with every extension of its lease.
        pattern = (
            r"(cmpl-\w+)</th><td[^>]*>running<.*<td class=\"num\">[1-9][0-9]*</td><td class=\"mono"
        )

        async def generates() -> bool:
            return re.search(pattern, (await operator.get(home)).text) is not None

        await eventually(generates, what="tokens of a live request")
        [request_id] = re.findall(pattern, (await operator.get(home)).text)
        asked = (await operator.get(f"{home}/{request_id}/cancel")).text
        assert "Cancel the request?" in asked
        cancelled = await operator.send(f"{home}/{request_id}/cancel")
        assert cancelled.headers["location"] == f"{home}?done=cancelled"
        assert (await running).status_code == 409
        assert request_id not in (await operator.get(home)).text
        assert (await operator.get(f"{home}/{request_id}/cancel")).status_code == 404
