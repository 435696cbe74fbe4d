"""Projects, members and webhooks, as their owner manages them without JavaScript."""

import asyncio
import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import product
from typing import Any
from urllib.parse import urlencode

from redis.asyncio import Redis

from contract import keys, messages
from contract.messages import WorkerCard, WorkerState
from contract.tier import ServiceTier
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.credits.service import CreditService
from gateway.billing.prices import PriceService
from gateway.console.lists import ROWS
from gateway.models.catalogue import Catalogue
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.records.adapters import AdapterState
from gateway.records.limits import LimitName
from gateway.records.records import Billing
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import month_start, utc_now
from gateway.records.usage_record import Outcome
from tests.gateway.conftest import eventually, gateway_client
from tests.gateway.console.conftest import HOSTILE, Visit, fail_adapter, visiting
from tests.support.ledger import use
from tests.support.stack import MODEL, Stack

TENANT = "managed"


@asynccontextmanager
async def _stores(stack: Stack) -> AsyncIterator[tuple[Database, Redis]]:
    """Open what the gateway stores its data in."""
    database, redis = Database(stack.database_url), connect(stack.redis.url, max_connections=1)
    try:
        yield database, redis
    finally:
        await redis.aclose()
        await database.aclose()


async def test_owner_manages_projects(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    async with visiting(stack.url, key) as visit:
        refused = await visit.send("/console/projects/new", name="", limit_tokens_per_day="1")
        assert (refused.status_code, "“Name”" in refused.text) == (400, True)
        await visit.send("/console/projects/new", name=HOSTILE, limit_budget_micros="0.000001")
        listed = (await visit.get("/console/projects")).text
        [project] = set(re.findall(r"/console/projects/(prj_\w+)", listed))
        assert HOSTILE not in listed
        page = (await visit.get(f"/console/projects/{project}")).text
        assert 'name="limit_budget_micros" type="text" value="0.000001"' in page
        assert re.search(r'class="meter.*\$0.00 of \$0.000001', page, re.DOTALL)
        await visit.send(f"/console/projects/{project}", name="Shop", limit_tokens_per_day="none")
        page = (await visit.get(f"/console/projects/{project}")).text
        assert 'name="limit_tokens_per_day" type="text" value="none"' in page
        await visit.send(f"/console/projects/{project}/archive")
        assert "archived" in (await visit.get("/console/projects")).text
        await visit.send(f"/console/projects/{project}/activate")
        made = await visit.send("/console/keys/new", name="k", scopes="keys", project_id=project)
        [secret] = re.findall(r"sk-\w{12}-\w{40}", made.text)
        stack.note_key(secret)
    # The key of a project sees its project alone, and manages no project.
    async with visiting(stack.url, secret) as inside:
        assert project in (await inside.get("/console/projects")).text
        assert (await inside.get("/console/projects/new")).status_code == 403
        assert (await inside.send(f"/console/projects/{project}", name="x")).status_code == 403


async def test_owner_manages_members(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    async with visiting(stack.url, key) as visit:
        await visit.send("/console/members", subject="ada", name=HOSTILE, role="owner")
        again = await visit.send("/console/members", subject="ada", role="viewer")
        assert (again.status_code, "already a member" in again.text) == (409, True)
        assert HOSTILE not in again.text
        [member] = set(re.findall(r"/console/members/(mbr_\w+)", again.text))
        path = f"/console/members/{member}"
        for fields in ({"role": "viewer"}, {"remove": "yes"}):
            refused = await visit.send(path, **fields)
            assert (refused.status_code, "last owner" in refused.text) == (400, True)
        await visit.send("/console/members", subject="bob", role="owner")
        await visit.send(path, role="billing")
        assert "billing" in (await visit.get("/console/members")).text
        await visit.send(path, remove="yes")
        assert member not in (await visit.get("/console/members")).text


async def test_owner_manages_webhooks(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    url = "http://127.0.0.1:9/hook?a='&b=1"
    async with visiting(stack.url, key) as visit:
        refused = await visit.send("/console/webhooks", url=url, thresholds="50, many")
        assert (refused.status_code, "thresholds" in refused.text) == (400, True)
        made = await visit.send("/console/webhooks", url=url, thresholds="50 90")
        assert made.status_code == 200, made.text
        [webhook] = set(re.findall(r"/console/webhooks/(whk_\w+)", made.text))
        [secret] = re.findall(r"whsec_\w+", made.text)
        path = f"/console/webhooks/{webhook}"
        await visit.send(f"{path}/test")
        page = (await visit.get(path)).text
        assert "webhook.test" in page
        assert "next attempt" in page
        assert "50, 90 %" in page
        assert secret not in page
        assert "hook?a=&#39;&amp;b=1" in page
        async with gateway_client(stack.url, key) as client:
            events = (await client.get(f"/v1/webhooks/{webhook}/events")).json()["data"]
        assert [(each["type"], each["attempts"]) for each in events] == [("webhook.test", 0)]
        twice = await visit.send(f"{path}/test")
        assert (twice.status_code, "this minute" in twice.text) in ((409, True), (303, False))
        await visit.send(f"{path}/remove")
        assert (await visit.get(path)).status_code == 404


async def test_owner_manages_spend_limits(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    home = "/console/spend-limits"
    given = {"scope": "user", "holder": "", "window": "hour", "amount_micros": "0.50"}
    async with visiting(stack.url, key) as visit:
        refused = await visit.send(f"{home}/new", **given | {"amount_micros": "much"})
        assert (refused.status_code, "at most six decimals" in refused.text) == (400, True)
        await visit.send(f"{home}/new", **given)
        listed = (await visit.get(home)).text
        assert ("each end user" in listed, "$0.50" in listed) == (True, True)
        [path] = set(re.findall(rf"{home}/spl_\w+(?!/)\b(?=\")", listed))
        raised = {"raised_micros": "2", "raised_until": "", "raise_reason": "launch"}
        refused = await visit.send(path, amount_micros="0.50", **raised)
        assert (refused.status_code, "raised_until" in refused.text) == (400, True)
        until = f"{utc_now() + timedelta(hours=1):%Y-%m-%dT%H:%M:%S}"
        await visit.send(path, amount_micros="0.75", **raised | {"raised_until": until})
        page = (await visit.get(path)).text
        assert all(f'value="{each}"' in page for each in ("0.75", "2.00", "launch", until))
        await visit.send(f"{path}/remove")
        assert (await visit.get(path)).status_code == 404


async def test_owner_sees_and_removes_adapters(stack: Stack) -> None:
    key = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    database = Database(stack.database_url)
    adapter_id = await fail_adapter(database, TENANT, "failing")
    await database.aclose()
    async with visiting(stack.url, key) as visit:
        listed = (await visit.get("/console/adapters")).text
        assert (HOSTILE in listed, "Why &lt;script&gt;" in listed) == (False, True)
        assert "/nowhere" not in listed
        asked = (await visit.get(f"/console/adapters/{adapter_id}/remove")).text
        assert "Requests for it get 404." in asked
        await visit.send(f"/console/adapters/{adapter_id}/remove")
        assert adapter_id not in (await visit.get("/console/adapters")).text
        log = (await visit.get("/console/audit?action=adapter.delete")).text
        assert (adapter_id in log, "/nowhere" in log) == (True, False)


async def test_rejected_requests_and_their_reasons_are_listed(stack: Stack) -> None:
    limits = {LimitName.REQUESTS_PER_MINUTE: 1}
    limited = await asyncio.to_thread(
        stack.key, TENANT, scopes=frozenset({Scope.COMPLETIONS}), limits=limits
    )
    neighbour = await asyncio.to_thread(stack.key, TENANT, scopes=frozenset({Scope.COMPLETIONS}))
    owner = await asyncio.to_thread(stack.key, TENANT, scopes=TENANT_SCOPES)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    async with gateway_client(stack.url, limited) as client:
        statuses = [(await client.post("/v1/completions", json=body)).status_code for _ in range(4)]
        assert statuses == [200, 429, 429, 429]

        async def all_are_listed() -> bool:
            data = (await client.get("/v1/limits/refusals")).json()["data"]
            return [each["times"] for each in data] in ([3], [2, 1], [1, 2], [1, 1, 1])

        await eventually(all_are_listed, what="rejections being listed")
        [first, *_] = (await client.get("/v1/limits/refusals")).json()["data"]
    assert (first["limit"], first["scope"], first["code"], first["model"]) == (
        *("requests_per_minute", "key", "requests"),
        MODEL,
    )
    for key, sees in ((limited, True), (owner, True), (neighbour, False)):
        async with visiting(stack.url, key) as visit:
            page = (await visit.get("/console/limits")).text
            assert ("The limit of 1 requests per minute of the key" in page) == sees


async def test_requests_are_filtered_and_read_in_both_directions(stack: Stack) -> None:
    owner = await asyncio.to_thread(stack.key, "requests", scopes=TENANT_SCOPES)
    database, at = Database(stack.database_url), utc_now() - timedelta(hours=5)
    for outcome, tier, times in (("failed", "flex", 2), ("finished", "default", 2 * ROWS + 3)):
        changes: dict[str, Any] = {
            "outcome": Outcome(outcome),
            "service_tier": ServiceTier(tier),
        }
        await use(database, "requests", 1_234_567, at=at, times=times, **changes)
        at += timedelta(hours=1)
    await database.aclose()
    async with visiting(stack.url, owner) as visit:

        async def shown(path: str) -> tuple[list[str], dict[str, str]]:
            page = (await visit.get(path)).text
            links = re.findall(r'rel="(next|prev)" href="([^"]+)"', page)
            return re.findall(r'href="/console/requests/([^"]+)"', page), {
                name: html.unescape(href) for name, href in links
            }

        first, links = await shown("/console/requests?outcome=finished")
        assert [*links] == ["next"]
        second, links = await shown(links["next"])
        third, last = await shown(links["next"])
        assert ([len(each) for each in (first, second, third)], [*last]) == ([50, 50, 3], ["prev"])
        assert len({*first, *second, *third}) == 2 * ROWS + 3
        again, back = await shown(last["prev"])
        assert (again, sorted(back)) == (second, ["next", "prev"])
        assert await shown(back["prev"]) == await shown("/console/requests?outcome=finished")
        failed, links = await shown("/console/requests?tier=flex")
        assert (len(failed), links) == (2, {})
        found = await visit.get(f"/console/requests?id={failed[0]}")
        assert found.headers["location"] == f"/console/requests/{failed[0]}"
        page = (await visit.get("/console/requests?range=24h")).text
        # Rounded in the list, exact on demand and in the receipt.
        assert '<data value="$1.234567" title="$1.234567">$1.23</data>' in page
        # What is wrong stands next to its field, and all values stay.
        bad = {"outcome": "lots", "tier": "gold", "start": "2090-01-01", "key": "x" * 999}
        for (name, value), view in product((bad | {"range": "1h"}).items(), ("requests", "usage")):
            query = urlencode({name: value, "model": "other"})
            found = await visit.get(f"/console/{view}?{query}")
            assert found.status_code == 400
            has_field = f'id="f-{name}"' in found.text
            assert has_field is (
                (view == "requests" and name != "range") or name in {"start", "key"}
            )
            assert (f'id="e-{name}"' in found.text) is has_field
            assert ('class="problem"' in found.text) is not has_field
            assert value in found.text.partition("<form class")[2] or not has_field
            assert '<option value="other" selected>' in found.text
            assert (await visit.get(f"/console/{view}.csv?{query}")).status_code == 400
        # One column for each hour of a short period.
        page = (await visit.get("/console/usage?range=24h")).text
        assert "Cost per hour" in page
        assert page.count('class="column"') in (24, 25)


async def test_models_show_states_prices_and_names(stack: Stack) -> None:
    tenant = "models"
    owner = await asyncio.to_thread(stack.key, tenant, scopes=TENANT_SCOPES)
    async with _stores(stack) as (database, redis):
        await fail_adapter(database, tenant, "tuned", state=AdapterState.READY, rank=1)
        await ChangeAnnouncer(redis).adapters_changed()
        card = WorkerCard("w", "loads", WorkerState.LOADING, "vllm", created=0, load_seconds=90)
        await redis.hset(keys.MODELS, "loads", messages.encode(card))
        async with visiting(stack.url, owner) as visit:

            async def all_are_known() -> bool:
                page = await _text(visit, "/console/models")
                return "|tuned|" in page and "|loads|" in page

            await eventually(all_are_known, what="the gateway knowing the model and the adapter")
            page = await _text(visit, "/console/models")
            model, _, aliases = page.partition("|Aliases|")
            assert "|loads|" in model
            assert "|loading, about 1 min 30 s|" in model
            assert f"|{MODEL}|open in playground|text|chat|tools|reasoning|ready|" in model
            assert f"|old {HOSTILE}|open in playground|runs {MODEL}|Sunset " in aliases
            assert f"|tuned|open in playground|adapter of {MODEL};|also {MODEL}:tuned|" in aliases
            links = (await visit.get("/console/models")).text
            assert 'href="/console/playground?model=tuned"' in links
            playground = (await visit.get("/console/playground?model=tuned")).text
            assert '<option value="tuned" selected>' in playground
        await Catalogue(redis).remove("loads")


async def test_keys_have_picked_models_and_projects(stack: Stack) -> None:
    owner = await asyncio.to_thread(stack.key, "pickers", scopes=TENANT_SCOPES)
    async with visiting(stack.url, owner) as visit:
        await visit.send("/console/projects/new", name="Shop")
        new = (await visit.get("/console/keys/new")).text
        [project] = re.findall(r'<option value="(prj_\w+)">Shop<', new)
        assert f'name="models" value="{MODEL}">{MODEL}<' in new
        fields = {"name": "picked", "scopes": "completions", "models": [MODEL, "two words"]}
        fields |= {"more_models": "later, other", "project_id": project, "limit_batch_tokens": "7"}
        refused = await visit.send("/console/keys/new", **fields | {"scopes": "none"})
        made = await visit.send("/console/keys/new", **fields)
        [secret] = set(re.findall(r"sk-\w{12}-\w{40}", made.text))
        stack.note_key(secret)
        [path] = re.findall(
            r'href="(/console/keys/key_\w+)">picked', (await visit.get("/console/keys")).text
        )
        page = (await visit.get(path)).text
        for name in (MODEL, "two words", "later", "other"):
            assert f'value="{name}" checked>' in page, name
        # What was typed is kept, and limits that are folded away are shown if they are set.
        assert f'value="{MODEL}" checked>' in refused.text
        assert 'value="later, other"' in refused.text
        assert ("<details open>" in page, "<details open>" in new) == (True, False)
        owned = await _text(visit, path)
        for part in ("|Project|Shop|", "|Last used|never|This month|$0.00 for 0", "|0 of 7|"):
            assert part in owned
    # Only those who may see the usage of other keys see what they spent and how much is used.
    manager = await asyncio.to_thread(stack.key, "pickers", scopes=frozenset({Scope.KEYS}))
    async with visiting(stack.url, manager) as visit:
        managed = await _text(visit, path)
        assert ("|Last used|" in managed, "|0 of 7|" in managed) == (False, False)
        assert "|picked|" in managed


async def _text(visit: Visit, path: str) -> str:
    """Return the text of a page, with exact amounts instead of rounded ones."""
    page = re.sub(r'<data value="([^"]+)"[^>]*>[^<]*', r"|\1", (await visit.get(path)).text)
    page = re.sub(r"<[^>]*>", "|", page).replace("\N{FIGURE SPACE}", "")
    return html.unescape(re.sub(r"[|\s]*\|[|\s]*", "|", page))


async def test_amounts_of_every_page_equal_the_ledger(stack: Stack, operator: Visit) -> None:
    tenant, now = "amounts", utc_now()
    owner = await asyncio.to_thread(stack.key, tenant, scopes=TENANT_SCOPES)
    async with _stores(stack) as (database, redis):
        announcer = ChangeAnnouncer(redis)
        prices, credit = PriceService(database, announcer), CreditService(database, announcer)
        first = await prices.add("billed", prompt_micros=90_000, completion_micros=1_500_000)
        while utc_now() <= first.effective_at:
            await asyncio.sleep(0.001)
        await prices.add("billed", prompt_micros=250_000, completion_micros=1_500_000)
        limits = {LimitName.BUDGET: 100_000_000, LimitName.STORED_BYTES: 2**28}
        tenants = TenantService(database, announcer)
        await tenants.update(tenant, billing=Billing.PREPAID, limits=limits)
        await credit.grant(tenant, 30_000_000, note=HOSTILE)
        await credit.adjust(tenant, -1_234_567, note="mistake")
        own_limits = {LimitName.BUDGET: 20_000_000}
        key = (
            await KeyService(database, announcer).create(tenant, name="shop", limits=own_limits)
        ).record
        counts: dict[str, Any] = {
            "prompt_tokens": 1_000,
            "cached_tokens": 300,
            "credential_id": key.id,
        }
        for tier, micros in ((ServiceTier.DEFAULT, 7_000_001), (ServiceTier.BATCH, 1_234_567)):
            line: dict[str, Any] = {
                "model": "billed",
                "service_tier": tier,
                "completion_tokens": 42,
                "audio_seconds": 61,
            }
            await use(database, tenant, micros, at=now, **counts, **line)
        await use(database, tenant, 999_999, at=month_start(now) - timedelta(days=1), **counts)
        month, last = f"{now:%Y-%m}", f"{month_start(now) - timedelta(days=1):%Y-%m}"
        left, home = "$19.530866", f"/console/tenants/{tenant}"
        lines = ("|$7.000001|", "|$1.234567|", "|$8.234568|", "|1,000|", "|300|", "|42|", "|61|")
        balance = (f"|{left}|", "|$28.765433|", "|$9.234567|")
        async with visiting(stack.url, owner) as visit:

            async def prices_are_known() -> bool:
                return "|$0.125|" in await _text(visit, f"/console/invoices/{month}")

            await eventually(prices_are_known, what="the gateway knowing both prices")
            for path, parts in {
                "/console": (f"|{left}|", "|$8.234568|"),
                "/console/usage?range=month": ("|$8.234568|", "|Seconds of audio|", "|122|"),
                "/console/invoices": ("|$8.234568|CSV|", "|final|$0.999999|CSV|"),
                f"/console/invoices/{month}": (
                    *lines,
                    # Net amount and tax, each in cents.
                    *("|$8.23|", "|$1.56|", "|$9.79|", "|VAT 19 %|", "DE123456789|", "|Pay within"),
                    # The price changed in this month, and a batch pays half of it.
                    *("UTC: $0.09|", "UTC: $0.25|", "UTC: $0.045|", "UTC: $0.125|", "|$0.75|"),
                ),
                f"/console/invoices/{last}": ("|$0.999999|",),
                "/console/credits": (*balance, "|-$1.234567|mistake|", f"|$30.00|{HOSTILE}|"),
                "/console/limits": ("|$8.23 of $100.00|, resets|in ", "|0 B of 256 MiB|"),
                "/console/keys": (
                    f"|shop|sk-{key.prefix}-…|active|$8.234568|of $20.00|{now:%Y-%m-%d %H:%M:%S}|",
                ),
                f"/console/keys/{key.id}": (
                    *("|$8.234568|for 2 requests, 2,084 tokens|", "|$8.23 of $20.00|, resets|in "),
                ),
            }.items():
                page = await _text(visit, path)
                assert [part for part in parts if part not in page] == [], path
            assert "Credits are" not in await _text(visit, "/console/credits")
            await credit.adjust(tenant, -19_529_866, note="mistake")
            for path in ("/console", "/console/credits"):
                page = await _text(visit, path)
                assert "|Credits are low: $0.001 is left, which lasts 1 min " in page, path
        for path, parts in {
            home: ("|$0.001|", "|$9.234567|", "|$8.234568|"),
            f"{home}/invoices": ("|$8.234568|CSV|", "|$0.999999|CSV|"),
            f"{home}/invoices/{month}": lines,
            f"{home}/keys/{key.id}": ("|$8.234568|for 2 requests",),
            f"/console/money?month={month}": ("|amounts|2|0|2,084|122|$8.234568|",),
            f"/console/usage?tenant={tenant}&range=month": ("|$8.234568|",),
        }.items():
            page = await _text(operator, path)
            assert [part for part in parts if part not in page] == [], path
