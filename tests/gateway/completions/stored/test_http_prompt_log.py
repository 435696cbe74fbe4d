"""Prompt logs: what they have of requests, who can read it, and when it is removed."""

import asyncio
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from joserfc import jwe
from joserfc.jwk import ECKey, RSAKey
from redis.asyncio import Redis

from gateway.accounts.prompt_log import PromptLogService
from gateway.accounts.tenants.service import TenantService
from gateway.jobs.prompt_log import remove_expired_logs
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from gateway.records.scopes import Scope
from gateway.records.times import utc_now
from tests.gateway.callers import caller
from tests.gateway.conftest import eventually, serve
from tests.gateway.tenants import all_have_received_changes, change_tenant
from tests.support.cases import all_cases
from tests.support.kinds import every_database
from tests.support.stack import MODEL, Stack

DAYS = 30
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def _pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@cache
def _own() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def _read(content: bytes, key: RSAKey | ECKey) -> Any:
    algorithms = ["RSA-OAEP-256", "ECDH-ES", "A256GCM"]
    read = jwe.decrypt_compact(content, key, algorithms=algorithms)
    return msgspec.json.decode(read.plaintext or b"")


def _log(stack: Stack, tenant: str) -> dict[str, Any]:
    """Return the objects of a tenant's log by name, as the owner of the key reads them."""
    day = (datetime.now(UTC) + timedelta(days=DAYS + 1)).date().isoformat()
    folder = stack.directory / f"logs-{tenant}" / tenant / day
    pem = _own().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key = RSAKey.import_key(pem)
    return {path.name: _read(path.read_bytes(), key) for path in folder.glob("*")}


async def _entry(stack: Stack, tenant: str, request_id: str) -> tuple[Any, Any]:
    """Return the request and the response of an entry, once both are there."""
    names = [f"{request_id}.{name}.jwe" for name in ("request", "response")]
    await eventually(lambda: _log(stack, tenant).keys() >= {*names}, what="the entry")
    log = _log(stack, tenant)
    return log[names[0]], log[names[1]]


@all_cases(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        (
            "/v1/responses",
            {"model": MODEL, "input": "Hi", "max_output_tokens": 4, "background": True},
        ),
        ("/v1/messages", CHAT),
    ],
)
async def test_log_has_each_request_and_what_its_client_received(
    stack: Stack, path: str, body: Mapping[str, Any]
) -> None:
    tenant = f"logged-{secrets.token_hex(4)}"
    async with caller(stack, tenant, Scope.COMPLETIONS, Scope.KEYS) as customer:
        before = await customer.post("/v1/chat/completions", json=CHAT)
        given = {"public_key": _pem(_own()), "days": DAYS}
        assert (await customer.put("/v1/prompt_log", json=given)).json() == {
            "object": "prompt_log",
            "tenant_id": tenant,
            **given,
        }
        await all_have_received_changes(stack)

        response = await customer.post(path, json=body)
        text = response.text.removeprefix("data: ").partition("\n")[0]
        request_id = msgspec.json.decode(text)["id"]
        request, ended = await _entry(stack, tenant, request_id)
        assert request["request"] == body
        assert request["endpoint"] in path.replace("/", ".")
        assert ended["outcome"] == "finished"
        shown = ended["response"]
        if body.get("stream"):
            events = [msgspec.json.decode(each[6:]) for each in response.text.split("\n\n")[:-2]]
            deltas = [each["choices"][0]["delta"].get("content", "") for each in events]
            assert shown["choices"][0]["message"]["content"] == "".join(deltas)
        elif body.get("background"):
            assert shown == (await customer.get(f"{path}/{request_id}")).json()
        else:
            assert shown == response.json()

        unkept = await customer.post(path, json=CHAT, headers={"x-zero-retention": "true"})
        assert (await customer.delete("/v1/prompt_log")).json()["days"] is None
        await all_have_received_changes(stack)
        after = await customer.post("/v1/chat/completions", json=CHAT)
        assert before.status_code == after.status_code == 200, unkept.text
        assert {name.partition(".")[0] for name in _log(stack, tenant)} == {request_id}


