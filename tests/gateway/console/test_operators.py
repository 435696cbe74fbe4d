"""What operators do in their console."""

import asyncio
import html
import re
from datetime import timedelta

from sqlalchemy import select, text

from contract.keys import GATEWAYS, JOBS_DONE, period_counts
from gateway.billing.ledger.history import ServiceHistory
from gateway.billing.ledger.rollups import Rollups
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import LedgerRow
from gateway.platform.redis_client import connect
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import day_of, month_start, utc_now
from gateway.records.usage_record import Outcome
from tests.gateway.conftest import complete, eventually, gateway_client
from tests.gateway.console.conftest import HOSTILE, OTHER, TENANT, Visit, visiting
from tests.support.ledger import use
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
        stripe_customer_id="cus_of_made",
        limit_budget_micros="12.5",
    )
    assert created.headers["location"] == "/console/tenants/made-here?done=created"
    found = await operator.get("/console/tenants?search=100%25_")
    assert found.text.count('href="/console/tenants/made-here"') == 1
    assert HOSTILE not in found.text
    # Signs of patterns are text.
    assert "made-here" not in (await operator.get("/console/tenants?search=1_0")).text
    page = (await operator.get("/console/tenants/made-here")).text
    assert re.search(r"Monthly budget</th><td[^>]*>\$12.50</td>", page)
    assert "cus_of_made" in page
    changed = await operator.send(
        "/console/tenants/made-here/edit", name="Made", weight="3", limit_budget_micros=""
    )
    assert changed.headers["location"] == "/console/tenants/made-here?done=changed"
    page = (await operator.get("/console/tenants/made-here")).text
    assert ("<dd>3</dd>" in page, "Budget" in page) == (True, False)
    assert re.search(r"Stored bytes</th>.*<td[^>]*>the deployment</td>", page)
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
    assert "Rows can be changed" not in state.text
    database = Database(stack.database_url)
    name = "prices_no_update"
    try:
        async with database.writing() as transaction:
            query = text("SELECT sql FROM sqlite_master WHERE name = :name")
            trigger = await transaction.scalar(query, {"name": name})
            await transaction.execute(text(f"DROP TRIGGER {name}"))
        try:
            state = await operator.send("/console/audit/verify")
        finally:
            async with database.writing() as transaction:
                await transaction.execute(text(trigger))
    finally:
        await database.aclose()
    assert "Rows can be changed in prices: triggers" in state.text


async def test_operator_onboards_a_tenant_in_one_flow(stack: Stack, operator: Visit) -> None:
    plan = {"id": "starter", "name": "Starter", "key_requests_per_minute": "7"}
    plan |= {"tenant_budget_micros": "25", "tenant_tokens_per_day": "5000"}
    refused = await operator.send("/console/plans/new", **(plan | {"tenant_tokens_per_day": "x"}))
    assert (refused.status_code, "tokens_per_day" in refused.text) == (400, True)
    assert 'value="25"' in refused.text
    made = await operator.send("/console/plans/new", **plan)
    assert made.headers["location"] == "/console/plans?done=created"
    fields = {"name": "Onboarded", "id": "onboarded", "plan_id": "starter", "billing": "prepaid"}
    fields |= {"dialect": "vllm", "cors_origins": "https://a.example https://b.example"}
    for wrong in (
        {"access": "owner", "email": "flora"},
        {"access": "x"},
        {"credits": "many"},
        {"credits": "-1"},
    ):
        refused = await operator.send("/console/tenants/new", **(fields | wrong))
        assert (refused.status_code, next(iter(wrong)) in refused.text) == (400, True), wrong
    assert (await operator.get("/console/tenants/onboarded")).status_code == 404
    made = await operator.send("/console/tenants/new", **fields, access="admin", credits="12.50")
    [secret] = re.findall(r"sk-\w+-\w{40}", made.text)
    stack.note_key(secret)
    assert "/console/tenants/onboarded/keys" in made.text
    page = (await operator.get("/console/tenants/onboarded")).text
    for shown in ("<dd>vllm</dd>", "https://a.example, https://b.example", "$12.50 granted"):
        assert shown in page
    assert re.search(r"Tokens per day</th><td[^>]*>5,000</td>.*<td[^>]*>its plan</td>", page)
    assert f"Free, for they have no price: {MODEL}" in page
    assert "Nobody can use it" not in page
    async with visiting(stack.url, secret) as customer:
        assert "first key" in (await customer.get("/console/keys")).text
    owner = {"name": "Owned", "id": "owned", "access": "owner", "email": "Flora@Example.com"}
    made = await operator.send("/console/tenants/new", **owner)
    assert made.headers["location"] == "/console/tenants/owned?done=invited"
    page = (await operator.get("/console/tenants/owned")).text
    assert ("flora@example.com" in page, "neither a plan nor limits" in page) == (True, True)
    # A plan changes after a confirmation that names its tenants and what they get.
    changed = {**plan, "tenant_tokens_per_day": ""}
    asked = (await operator.send("/console/plans/starter", **changed)).text
    assert "of 1 tenants?" in asked
    assert "<dt>Tokens per day of each tenant</dt><dd>5,000 → none</dd>" in asked
    assert "5,000" in (await operator.get("/console/plans")).text
    await operator.send("/console/plans/starter", **changed, confirmed="yes")
    page = (await operator.get("/console/tenants/onboarded")).text
    assert ("Tokens per day" in page, "Monthly budget" in page) == (False, True)


