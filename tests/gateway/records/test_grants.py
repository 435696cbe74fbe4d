"""The rights of a credential are compared with every bound of a key."""

from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest

from gateway.accounts.keys.rules import read_addresses
from gateway.records.errors import PermissionDeniedError
from gateway.records.grants import BOUNDS, Bounds, bounds_of_key, bounds_of_project, bounds_of_role
from gateway.records.limits import LimitName, Limits, LimitScope
from gateway.records.records import KeyRecord, Plan, Project, ProjectStatus
from gateway.records.scopes import ROLE_SCOPES, TENANT_SCOPES, Role, Scope
from tests.gateway.accounts.changes import grant
from tests.support.cases import all_cases, case

NOW = datetime(2026, 12, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)

WITHOUT_RIGHTS = {
    *("id", "tenant_id", "prefix", "digest", "name", "dialect", "created_at", "revoked_at"),
    *("old_prefix", "old_digest", "old_expires_at"),
}
"""Fields of a key without an effect on rights: names, display and history."""


class Example(NamedTuple):
    """A bound of a credential, with examples inside and outside of it."""

    held: Any
    within: Sequence[Any]
    beyond: Sequence[Any]
    param: str


EXAMPLES = {
    "project_id": [Example("prj_1", ["prj_1"], [None, "prj_2"], "project_id")],
    "scopes": [
        Example(
            frozenset({Scope.KEYS, Scope.USAGE}),
            [frozenset(), frozenset({Scope.USAGE}), frozenset({Scope.KEYS, Scope.USAGE})],
            [frozenset({Scope.MEMBERS}), frozenset({Scope.KEYS, Scope.ADMIN})],
            "scopes",
        )
    ],
    "allowed_models": [
        Example(
            frozenset("ab"),
            [frozenset("a"), frozenset("ab")],
            [None, frozenset("c"), frozenset("ac")],
            "allowed_models",
        )
    ],
    "allowed_addresses": [
        Example(
            read_addresses(["10.0.0.0/9", "10.128.0.0/9", "2001:db8::/32"]),
            [
                read_addresses(texts)
                for texts in (["10.0.0.0/8"], ["10.1.2.3"], ["2001:db8:1::/48", "10.200.0.0/16"])
            ],
            [
                None,
                *(
                    read_addresses(texts)
                    for texts in (["11.0.0.1"], ["10.0.0.0/7"], ["10.0.0.1", "::/0"], ["0.0.0.0/0"])
                ),
            ],
            "allowed_addresses",
        )
    ],
    "expires_at": [Example(NOW, [NOW, NOW - SECOND], [None, NOW + SECOND], "expires_at")],
    "limits": [
        Example(
            Limits(**{name.value: 5}),
            [Limits(**{name.value: value}) for value in (0, 5)],
            [Limits(), Limits(**{name.value: 6})],
            f"limits.{name}",
        )
        for name in LimitName
    ],
}


def test_every_field_of_a_key_is_compared_or_gives_no_right() -> None:
    assert {field.name for field in fields(KeyRecord)} == BOUNDS.keys() | WITHOUT_RIGHTS
    assert EXAMPLES.keys() == BOUNDS.keys()


@all_cases(
    ("name", "example"), [(name, example) for name, each in EXAMPLES.items() for example in each]
)
def test_right_beyond_a_bound_is_refused_by_name(name: str, example: Example) -> None:
    holder = grant(**{name: example.held})
    for value in example.within:
        with case(value):
            holder.require({name: value})
            grant().require({name: value})
    for value in example.beyond:
        with case(value):
            with pytest.raises(
                PermissionDeniedError, match=f"'{example.param}' must not"
            ) as caught:
                holder.require({name: value})
            assert caught.value.param == example.param
            with pytest.raises(PermissionDeniedError, match='the key "key_1"') as caught:
                holder.require({name: value}, of='the key "key_1"')
            assert caught.value.param is None


@all_cases(
    ("name", "held"), [(name, example.held) for name, each in EXAMPLES.items() for example in each]
)
def test_every_bound_holds_for_roles_and_its_own_for_projects(name: str, held: Any) -> None:
    """A member has no bounds except the role's scopes."""
    holder = grant(**{name: held})
    with pytest.raises(PermissionDeniedError):
        holder.require(bounds_of_role(Role.OWNER))
    for role in Role:
        grant(scopes=ROLE_SCOPES[role]).require(bounds_of_role(role))
    shop = Project(
        id="prj_1", tenant_id="acme", name="shop", status=ProjectStatus.ACTIVE, created_at=NOW
    )
    if name in ("project_id", "limits"):
        with pytest.raises(PermissionDeniedError):
            holder.require(bounds_of_project(shop, None))
    else:
        holder.require(bounds_of_project(shop, None))


def test_limits_of_the_plan_count_without_own_ones() -> None:
    rpm, tpm = LimitName.REQUESTS_PER_MINUTE, LimitName.TOKENS_PER_MINUTE
    plan = Plan(id="p", name="p", created_at=NOW, limits={scope: {rpm: 5} for scope in LimitScope})
    holder = grant(limits=Limits(requests_per_minute=5))
    holder.require(bounds_of_key(_key(), plan))
    for limits in ({rpm: None}, {rpm: 6}):
        with pytest.raises(PermissionDeniedError, match=r"limits\.requests_per_minute"):
            holder.require(bounds_of_key(_key(limits=limits), plan))
    with pytest.raises(PermissionDeniedError, match=r"limits\.requests_per_minute"):
        holder.require(bounds_of_key(_key(), None))
    # An equal limit of the plan needs no own limit, and follows the plan.
    wide = grant(limits=Limits(requests_per_minute=9, tokens_per_minute=7))
    assert wide.inherit_limits({}, plan.limits[LimitScope.KEY]) == {tpm: 7}
    assert wide.inherit_limits({tpm: 3}, {}) == {rpm: 9, tpm: 3}


def test_operators_bounds_hold_for_operators_keys_only() -> None:
    bounds: Bounds = {
        "scopes": frozenset(Scope),
        "expires_at": NOW,
        "allowed_models": frozenset("a"),
    }
    operator = grant(is_operator=True, **bounds)
    unbound = {"scopes": TENANT_SCOPES, "limits": {}, "name": "x"}
    assert operator.inherit(unbound, {}) == unbound
    operator.require(bounds_of_key(_key(), None))
    for scope in (Scope.ADMIN, Scope.ADMIN_READ):
        of_operator = {"scopes": frozenset({scope}), "name": "x"}
        inherited = operator.inherit(of_operator, {})
        assert (inherited["expires_at"], inherited["allowed_models"]) == (NOW, frozenset("a"))
        with pytest.raises(PermissionDeniedError):
            operator.require(bounds_of_key(_key(scopes=frozenset({scope})), None))


def _key(**fields_: Any) -> KeyRecord:
    known: dict[str, Any] = {
        "id": "key_1",
        "tenant_id": "acme",
        "prefix": "p",
        "digest": b"",
        "name": "x",
        "scopes": frozenset(),
        "allowed_models": None,
        "expires_at": None,
        "revoked_at": None,
        "created_at": NOW,
    }
    return KeyRecord(**known | fields_)
