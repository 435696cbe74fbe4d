"""Addresses, projects and roles: what narrows a valid credential."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jwt
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from gateway.accounts.keys.rules import read_addresses
from gateway.accounts.keys.service import KeyService
from gateway.accounts.members import MemberService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.auth.authenticator import Authenticator
from gateway.auth.jwt_verifier import TokenClaims
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import PlanRow
from gateway.platform.settings import JwtAlgorithm, Settings
from gateway.records.errors import (
    AccountSuspendedError,
    AddressNotAllowedError,
    AuthenticationError,
    PermissionDeniedError,
)
from gateway.records.limits import LimitName, LimitScope
from gateway.records.principal import Principal
from gateway.records.scopes import DEFAULT_SCOPES, ROLE_SCOPES, TENANT_SCOPES, Role, Scope
from gateway.records.times import utc_now

SECRET = "a secret of thirty-two bytes or more"


@pytest.fixture
def projects(database: Database, redis: Redis, tenants: TenantService) -> ProjectService:
    """The rules of projects."""
    return ProjectService(database, ChangeAnnouncer(redis))


@pytest.fixture
def members(database: Database, redis: Redis, tenants: TenantService) -> MemberService:
    """The rules of members."""
    return MemberService(database, ChangeAnnouncer(redis))


@pytest.fixture
def authenticator(database: Database) -> Authenticator:
    """An authenticator for API keys and tokens with an empty cache."""
    settings = Settings(
        jwt_algorithms=frozenset({JwtAlgorithm.HS256}),
        jwt_secret=SecretStr(SECRET),
        jwt_issuer="issuer",
        jwt_audience="sluice",
        jwt_leeway=timedelta(0),
        jwt_operator_claim="groups",
        jwt_operator_value="ops",
        jwt_role_claim="groups",
        oidc_roles={
            "viewers": {"other": Role.VIEWER},
            "other admins": {"other": Role.ADMIN},
        },
    )
    return Authenticator.from_settings(settings, database)


@pytest.fixture
def add_plan(database: Database) -> Callable[..., Any]:
    """Adds the plan `starter` with limits of its keys."""

    async def add(key: dict[LimitName, int | None]) -> None:
        async with database.writing() as transaction:
            transaction.add(
                PlanRow(
                    id="starter",
                    name="Starter",
                    tenant_limits={},
                    project_limits={},
                    key_limits=key,
                    created_at=utc_now(),
                )
            )

    return add


def _token(**claims: Any) -> str:
    known = {"iss": "issuer", "aud": "sluice", "exp": int(time.time()) + 60, "tenant": "acme"}
    signed = jwt.encode(known | {"sub": "ada"} | claims, SECRET, algorithm="HS256")
    return f"Bearer {signed}"


ADDRESSES: list[tuple[list[str], str | None, bool]] = [
    (["10.0.0.0/8"], "10.255.0.1", True),
    (["10.0.0.0/8"], "::ffff:10.255.0.1", True),
    (["10.0.0.0/8"], "11.0.0.1", False),
    (["10.0.0.0/8"], "::ffff:11.0.0.1", False),
    (["10.0.0.0/8"], "::10.0.0.1", False),
    (["::ffff:10.0.0.0/104"], "10.0.0.1", True),
    (["2001:db8::/32"], "2001:db8:1::5", True),
    (["2001:db8::/32"], "2001:DB8:0:0:0:0:0:1", True),
    (["2001:db8::/32"], "2001:db9::1", False),
    (["2001:db8::/32"], "10.0.0.1", False),
    (["::/0"], "2001:db8::1", True),
    (["::/0"], "10.0.0.1", False),
    (["::/0"], "::ffff:10.0.0.1", False),
    (["192.0.2.1", "10.0.0.0/8"], "192.0.2.1", True),
    (["192.0.2.1"], "192.0.2.2", False),
    (["0.0.0.0/0"], "", False),
    (["0.0.0.0/0"], None, False),
    (["0.0.0.0/0"], "unix", False),
    (["0.0.0.0/0"], "10.0.0.1, 10.0.0.2", False),
]


async def test_key_is_only_for_its_addresses(
    authenticator: Authenticator, keys: KeyService
) -> None:
    for networks, address, is_allowed in ADDRESSES:
        created = await keys.create("acme", name="x", allowed_addresses=read_addresses(networks))
        bearer = f"Bearer {created.key.reveal()}"
        # The second time the key comes from the cache.
        for _ in range(2):
            try:
                principal = await authenticator.authenticate(bearer, address=address)
            except AddressNotAllowedError:
                assert not is_allowed, (networks, address)
            else:
                assert is_allowed, (networks, address)
                assert principal.credential_id == created.record.id


async def test_archived_project_ends_its_keys_and_tokens_until_it_is_activated(
    authenticator: Authenticator, keys: KeyService, projects: ProjectService
) -> None:
    project = await projects.create("acme", name="shop")
    inside = (await keys.create("acme", name="in", project_id=project.id)).key.reveal()
    outside = (await keys.create("acme", name="out")).key.reveal()
    bearers = [f"Bearer {inside}", _token(project=project.id)]
    for bearer in bearers:
        assert (await authenticator.authenticate(bearer)).project_id == project.id
    await projects.archive("acme", project.id)
    authenticator.drop_tenant("acme")
    for bearer in bearers:
        with pytest.raises(AccountSuspendedError, match=f"The project '{project.id}' is archived"):
            await authenticator.authenticate(bearer)
    assert (await authenticator.authenticate(f"Bearer {outside}")).project_id is None
    await projects.activate("acme", project.id)
    authenticator.drop_tenant("acme")
    for bearer in bearers:
        await authenticator.authenticate(bearer)


async def test_token_for_anothers_project_is_refused(
    authenticator: Authenticator, projects: ProjectService
) -> None:
    others = await projects.create("other", name="others")
    for project in (others.id, "prj_none"):
        with pytest.raises(AuthenticationError, match="project does not exist"):
            await authenticator.authenticate(_token(project=project))


@pytest.mark.parametrize("role", Role)
async def test_member_has_the_scopes_of_the_role_or_fewer_in_the_token(
    authenticator: Authenticator, members: MemberService, role: Role
) -> None:
    await members.add("acme", subject="ada", role=role)
    granted = ROLE_SCOPES[role]
    assert (await authenticator.authenticate(_token())).scopes == granted
    for scope in Scope:
        principal = await authenticator.authenticate(_token(scope=f"openid {scope}"))
        assert principal.scopes == granted & {scope}
    everything = await authenticator.authenticate(_token(scope=" ".join(Scope)))
    assert everything.scopes == granted <= TENANT_SCOPES


async def test_changed_and_removed_roles_apply_once_the_change_is_received(
    authenticator: Authenticator, members: MemberService
) -> None:
    assert (await authenticator.authenticate(_token())).scopes == DEFAULT_SCOPES
    await members.add("acme", subject="ada", role=Role.ADMIN)
    await members.add("other", subject="ada", role=Role.OWNER)
    authenticator.drop_tenant("acme")
    assert Scope.KEYS in (await authenticator.authenticate(_token())).scopes
    await members.set_role("acme", "ada", role=Role.VIEWER)
    authenticator.drop_tenant("acme")
    assert (await authenticator.authenticate(_token())).scopes == {Scope.USAGE}
    await members.remove("acme", "ada")
    authenticator.drop_tenant("acme")
    assert (await authenticator.authenticate(_token())).scopes == DEFAULT_SCOPES
    # Without members the issuer's scopes count again, but never those of operators.
    everything = _token(scope=" ".join(Scope))
    assert (await authenticator.authenticate(everything)).scopes == TENANT_SCOPES


async def test_operators_token_has_its_rights_and_those_of_the_role(
    authenticator: Authenticator, members: MemberService
) -> None:
    modest = _token(groups=["ops"], scope="completions")
    operator = await authenticator.authenticate(modest)
    assert operator.scopes == {Scope.COMPLETIONS, Scope.ADMIN}
    await members.add("acme", subject="ada", role=Role.VIEWER)
    authenticator.drop_tenant("acme")
    assert (await authenticator.authenticate(modest)).scopes == {Scope.ADMIN}
    assert (await authenticator.authenticate(_token(groups=["ops"]))).scopes == {
        Scope.USAGE,
        Scope.ADMIN,
    }
    with pytest.raises(PermissionDeniedError, match="not a member"):
        await authenticator.authenticate(_token(groups=["ops"], sub="stranger"))


async def test_tenant_with_members_accepts_only_their_tokens(
    authenticator: Authenticator, members: MemberService
) -> None:
    await members.add("acme", subject="owner", role=Role.OWNER)
    await members.add("acme", subject="ada", role=Role.VIEWER)
    assert (await authenticator.authenticate(_token())).scopes == {Scope.USAGE}
    await members.remove("acme", "ada")
    authenticator.drop_tenant("acme")
    for scope in ("completions", "admin", "openid"):
        with pytest.raises(PermissionDeniedError, match="not a member"):
            await authenticator.authenticate(_token(scope=scope))
    assert Scope.MEMBERS in (await authenticator.authenticate(_token(sub="owner"))).scopes


async def test_groups_of_a_token_give_a_role_in_the_tenants_that_they_name(
    authenticator: Authenticator, members: MemberService
) -> None:
    async def scopes(**claims: Any) -> frozenset[Scope]:
        token = _token(tenant="other", **claims)
        return (await authenticator.authenticate(token)).scopes

    with pytest.raises(PermissionDeniedError, match='"groups" has no group with a role there'):
        await scopes(groups=["staff"])
    assert await scopes(groups="other admins") == ROLE_SCOPES[Role.ADMIN]
    assert await scopes(groups=["viewers", "other admins", "x"]) == ROLE_SCOPES[Role.ADMIN]
    assert await scopes(groups=["viewers"], scope="keys usage") == {Scope.USAGE}
    # Of a member, too, as in the console.
    await members.add("other", subject="ada", role=Role.OWNER)
    authenticator.drop_tenant("other")
    assert await scopes() == ROLE_SCOPES[Role.OWNER]
    assert await scopes(groups=["viewers", "ops"]) == {Scope.USAGE, Scope.ADMIN}
    for groups in (None, 1, {"viewers": True}, ["viewers", 1]):
        with pytest.raises(AuthenticationError, match='"groups" must be a string or a list of'):
            await scopes(groups=groups)
    # Batches run after their tokens, whose groups nobody stores.
    claims: dict[str, Any] = dict.fromkeys(("allowed_models", "dialect", "project_id", "role"))
    claims |= {"scopes": TENANT_SCOPES, "operator_scopes": frozenset(), "names_scopes": True}
    for subject, tenant, role in (
        ("ada", "other", Role.OWNER),
        ("bob", "other", Role.DEVELOPER),
        ("bob", "acme", Role.OWNER),
    ):
        task = TokenClaims(tenant_id=tenant, subject=subject, **claims)
        assert (await authenticator.principal_of_task(task)).scopes == ROLE_SCOPES[role]
    # The account acme is in no group.
    assert (await authenticator.authenticate(_token(groups=["viewers"]))).scopes == DEFAULT_SCOPES


async def test_own_limits_precede_those_of_the_plans(
    authenticator: Authenticator,
    database: Database,
    tenants: TenantService,
    projects: ProjectService,
    keys: KeyService,
    add_plan: Callable[..., Any],
) -> None:
    await add_plan(key={LimitName.REQUESTS_PER_MINUTE: 7, LimitName.BUDGET: 8})
    await tenants.update("acme", plan_id="starter", limits={LimitName.TOKENS_PER_DAY: 5})
    project = await projects.create("acme", name="x", limits={LimitName.REQUESTS_PER_DAY: 3})
    created = await keys.create(
        "acme", name="x", project_id=project.id, limits={LimitName.BUDGET: None}
    )
    principal = await authenticator.authenticate(f"Bearer {created.key.reveal()}")
    assert [(each.scope, each.id) for each in principal.limits] == [
        (LimitScope.KEY, created.record.id),
        (LimitScope.PROJECT, project.id),
        (LimitScope.TENANT, "acme"),
    ]
    key, own_project, tenant = (each.limits for each in principal.limits)
    assert (key.requests_per_minute, key.budget_micros) == (7, None)
    assert (own_project.requests_per_day, own_project.requests_per_minute) == (3, None)
    assert (tenant.tokens_per_day, tenant.requests_per_minute) == (5, None)


async def test_end_of_a_secret_bounds_its_credential(
    authenticator: Authenticator, keys: KeyService
) -> None:
    created = await keys.create("acme", name="x", scopes={Scope.KEYS})
    rotated = await keys.rotate("acme", created.record.id, grace=timedelta(hours=1))
    bearers = [f"Bearer {each.key.reveal()}" for each in (created, rotated)]
    old, new = [await authenticator.authenticate(bearer) for bearer in bearers]
    assert (old.expires_at, new.expires_at) == (rotated.record.old_expires_at, None)
    # Else a leaked secret would outlive its grace.
    with pytest.raises(PermissionDeniedError, match="former secret"):
        await keys.rotate("acme", created.record.id, grantor=old.grant)
    made = (await keys.create("acme", name="y", scopes={Scope.KEYS}, grantor=old.grant)).record
    assert made.expires_at == old.expires_at
    await keys.rotate("acme", created.record.id, grantor=new.grant)


def test_principal_has_the_name_for_the_audit_log() -> None:
    def actor(credential_id: str) -> str:
        principal = Principal(
            tenant_id="acme",
            tenant_weight=1.0,
            credential_id=credential_id,
            scopes=DEFAULT_SCOPES,
            allowed_models=None,
        )
        return principal.actor

    assert [actor("key_1"), actor("jwt:ada")] == ["key:key_1", "jwt:ada"]
