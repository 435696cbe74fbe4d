"""Unpaid requests are limited for each key, and wrong credentials for each address."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from gateway.accounts.tenants.service import TenantService
from gateway.http import allowances
from gateway.http.allowances import (
    BYTES_OF_USE,
    Allowance,
    FailedLogins,
    UnpaidRequests,
    network_of,
)
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from gateway.records.errors import TooManyUnpaidError
from gateway.records.limits import LimitName
from gateway.records.scopes import Scope
from tests.gateway.conftest import serve
from tests.gateway.http_calls import message_of
from tests.gateway.management_api import Management, running_management
from tests.support.cases import all_cases
from tests.support.redis_server import RedisServer

UNPAID = 4
LOGINS = 3
MODEL = "unpaid"
MOST_BYTES = (UNPAID + 1) * BYTES_OF_USE


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def allowance(clock: Clock, per_minute: int = 6) -> Allowance:
    """Return an allowance of one in ten seconds."""
    return Allowance(per_minute=per_minute, code="tries", what="Tries", monotonic=clock)


def test_allowance_of_a_minute_refills_gradually() -> None:
    clock = Clock()
    some = allowance(clock)
    for _ in range(6):
        some.require("a")
        some.use("a")
    with pytest.raises(TooManyUnpaidError, match="Tries are limited to 6 per minute") as caught:
        some.require("a")
    assert (caught.value.code, caught.value.retry_after_seconds) == ("tries", 10.0)
    some.require("b")
    clock.now += 9.9
    assert not some.is_left("a")
    clock.now += 0.1
    some.require("a")
    some.use("a")
    assert not some.is_left("a")
    # What exceeded the limit at once is a debt.
    some.use("a", 12)
    with pytest.raises(TooManyUnpaidError) as caught:
        some.require("a")
    assert caught.value.retry_after_seconds == pytest.approx(130.0)
    # The allowance is at most a minute's, however long it was idle.
    clock.now += 3600.0
    for _ in range(6):
        some.use("a")
    assert not some.is_left("a")


def test_paid_use_raises_the_allowance() -> None:
    some = allowance(Clock())
    for _ in range(6):
        some.use("a")
    some.use("a", -1)
    assert some.is_left("a")
    for _ in range(20):
        some.use("a", -1)
    for _ in range(6):
        some.use("a")
    assert not some.is_left("a")


def test_allowance_may_be_unlimited_and_its_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    unbounded = allowance(clock, per_minute=0)
    for _ in range(1000):
        unbounded.use("a")
    assert unbounded.is_left("a")
    monkeypatch.setattr(allowances, "MAX_CALLERS", 2)
    few = allowance(clock, per_minute=1)
    for caller in ("a", "b", "c"):
        few.use(caller)
    assert [few.is_left(caller) for caller in ("a", "b", "c")] == [True, False, False]


@all_cases(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_addresses_of_one_client_count_together(address: str, network: str) -> None:
    assert network_of(address) == network


@pytest.fixture
async def gateway(
    copy_sqlite: Callable[[Path], str], redis: "Redis", redis_server: RedisServer, tmp_path: Path
) -> AsyncIterator[Management]:
    """A gateway that allows little."""
    settings = Settings(
        database_url=SecretStr(copy_sqlite(tmp_path / "sluice.db")),
        redis_url=redis_server.url,
        unpaid_requests_per_minute=UNPAID,
        failed_logins_per_minute=LOGINS,
        max_body_bytes=MOST_BYTES,
    )
    async with running_management(settings) as gateway:
        clock = Clock()
        gateway.services[UnpaidRequests].monotonic = clock
        gateway.services[FailedLogins].monotonic = clock
        tenants = TenantService(gateway.services[Database], gateway.services[ChangeAnnouncer])
        await tenants.create("acme", tenant_id="acme")
        await serve(redis, MODEL)
        yield gateway


ASK = {"model": MODEL, "prompt": "a"}


@all_cases(
    ("path", "body", "status"),
    [
        ("/v1/completions", ASK | {"n": 0}, 400),
        ("/v1/completions", ASK | {"model": "none"}, 404),
        ("/v1/completions:estimate", ASK, 200),
        ("/tokenize", ASK, 200),
        ("/detokenize", {"model": MODEL, "tokens": [5]}, 200),
        ("/v1/completions/cmpl-" + "a" * 26, None, 404),
    ],
)
async def test_unpaid_requests_are_limited_for_each_key(
    gateway: Management, path: str, body: dict[str, object] | None, status: int
) -> None:
    key = await gateway.key("acme", Scope.COMPLETIONS)
    method = "GET" if body is None else "POST"
    for _ in range(UNPAID):
        assert (await gateway.call(key, method, path, body)).status_code == status
    refused = await gateway.call(key, method, path, body)
    message_of(refused, status=429, kind="rate_limit_error", code="unpaid_requests")
    assert int(refused.headers["retry-after"]) == 60 / UNPAID
    other = await gateway.key("acme", Scope.COMPLETIONS)
    assert (await gateway.call(other, method, path, body)).status_code == status


@all_cases(
    ("path", "body", "status"),
    [
        ("/v1/completions", ASK | {"n": 0}, 400),
        ("/v1/completions", ASK, 429),
        ("/v1/completions", ASK | {"prompt": "a" * MOST_BYTES}, 413),
        ("/v1/completions:estimate", ASK, 200),
    ],
)
async def test_bytes_of_a_large_body_count_unless_it_is_paid(
    gateway: Management, path: str, body: dict[str, object], status: int
) -> None:
    key = await gateway.key("acme", Scope.COMPLETIONS, limits={LimitName.TOKENS_PER_MINUTE: 1})
    content = json.dumps(body).encode()
    content += b" " * (UNPAID * BYTES_OF_USE - len(content))

    async def parts() -> AsyncIterator[bytes]:
        for begin in range(0, len(content), 4096):
            yield content[begin : begin + 4096]

    assert (await gateway.call(key, "POST", path, content=parts())).status_code == status
    refused = await gateway.call(key, "POST", path, ASK)
    message_of(refused, status=429, kind="rate_limit_error", code="unpaid_requests")


async def test_bytes_of_an_estimate_that_fails_count_once(gateway: Management) -> None:
    key = await gateway.key("acme", Scope.COMPLETIONS)
    path, content = "/v1/completions:estimate", json.dumps(ASK | {"n": 0}).encode()
    content += b" " * (UNPAID // 2 * BYTES_OF_USE - len(content))
    assert (await gateway.call(key, "POST", path, content=content)).status_code == 400
    assert (await gateway.call(key, "POST", path, ASK)).status_code == 200


async def test_bytes_of_a_body_count_although_its_client_leaves(gateway: Management) -> None:
    key = await gateway.key("acme", Scope.COMPLETIONS)
    body = b" " * UNPAID * BYTES_OF_USE
    received: list[dict[str, Any]] = [
        {"type": "http.request", "body": body, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return received.pop(0)

    async def send(_: object) -> None:
        """Nobody reads."""

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {key}".encode())],
        "client": ("127.0.0.1", 1),
    }
    await gateway.app(scope, receive, send)
    refused = await gateway.call(key, "POST", "/v1/completions", ASK)
    message_of(refused, status=429, kind="rate_limit_error", code="unpaid_requests")


async def test_wrong_credentials_are_limited_for_each_address_but_known_keys_are_served(
    gateway: Management,
) -> None:
    known, unknown = [await gateway.key("acme", Scope.COMPLETIONS) for _ in range(2)]
    assert (await gateway.call(known, "GET", "/v1/models")).status_code == 200
    for _ in range(LOGINS):
        assert (await gateway.call("sk-wrong", "GET", "/v1/models")).status_code == 401
    for key in ("sk-wrong", unknown):
        refused = await gateway.call(key, "GET", "/v1/models")
        message_of(refused, status=429, kind="rate_limit_error", code="failed_logins")
    assert (await gateway.call(known, "GET", "/v1/models")).status_code == 200
