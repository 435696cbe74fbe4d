"""Operators list what runs and waits now, and cancel it, whichever gateway owns it."""

import asyncio
from typing import Any

import httpx
from click.testing import CliRunner
from redis.asyncio import Redis

from gateway.cli.main import main
from gateway.records.scopes import Scope
from tests.gateway.conftest import asking, complete, eventually, gateway_client, nothing_left
from tests.support.cases import all_cases
from tests.support.stack import MODEL, Stack

TENANT = "live"
PATH = f"/admin/tenants/{TENANT}/live-requests"


@all_cases("asked", [{"n": 2}, {"stream": True}], ids=["plain", "stream"])
async def test_operator_cancels_a_request_of_another_gateway(
    stack: Stack, store: "Redis", asked: dict[str, Any]
) -> None:
    key = await asyncio.to_thread(stack.key, TENANT)
    staff = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN}))
    async with (
        gateway_client(stack.gateways[0], key) as client,
        gateway_client(stack.operators_of(stack.gateways[1]), staff) as operator,
    ):
        body = asking(max_tokens=1900, **asked)
        request = client.build_request("POST", "/v1/completions", json=body)
        running = asyncio.create_task(client.send(request, stream=True))
        if "stream" in asked:
            # A stream begins with its first token. Before that, an error has its own status.
            await running

        async def runs() -> bool:
            found = (await operator.get(PATH)).json()["data"]
            return bool(found) and found[0]["state"] == "running"

        await eventually(runs, what="a live request")
        [live] = (await operator.get(PATH)).json()["data"]
        assert (live["state"], live["tenant"], live["model"]) == ("running", TENANT, MODEL)
        assert (live["stream"], len(live["workers"])) == ("stream" in asked, 1)
        path = f"{PATH}/{live['id']}:cancel"
        assert (await operator.post(path.replace(TENANT, "acme"))).status_code == 404
        if "stream" in asked:
            await _cancel_by_command(stack, live["id"])
        else:
            cancelled = await operator.post(path)
            assert cancelled.json() == {
                "object": "live_request.cancelled",
                "id": live["id"],
                "has_ended": True,
            }
        response = await running
        assert b"request_cancelled" in await response.aread()
        assert response.status_code == (200 if "stream" in asked else 409)
        await eventually(lambda: nothing_left(store, MODEL), what="the end of the work")
        assert (await operator.get(PATH)).json()["data"] == []
        assert (await operator.post(path)).status_code == 404
        query = {"tenant": TENANT, "action": "request.cancel"}
        [entry, *_] = (await operator.get("/admin/audit", params=query)).json()["data"]
        actor = entry["actor"].partition(":")[0]
        assert (entry["subject"], actor) == (
            *(live["id"],),
            "cli" if "stream" in asked else "operator",
        )


async def _cancel_by_command(stack: Stack, request_id: str) -> None:
    environment = {name: value for name, value in stack.environment.items() if "SLUICE" in name}
    runner = CliRunner(env=environment)
    listed = await asyncio.to_thread(runner.invoke, main, ["requests", "list", "--tenant", TENANT])
    assert request_id in listed.output
    cancelled = await asyncio.to_thread(
        runner.invoke, main, ["requests", "cancel", "--tenant", TENANT, request_id]
    )
    assert cancelled.output == f"{request_id} is cancelled.\n"


async def test_live_requests_are_listed_in_pages(stack: Stack, store: "Redis") -> None:
    key = await asyncio.to_thread(stack.key, TENANT)
    staff = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN}))
    async with (
        gateway_client(stack.url, key) as client,
        gateway_client(stack.operators, staff) as operator,
    ):
        running = [asyncio.create_task(complete(client, max_tokens=1900)) for _ in range(5)]

        async def are_live() -> bool:
            return bool((await operator.get(PATH)).json()["total"] == 5)

        await eventually(are_live, what="five live requests")
        seen, query = list[dict[str, Any]](), {"limit": "2"}
        while True:
            page = (await operator.get(PATH, params=query)).json()
            seen += page["data"]
            if not page["has_more"]:
                break
            query["after"] = page["next"]
        assert len({each["id"] for each in seen}) == 5
        assert [each["created_at"] for each in seen] == sorted(each["created_at"] for each in seen)
        for after in ("x", "bnVsbA"):
            refused = await operator.get(PATH, params={"after": after})
            assert (refused.status_code, "'after'" in refused.text) == (400, True)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await eventually(lambda: nothing_left(store, MODEL), what="the end of the work")


async def test_live_requests_of_an_unknown_tenant_are_not_found(stack: Stack) -> None:
    staff = await asyncio.to_thread(stack.key, "staff", scopes=frozenset({Scope.ADMIN}))
    async with gateway_client(stack.operators, staff) as operator:
        response: httpx.Response = await operator.get("/admin/tenants/nobody/live-requests")
        assert response.status_code == 404