async def test_log_has_the_text_of_a_stream_whose_client_has_left(
    stack: Stack, store: Redis
) -> None:
    worker = await serve(store, f"left-{secrets.token_hex(4)}")
    tenant = f"logged-{secrets.token_hex(4)}"
    async with caller(stack, tenant, Scope.COMPLETIONS, Scope.KEYS) as customer:
        await customer.put("/v1/prompt_log", json={"public_key": _pem(_own()), "days": DAYS})
        await all_have_received_changes(stack)
        body = {"model": worker.queue.model, "prompt": "a", "stream": True}

        async def leave() -> None:
            async with customer.stream("POST", "/v1/completions", json=body) as stream:
                async for line in stream.aiter_lines():
                    if "two" in line:
                        return

        leaving = asyncio.create_task(leave())
        claim = await worker.claim_one()
        await worker.say(claim, "one")
        await worker.say(claim, " two")
        await leaving
        request_id = claim.job.id.rpartition("-")[0]
        _, ended = await _entry(stack, tenant, request_id)
    assert ended == {"id": request_id, "outcome": "cancelled", "texts": ["one two"]}


_SHORT = _pem(rsa.generate_private_key(65537, 1024))
_PRIVATE = _own().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


@all_cases(
    ("change", "param", "text"),
    [
        ({"public_key": "none"}, "public_key", "It is no public key"),
        ({"public_key": _SHORT}, "public_key", "It has 1024 bits"),
        ({"public_key": _PRIVATE}, "public_key", "private key"),
        ({"days": 0}, "days", "0"),
        ({"days": 4_000}, "days", "4000"),
    ],
)
async def test_log_needs_a_public_key_and_an_expiry(
    stack: Stack, change: dict[str, Any], param: str, text: str
) -> None:
    async with caller(stack, "acme", Scope.KEYS) as customer:
        given = {"public_key": _pem(_own()), "days": DAYS} | change
        refused = await customer.put("/v1/prompt_log", json=given)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert text in refused.json()["error"]["message"]


async def test_log_of_a_tenant_with_zero_retention_is_refused(stack: Stack) -> None:
    tenant = f"forgetful-{secrets.token_hex(4)}"
    async with caller(stack, tenant, Scope.KEYS) as customer:
        await change_tenant(stack, tenant, zero_retention=True)
        given = {"public_key": _pem(_own()), "days": DAYS}
        refused = await customer.put("/v1/prompt_log", json=given)
    assert refused.status_code == 409, refused.text


async def test_key_of_an_elliptic_curve_encrypts(stack: Stack) -> None:
    tenant, key = f"curve-{secrets.token_hex(4)}", ec.generate_private_key(ec.SECP256R1())
    async with caller(stack, tenant, Scope.COMPLETIONS, Scope.KEYS) as customer:
        await customer.put("/v1/prompt_log", json={"public_key": _pem(key), "days": 1})
        await all_have_received_changes(stack)
        await customer.post("/v1/chat/completions", json=CHAT)
        folder = stack.directory / f"logs-{tenant}" / tenant
        await eventually(lambda: len([*folder.glob("*/*.jwe")]) == 2, what="the entry")
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (path,) = folder.glob("*/*.request.jwe")
    assert _read(path.read_bytes(), ECKey.import_key(pem))["request"] == CHAT


@every_database
async def test_expired_entries_are_removed_although_another_store_fails(
    database: Database, tenants: TenantService, redis: "Redis", tmp_path: Path
) -> None:
    settings = Settings(prompt_log_store=str(tmp_path / "{tenant}"))
    logs = PromptLogService(settings, database, ChangeAnnouncer(redis))
    today = utc_now().date()
    for name in ("acme", "broken", "other"):
        await tenants.create(name, tenant_id=name)
        await logs.set(name, _pem(_own()), DAYS)
        for day in (today - timedelta(days=1), today, today + timedelta(days=1)):
            (tmp_path / name / name / day.isoformat()).mkdir(parents=True)
            (tmp_path / name / name / day.isoformat() / "a.request.jwe").write_bytes(b"a")
    await logs.stop("other")
    broken = tmp_path / "broken"
    broken.rename(tmp_path / "elsewhere")
    broken.write_bytes(b"This is no folder.")

    await remove_expired_logs(settings, database, utc_now())
    for name in ("acme", "other"):
        left = [path.name for path in (tmp_path / name / name).iterdir()]
        assert left == [(today + timedelta(days=1)).isoformat()]
