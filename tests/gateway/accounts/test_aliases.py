"""Aliases of models: how they divide callers, and what operators may define."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.accounts.aliases import MAX_FALLBACKS, MAX_MODELS, AliasService
from gateway.accounts.audit.log import AuditLog
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.records.aliases import MAX_WEIGHT, Alias, Sticky
from gateway.records.errors import InvalidParameterError, NotFoundError
from gateway.records.times import EPOCH, utc_now
from tests.support.cases import all_cases
from tests.support.kinds import every_database

TENANTS = [f"tenant-{number}" for number in range(4000)]
ALIAS = Alias(
    name="chat",
    weights={"a": 80, "b": 15, "c": 5, "off": 0},
    sticky=Sticky.TENANT,
    fallback="a",
    sunset_at=None,
    deprecated_at=None,
    replacement="a",
    created_at=EPOCH,
)


@pytest.fixture
def aliases(database: Database, redis: Redis) -> AliasService:
    return AliasService(database, ChangeAnnouncer(redis))


def test_callers_are_divided_by_weight_and_stay() -> None:
    found = Counter(ALIAS.choose(tenant, "u") for tenant in TENANTS)
    # Five standard deviations.
    for model, share in (("a", 0.8), ("b", 0.15), ("c", 0.05)):
        deviation = (len(TENANTS) * share * (1 - share)) ** 0.5
        assert abs(found[model] - len(TENANTS) * share) < 5 * deviation, found
    assert found["off"] == 0
    # Another release must not move callers.
    assert (
        "".join(ALIAS.choose(tenant, "") for tenant in TENANTS[:24]) == "abaaaaacaaaabbaabababaaa"
    )


def test_changed_weight_moves_callers_only_to_its_model() -> None:
    grown = replace(ALIAS, weights={**ALIAS.weights, "c": 25})
    moved = Counter(
        (ALIAS.choose(tenant, ""), grown.choose(tenant, ""))
        for tenant in TENANTS
        if ALIAS.choose(tenant, "") != grown.choose(tenant, "")
    )
    assert {model for _, model in moved} == {"c"}
    # From 5 of 100 to 25 of 120.
    assert 0.12 < moved.total() / len(TENANTS) < 0.2


def test_user_decides_only_if_the_alias_is_sticky_by_user() -> None:
    users = [f"user {number}" for number in range(100)]
    assert len({ALIAS.choose("acme", user) for user in users}) == 1
    by_user = replace(ALIAS, sticky=Sticky.USER)
    assert len({by_user.choose("acme", user) for user in users}) == 3
    assert by_user.choose("acme", "\ud800") in ALIAS.weights
    # 5 % of the smaller share.
    by_user = replace(by_user, weights={"a": 90, "b": 10})
    found = Counter(by_user.choose("acme", f"user {number}") for number in range(10_000))
    assert found["b"] == pytest.approx(1_000, rel=0.05)


@every_database
async def test_alias_is_defined_replaced_audited_and_removed(
    aliases: AliasService, database: Database
) -> None:
    soon = utc_now() + timedelta(days=1)
    first = await aliases.put("b/c", weights={"z": 1, "y": 2}, actor="key:k")
    assert (first.replacement, first.deprecated_at) == ("y", None)
    assert list((await aliases.get("b/c")).weights.items()) == [("z", 1), ("y", 2)]
    dated = await aliases.put("b/c", weights={"z": 1}, sunset_at=soon)
    assert dated.deprecated_at is not None
    later = await aliases.put("b/c", weights={"z": 2}, sunset_at=soon + timedelta(days=1))
    assert (later.deprecated_at, later.created_at) == (dated.deprecated_at, first.created_at)
    assert (await aliases.put("b/c", weights={"z": 2})).deprecated_at is None
    listed = await aliases.put("a", weights={"b/c": 1}, fallback="z", fallbacks=["y", "b/c"])
    assert (await aliases.get("a")).order("acme", "") == ["b/c", "z", "y"]
    assert listed.models == ["b/c", "z", "y"]
    await aliases.put("a", weights={"b/c": 1}, sticky=Sticky.USER, fallback="z")
    assert [alias.name for alias in await aliases.list_all()] == ["a", "b/c"]
    await aliases.remove("a", actor="key:k")
    with pytest.raises(NotFoundError):
        await aliases.remove("a")
    async with database.reading() as transaction:
        entries = await AuditLog(transaction).entries()
    found = {(entry.action, entry.subject, entry.actor) for entry in entries}
    assert {("alias.set", "b/c", "key:k"), ("alias.remove", "a", "key:k")} <= found


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "default"}, "name"),
    ({"weights": {}}, "weights"),
    ({"weights": {f"m{number}": 1 for number in range(MAX_MODELS + 1)}}, "weights"),
    ({"weights": {"m": MAX_WEIGHT + 1}}, "weights"),
    ({"weights": {"m": -1}}, "weights"),
    ({"weights": {"m": 0}}, "weights"),
    ({"weights": {"m\n": 1}}, "weights"),
    ({"fallback": ""}, "fallback"),
    ({"fallbacks": ["m", ""]}, "fallbacks[1]"),
    ({"fallbacks": ["m"] * (MAX_FALLBACKS + 1)}, "fallbacks"),
    ({"replacement": "\0"}, "replacement"),
]


@all_cases(("changes", "param"), BAD)
async def test_bad_alias_is_refused_by_parameter(
    aliases: AliasService, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await aliases.put(**({"name": "n", "weights": {"m": 1}} | changes))
    assert caught.value.param == param