async def test_operator_manages_what_a_tenant_has(stack: Stack, operator: Visit) -> None:
    await asyncio.to_thread(stack.key, "furnished", scopes=TENANT_SCOPES)
    home = "/console/tenants/furnished"
    scopes = ["keys", "usage"]
    created = await operator.send(f"{home}/keys/new", name=f"k {HOSTILE}", scopes=scopes)
    [secret] = re.findall(r"sk-\w+-\w{40}", created.text)
    stack.note_key(secret)
    async with visiting(stack.url, secret) as customer:
        assert (await customer.get("/console/keys")).status_code == 200
        # Operators' pages of a tenant are not on the listener of customers.
        assert (await customer.get(f"{home}/keys")).status_code == 404
    [key] = re.findall(rf'{home}/keys/(key_\w+)">k &lt;', (await operator.get(f"{home}/keys")).text)
    page = (await operator.get(f"{home}/keys/{key}")).text
    assert f"/console/requests?tenant=furnished&amp;key={key}" in page
    changed = await operator.send(f"{home}/keys/{key}", name="renamed", scopes=scopes)
    assert changed.headers["location"] == f"{home}/keys/{key}?done=changed"
    await operator.send(f"{home}/keys/{key}/revoke")
    made = {
        "projects/new": {"name": "Shop", "limit_tokens_per_day": "5000"},
        "members": {"email": "flora@example.com", "role": "owner"},
        "webhooks": {"url": "http://127.0.0.1:9/hook"},
    }
    for path, fields in made.items():
        sent = await operator.send(f"{home}/{path}", **fields)
        assert sent.status_code in (200, 303), sent.text
        assert next(iter(fields.values())) in (await operator.get(f"{home}/{path[:8]}")).text
    log = (await operator.get("/console/audit?tenant=furnished")).text
    for action in ("key.create", "key.update", "key.revoke", "project.create", "member.add"):
        entry = log.partition(f'data-label="Action">{action}<')[2].partition("</tr>")[0]
        assert re.search(r">operator:key:\w+<", entry), action
    assert (await operator.get("/console/tenants/nobody/webhooks")).status_code == 404
    reader = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN_READ}))
    async with visiting(stack.operators, reader) as visit:
        assert (await visit.get(f"{home}/keys")).status_code == 200
        assert (await visit.send(f"{home}/keys/new", name="no")).status_code == 403


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
    assert "No worker has announced the model priced. Check the name." in asked.text
    assert "priced" not in (await operator.get("/console/prices")).text
    await operator.send("/console/prices/new", **price, confirmed="yes")
    listed = (await operator.get("/console/prices?model=priced")).text
    # Phones show each with the name of its column.
    assert re.search(r'data-label="Cached">\$0\.15', listed)
    assert re.findall(
        r"priced \(unknown\)|\$[\d.]+(?=</td)|\$[\d.]+(?=<span)|in force", listed
    ) == [*("priced (unknown)", "$0.15", "$0.15", "$0.60", "$0.00", "in force")]
    # A future price is listed before it applies, unless another one replaces it.
    for amount, start in (("0.2", "2090-01-01"), ("0.3", "2090-01-01"), ("0.1", "")):
        later = price | {"prompt_micros": amount, "effective_at": start and f"{start}T00:00:00"}
        await operator.send("/console/prices/new", **later, confirmed="yes")
    for query, states in (("", ["future", "in force"]), ("&history=true", ["future", "past"])):
        listed = (await operator.get(f"/console/prices?model=priced{query}")).text
        found = re.findall(r"\$([\d.]+)<[^$]*\$[^$]*\$[^$]*\$[^$]*>(future|in force|past)<", listed)
        assert [state for _, state in found][:2] == states
        assert found[0] == ("0.30", "future")
    assert [amount for amount, state in found if state == "past"] == ["0.20", "0.15"]
    # The price in force is removed, then the future one, and what that had replaced is back.
    for _ in range(2):
        current = (await operator.get("/console/prices?model=priced")).text
        *_, removal = re.findall(r"/console/prices/remove\?price=\d+", current)
        assert "Remove this price?" in (await operator.get(removal)).text
        assert (await operator.send(removal)).status_code == 303
        assert (await operator.send(removal)).status_code == 409
    listed = (await operator.get("/console/prices?model=priced&history=true")).text
    assert re.findall(r">(future|in force|past|removed)<", listed) == [
        *("removed", "future", "removed", "past")
    ]
    assert f'aria-label="Add a price of {MODEL}"' in (await operator.get("/console/prices")).text
    asked = await operator.send("/console/prices/new", **(price | {"model": MODEL}))
    assert "has announced" not in asked.text
    refused = await operator.send("/console/prices/new", **(price | {"prompt_micros": "cheap"}))
    assert (refused.status_code, "cheap" in refused.text) == (400, True)


async def test_operator_sees_money_models_and_requests_of_all_tenants(
    stack: Stack, operator: Visit
) -> None:
    key = await asyncio.to_thread(stack.key, "staff", scopes=TENANT_SCOPES)
    async with gateway_client(stack.url, key) as client:
        await client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    home = (await operator.get("/console")).text
    assert "$77.00" in home
    models = (await operator.get("/console/models")).text
    assert (MODEL in models, "scripted" in models) == (True, True)
    usage = (await operator.get("/console/usage")).text
    for tenant, revenue in ((TENANT, "$37.50"), (OTHER, "$77.00")):
        assert f"/console/requests?tenant={tenant}" in usage
        assert revenue in usage
    requests = (await operator.get(f"/console/requests?tenant={OTHER}")).text
    assert ("$77.00" in requests, "$1.25" in requests) == (True, False)


async def test_overview_shows_what_the_ledger_and_processes_have_recorded(
    stack: Stack, operator: Visit
) -> None:
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    name = f"Timed {HOSTILE}"
    await operator.send("/console/tenants/new", name=name, id="timed")
    now = utc_now()
    past = now - timedelta(seconds=10)  # The last of them is recorded five seconds later.
    try:
        for ms, times in ((100, 6), (3_000, 2)):
            await use(
                database,
                "timed",
                500_000,
                at=past,
                times=times,
                first_token_ms=ms,
                prompt_tokens=7,
            )
        await use(database, "timed", 0, outcome=Outcome.FAILED, code="internal_error")
        await Rollups(database).make_all()
        async with database.reading() as transaction:
            rows = (
                await transaction.execute(
                    select(LedgerRow.created_at, LedgerRow.cost_micros, LedgerRow.outcome)
                )
            ).all()
        old_ms = int((now - timedelta(hours=4)).timestamp() * 1000)
        await redis.hset(JOBS_DONE, mapping={"drain": str(old_ms), "reconcile": str(old_ms)})
        await redis.zadd(GATEWAYS, {"gw-silent": old_ms + 14_000_000})
        await redis.zadd(period_counts("waits", "hour", old_ms // 3_600_000), {"slow": 3_500_000})
        await asyncio.to_thread(stack.key, "timed", expires_at=now + timedelta(hours=1))
        served = (await ServiceHistory(database).get()).last_day

        async def is_read() -> bool:
            # It is cached for some seconds, and other tests may have added to it.
            nonlocal served
            served = (await ServiceHistory(database).get()).last_day
            failed = f"{served.failed_requests:,} of {served.requests:,} failed"
            return failed in (await operator.get("/console")).text

        await eventually(is_read, what="the history being read again")
        page = (await operator.get("/console")).text
        money = (await operator.get("/console/money")).text
        await redis.hdel(JOBS_DONE, "drain", "reconcile")
        await redis.zrem(GATEWAYS, "gw-silent")
    finally:
        await redis.aclose()
        await database.aclose()
    values = dict(re.findall(r"<h2>(?:<a[^>]*>)?([^<]+).*?value[^>]*>([^<]+)<", page))
    month = sum(cost for at, cost, _ in rows if at >= month_start(now))
    today = sum(cost for at, cost, _ in rows if at >= day_of(now))
    assert values["Revenue today"] == f"${today / 1e6:,.2f}"
    assert values[f"Revenue in {now:%B %Y}"] == f"${month / 1e6:,.2f}"
    assert served.requests >= 9 <= len(rows)
    assert values["Availability, 24 h"] == f"{served.availability:.2f} %"
    assert re.fullmatch(r"[\d.]+ m?s", values["First token, 24 h"])
    assert (values["Utilisation now"], values["Longest wait, 24 h"]) == ("0 %", "58 min 20 s")
    for alert in (
        *("AvailabilityBudgetBurn", "FirstTokenBudgetBurn", "KeyExpiry", "ProcessDown"),
        *("The job drain does not succeed", "The job reconcile does not succeed"),
    ):
        assert alert in page.partition("</ul>")[2], alert
    assert 'href="https://grafana.example/d/all"' in page
    assert 'href="https://grafana.example/explore"' in page
    # Both tables have the tenant by its name, and the sums of all tenants.
    for shown in (page.partition("Biggest tenants")[2], money):
        assert HOSTILE not in shown
        row = re.search(r"/timed[^>]*>Timed &lt;script.*?</tr>", shown, re.DOTALL)
        assert row is not None
        found = re.findall(r"num[^>]*>([^<]+)<", row[0])
        # Other tests may have recorded audio, which has a column then.
        assert (found[:3], found[-1]) == (["9", "1", "56"], "$4.00")
        sums = re.search(r"All tenants</th>.*?>([\d,]+)<.*?(\$[\d,.]+)<", shown, re.DOTALL)
        assert sums is not None
        assert sums.groups() == (
            f"{sum(at >= month_start(now) for at, _, _ in rows):,}",
            f"${month / 1e6:,.2f}",
        )


async def test_operator_cancels_a_live_request_after_a_confirmation(
    stack: Stack, operator: Visit
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    home = f"/console/tenants/{TENANT}/live"
    async with gateway_client(stack.url, key) as client:
        running = asyncio.create_task(complete(client, max_tokens=1900))
        # Its worker reports tokens with every extension of its lease.
        pattern = (
            rf'(cmpl-\w+)</th>.*>running<.*out">[1-9][0-9,]*</td><td data-label="Model">{MODEL}<'
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


async def test_operator_registers_and_removes_adapters(operator: Visit) -> None:
    fields = {"tenant": OTHER, "name": "poet", "base_model": MODEL, "source": "/loras/poet"}
    asked = await operator.send("/console/adapters/new", **fields)
    assert "Register this adapter?" in asked.text
    assert "poet" not in (await operator.get("/console/adapters")).text
    made = await operator.send("/console/adapters/new", **fields, confirmed="yes")
    assert made.headers["location"] == "/console/adapters?done=registered"
    refused = await operator.send("/console/adapters/new", **fields, confirmed="yes")
    assert (refused.status_code, "already has an adapter" in refused.text) == (409, True)
    everything = (await operator.get("/console/adapters")).text
    assert HOSTILE not in everything
    assert everything.count("Why &lt;script&gt;") >= 2
    listed = (await operator.get(f"/console/adapters?tenant={OTHER}")).text
    assert f"/console/tenants/{TENANT}" not in listed
    [path] = re.findall(rf"(/console/tenants/{OTHER}/adapters/adp_\w+)/remove\" [^>]*:poet", listed)
    removal = (await operator.get(f"{path}/remove")).text
    assert f"Requests of the tenant {OTHER}" in removal
    await operator.send(f"{path}/remove")
    assert "poet" not in (await operator.get(f"/console/adapters?tenant={OTHER}")).text
    log = (await operator.get(f"/console/audit?tenant={OTHER}")).text
    assert ("adapter.register" in log, "adapter.delete" in log) == (True, True)


async def test_operator_defines_aliases_and_sees_their_traffic(
    stack: Stack, operator: Visit
) -> None:
    fields = {"name": "org/chat", "models": f"{MODEL}=3\n{HOSTILE}=1", "sticky": "user"}
    refused = await operator.send("/console/aliases/edit", **(fields | {"models": "m=x"}))
    assert (refused.status_code, "MODEL=WEIGHT" in refused.text) == (400, True)
    fields["models"] = f"{MODEL}=3\nidle=0"
    asked = await operator.send("/console/aliases/edit", **fields)
    assert "Define the alias" in asked.text
    assert "org/chat" not in (await operator.get("/console/aliases")).text
    await operator.send("/console/aliases/edit", **fields, confirmed="yes")
    form = (await operator.get("/console/aliases/edit?name=org/chat")).text
    assert f"{MODEL}=3\nidle=0</textarea>" in form
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    body = {"model": "org/chat", "prompt": "a", "max_tokens": 1}
    async with gateway_client(stack.url, key) as client:

        async def is_known() -> bool:
            return (await client.post("/v1/completions", json=body)).status_code == 200

        await eventually(is_known, what="the alias being known")

    async def is_counted() -> bool:
        listed = (await operator.get("/console/aliases")).text
        assert HOSTILE not in listed
        section = listed.partition('Models of org/chat"')[2].partition("</table>")[0]
        numbers = re.findall(r'num[^"]*">([^<]+)<', section)
        assert "3" in numbers
        return numbers[4:] == ["3", "100.0 %", "1", "100.0 %", "0", "0.0 %", "0", "0.0 %"]

    await eventually(is_counted, what="a request of an alias being counted")
    removal = (await operator.get("/console/aliases/remove?name=org/chat")).text
    assert "Remove the alias" in removal
    await operator.send("/console/aliases/remove", name="org/chat")
    assert (await operator.get("/console/aliases/edit?name=org/chat")).status_code == 404


async def test_operator_sees_rejected_requests_and_used_up_credits(
    stack: Stack, operator: Visit
) -> None:
    key = await asyncio.to_thread(stack.key, "unpaid", scopes=TENANT_SCOPES)
    await operator.send("/console/tenants/unpaid/edit", name=f"U {HOSTILE}", billing="prepaid")
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    async with gateway_client(stack.url, key) as client:
        for model in ("nothing", "nothing", MODEL):
            await client.post("/v1/completions", json=body | {"model": model})

        async def is_used_up() -> bool:
            await client.post("/v1/completions", json=body)
            money = (await operator.get("/console/money")).text
            assert HOSTILE not in money
            return "/console/tenants/unpaid" in money.partition("Statements")[0]

        await eventually(is_used_up, what="a tenant without credits being listed")
        credit = {"kind": "grant", "amount": "5", "note": "", "confirmed": "yes"}
        await operator.send("/console/tenants/unpaid/credits", **credit)
        await client.post("/v1/completions", json=body)
    money = (await operator.get("/console/money")).text
    assert "/console/tenants/unpaid" not in money.partition("Statements")[0]
    assert f"/console/tenants/{OTHER}/invoices/" in money.partition("Statements")[2]

    async def are_counted() -> bool:
        listed = (await operator.get("/console/refusals")).text
        return (
            re.search(r'unpaid</a></th><td class="mono"[^>]*>model_not_found</td>.*>2<', listed)
            is not None
        )

    await eventually(are_counted, what="rejected requests being counted")
    page = (await operator.get("/console/refusals?tenant=unpaid&since=7d")).text
    assert ("model_not_found" in page, f"/console/tenants/{TENANT}" in page) == (True, False)
    staff = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN_READ}))
    for sender, status in ((staff, 200), (key, 403)):
        async with gateway_client(stack.operators, sender) as client:
            response = await client.get("/admin/refusals", params={"tenant": "unpaid"})
            assert response.status_code == status
            assert ("model_not_found" in response.text) == (status == 200)
    refused = await operator.get("/console/refusals?since=1y")
    assert (refused.status_code, "since" in refused.text) == (400, True)


async def test_pages_link_to_dashboards_traces_and_statements(operator: Visit) -> None:
    tenant = (await operator.get(f"/console/tenants/{OTHER}")).text
    assert f'href="https://grafana.example/d/t?var-tenant={OTHER}"' in tenant
    models = (await operator.get("/console/models")).text
    assert f'href="https://grafana.example/d/m?var-model={MODEL}"' in models
    requests = (await operator.get(f"/console/requests?tenant={OTHER}")).text
    [request_id, *_] = re.findall(r"/console/requests/([\w.-]+)", requests.partition("<thead>")[2])
    receipt = (await operator.get(f"/console/requests/{request_id}")).text
    assert f'href="https://traces.example/find?id={request_id}"' in receipt
    assert "<dt>Engine</dt><dd>vllm 0.32.0</dd>" in receipt
    assert "<dt>Preemptions</dt><dd>2: " in receipt
    home = f"/console/tenants/{OTHER}/invoices"
    months = (await operator.get(home)).text
    [month, *_] = re.findall(rf'{home}/([\d-]+)"', months)
    assert "$77.00" in (await operator.get(f"{home}/{month}")).text
    file = await operator.get(f"{home}/{month}.csv")
    assert "77000000" in file.text
    assert f'filename="{OTHER}-invoice-{month}.csv"' in file.headers["content-disposition"]
    assert (await operator.get("/console/tenants/nobody/invoices")).status_code == 404


async def test_readers_see_no_forms_and_no_links_to_them(stack: Stack, operator: Visit) -> None:
    names = {"name": "Read", "id": "read-only"}
    assert (await operator.send("/console/tenants/new", **names)).status_code == 303
    home = "/console/tenants/read-only"
    for path, fields in (
        ("projects/new", {"name": "Shop"}),
        ("members", {"subject": "reader", "name": "Reader", "role": "viewer"}),
        ("webhooks", {"url": "http://127.0.0.1:9/hook"}),
    ):
        assert (await operator.send(f"{home}/{path}", **fields)).status_code < 400, path
    await asyncio.to_thread(stack.key, "read-only")
    key = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN_READ}))
    forms, links = r'method="post" action="([^"]+)"', r'href="([^"#]+)'
    changes = re.compile(r"/(new|edit|remove|revoke|rotate|archive|cancel|suspend)\b")
    async with visiting(stack.operators, key) as reader:
        found, seen = ["/console", home], set[str]()
        while found:
            path = found.pop()
            kind = re.sub(r"\?.*|(key|prj|mbr|whk|adp)_\w+|cmpl-[^/]+|\d{4}-\d\d", "", path)
            if kind in seen or not path.startswith("/console") or ".csv" in path:
                continue
            seen.add(kind)
            page = (await reader.get(path)).text
            assert {*re.findall(forms, page)} <= {"/console/logout", "/console/logout-everywhere"}
            lead = [html.unescape(each) for each in re.findall(links, page)]
            assert not [each for each in lead if changes.search(each)], path
            # One tenant is enough.
            found += [
                each for each in lead if not re.match(r"/console/tenants/(?!read-only)", each)
            ]
    assert {f"{home}/{part}/" for part in ("keys", "projects", "members", "webhooks")} <= seen


async def test_operator_computes_what_a_load_needs(operator: Visit) -> None:
    load = "requests=40&prompt_tokens=1200&completion_tokens=400"
    page = html.unescape((await operator.get(f"/console/capacity?{load}")).text)
    # As docs/capacity.md has it.
    assert re.search(r">workers</th><td[^>]*>4<", page)
    assert "sluice capacity --requests 40 --prompt-tokens 1200 --completion-tokens 400 p" in page
    refused = await operator.get(f"/console/capacity?{load}&traced=2")
    assert (refused.status_code, refused.text.count("“Traced”")) == (400, 1)
