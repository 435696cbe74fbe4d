"""Every route of the management API with every credential, as in docs/accounts.md."""

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from starlette.routing import Route

from gateway.accounts.keys.rules import read_addresses
from gateway.accounts.members import MemberService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.settings import JwtAlgorithm, Settings
from gateway.records.grants import BOUNDS
from gateway.records.limits import LimitName
from gateway.records.scopes import TENANT_SCOPES, Role, Scope
from gateway.records.times import utc_now
from tests.gateway.conftest import JWT_AUDIENCE, JWT_ISSUER, JWT_SECRET
from tests.gateway.http.test_http_access import token
from tests.gateway.http_calls import message_of
from tests.gateway.management_api import Management, running_management
from tests.support.cases import case
from tests.support.ledger import use
from tests.support.redis_server import RedisServer
from tests.support.secret_box import ENCRYPTION_KEY
from tests.support.stack import REPOSITORY

MANAGEMENT = re.compile(
    r"/v1/(keys|projects|members|spend_limits|organization|webhooks|adapters|invoices|limits|usage"
    r"|audit|prompt_log)\b|/admin/"
)
ROW = re.compile(r"^\| (other )?`(GET )?(/[^`]+)` \| ([^|]+(?:\| [^|]+){6}) \|$", re.MULTILINE)
COLUMNS = ("completions", "usage", "keys", "members", "admin:read", "admin", "project")
YES, NO = "yes", "no"

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/v1/keys"): {"name": "x"},
    ("PATCH", "/v1/keys/{key_id}"): {"name": "y"},
    ("POST", "/v1/projects"): {"name": "x"},
    ("PATCH", "/v1/projects/{project_id}"): {"name": "y"},
    ("PATCH", "/v1/members/{member_id}"): {"role": "billing"},
}
"""Bodies that are checked for rights once they are read. Other bodies are empty: 400."""


class Rule(NamedTuple):
    """A row of the table."""

    is_other: bool
    is_reading: bool
    prefix: str
    cells: dict[str, str]

    def covers(self, method: str, path: str) -> bool:
        """Whether the row covers a route; a row for all other methods follows the one for GET."""
        return path.startswith(self.prefix) and (not self.is_reading or method == "GET")


NAME_IN_PATH = r"\{(\w+)(?::path)?\}"


@dataclass(frozen=True)
class Credential:
    """A credential, and what it may do."""

    bearer: str
    scopes: frozenset[Scope]
    tenant: str = "acme"
    in_project: bool = False


@dataclass
class World:
    """Tenants with resources, and credentials."""

    management: Management
    elsewhere: dict[str, dict[str, str]] = field(default_factory=dict)
    """Resources outside of the project `inside`, by tenant and name of the path parameter."""
    inside: dict[str, str] = field(default_factory=dict)
    credentials: dict[str, Credential] = field(default_factory=dict)

    async def status(self, credential: Credential, route: "Asked", things: dict[str, str]) -> int:
        """Send a request about some resources and return the status."""
        named = {"kind": "completions", **things}
        path = re.sub(NAME_IN_PATH, lambda each: named.get(each[1], "none_0"), route.path)
        body = BODIES.get((route.method, route.path), {})
        is_of_project = route.path.startswith("/v1/usage") and "{" not in route.path
        params = {"project": things["project_id"]} if is_of_project else {}
        if route.path.startswith(("/v1/organization/usage", "/v1/organization/costs")):
            params = {"start_time": "1790000000"}
        response = await self.management.call(
            credential.bearer,
            route.method,
            path,
            None if route.method in ("GET", "DELETE") else body,
            params=params,
        )
        return response.status_code


class Asked(NamedTuple):
    """A route with one of its methods."""

    method: str
    path: str


@pytest.fixture
async def management(
    database_url: str, redis: Redis, redis_server: RedisServer
) -> AsyncIterator[Management]:
    """A gateway that takes tokens, some of them operators'."""
    settings = Settings(
        database_url=SecretStr(database_url),
        redis_url=redis_server.url,
        jwt_algorithms=frozenset({JwtAlgorithm.HS256}),
        jwt_secret=SecretStr(JWT_SECRET),
        jwt_issuer=JWT_ISSUER,
        jwt_audience=JWT_AUDIENCE,
        jwt_operator_claim="groups",
        jwt_operator_value="operators",
        jwt_operator_reader_value="auditors",
        encryption_keys=(SecretStr(ENCRYPTION_KEY),),
    )
    async with running_management(settings) as management:
        services = management.services
        for tenant in ("acme", "solo", "emptied", "ops", "victim"):
            await TenantService(services[Database], services[ChangeAnnouncer]).create(
                tenant, tenant_id=tenant
            )
        yield management


@pytest.fixture
async def world(management: Management) -> World:
    """A resource for each route, and a credential of each kind."""
    world = World(management)
    services = management.services
    operator = await management.key("ops", Scope.ADMIN)
    for tenant in ("acme", "solo", "emptied"):
        world.elsewhere[tenant] = await _things(world, operator, tenant)
    world.elsewhere["ops"] = await _things(world, operator, "victim")
    world.inside = await _things(world, operator, "acme")
    members = MemberService(services[Database], services[ChangeAnnouncer])
    for role in Role:
        await members.add("acme", subject=role, role=role)
    gone = await members.add("emptied", subject="gone", role=Role.VIEWER)
    await members.remove("emptied", gone.id)
    # Without a member its tokens are refused.
    target = await members.add("acme", subject="target", role=Role.VIEWER)
    world.elsewhere["acme"]["member_id"] = world.inside["member_id"] = target.id
    world.credentials = dict(_tokens(world)) | await _keys(world, operator)
    return world


async def _things(world: World, operator: str, tenant: str) -> dict[str, str]:
    async def make(path: str, **body: Any) -> str:
        response = await world.management.call(
            operator, "POST", f"/admin/tenants/{tenant}{path}", body
        )
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    project = await make("/projects", name="shop")
    database = world.management.services[Database]
    await use(database, tenant, 1, project_id=project)
    used = await world.management.call(
        operator, "GET", "/admin/usage/requests", params={"tenant": tenant, "project": project}
    )
    return {
        "tenant_id": "victim",
        "project_id": project,
        "key_id": await make("/keys", name="x", project_id=project),
        "webhook_id": await make("/webhooks", url="https://example.com/hook"),
        "request_id": used.json()["data"][0]["id"],
    }


async def _keys(world: World, operator: str) -> dict[str, Credential]:
    shop = world.inside["project_id"]
    few = {
        "completions": frozenset({Scope.COMPLETIONS}),
        "usage": frozenset({Scope.USAGE}),
        "keys": frozenset({Scope.KEYS, Scope.COMPLETIONS}),
        "members": frozenset({Scope.MEMBERS, Scope.USAGE}),
    }
    key = world.management.key
    return {
        **{name: Credential(await key("acme", *scopes), scopes) for name, scopes in few.items()},
        "project key": Credential(
            await key("acme", *TENANT_SCOPES, project_id=shop), TENANT_SCOPES, in_project=True
        ),
        "operator": Credential(operator, frozenset({Scope.ADMIN}), "ops"),
        "auditor": Credential(
            await key("ops", Scope.ADMIN_READ), frozenset({Scope.ADMIN_READ}), "ops"
        ),
    }


def _tokens(world: World) -> Iterator[tuple[str, Credential]]:
    everything = " ".join(Scope)
    scopes_of_roles = {
        Role.OWNER: TENANT_SCOPES,
        Role.ADMIN: TENANT_SCOPES - {Scope.MEMBERS},
        Role.DEVELOPER: frozenset({Scope.COMPLETIONS}),
        Role.BILLING: frozenset({Scope.USAGE}),
        Role.VIEWER: frozenset({Scope.USAGE}),
    }
    for role, scopes in scopes_of_roles.items():
        yield f"token of {role}", Credential(token(sub=role, scope=everything), scopes)
    shop = world.inside["project_id"]
    yield (
        "token of an owner for a project",
        Credential(token(sub="owner", project=shop), TENANT_SCOPES, in_project=True),
    )
    for tenant in ("solo", "emptied"):
        signed = token(tenant=tenant, scope=everything, groups=["staff"])
        yield f"token of {tenant}", Credential(signed, TENANT_SCOPES, tenant)
    nobody: frozenset[Scope] = frozenset()
    for name, signed, tenant in (
        ("token of a stranger", token(sub="stranger", scope=everything), "acme"),
        ("token for admin", token(tenant="solo", scope="admin admin:read"), "solo"),
    ):
        yield name, Credential(signed, nobody, tenant)
    for group, scope in (("operators", Scope.ADMIN), ("auditors", Scope.ADMIN_READ)):
        signed = token(tenant="ops", scope="", groups=["staff", group])
        yield f"token of {group}", Credential(signed, frozenset({scope}), "ops")


def _rules() -> list[Rule]:
    text = (REPOSITORY / "docs" / "accounts.md").read_text()
    return [
        Rule(bool(other), bool(get), prefix, dict(zip(COLUMNS, cells.split(" | "), strict=True)))
        for other, get, prefix, cells in ROW.findall(text)
    ]


def _routes(management: Management) -> list[Asked]:
    return [
        Asked(method, route.path)
        for app in (management.app, management.operators)
        for route in app.routes
        if isinstance(route, Route) and MANAGEMENT.match(route.path)
        for method in sorted(route.methods or ())
    ]


async def test_every_route_accepts_the_credentials_in_the_table(world: World) -> None:
    rules, routes = _rules(), _routes(world.management)
    assert len(routes) > 60
    used = set()
    for route in routes:
        rule = next(rule for rule in rules if rule.covers(*route))
        used.add(rule.prefix + rule.is_reading * " GET")
        for name, credential in world.credentials.items():
            with case((name, *route)):
                await _check(world, credential, route, rule.cells)
        with case(("nobody", *route)):
            nobody = Credential("", frozenset())
            assert await world.status(nobody, route, world.inside) == 401
    assert len(used) == len(rules), "a row of the table matches no route"


async def _check(world: World, credential: Credential, route: Asked, cells: dict[str, str]) -> None:
    elsewhere = world.elsewhere[credential.tenant]
    if all(cells[scope] == NO for scope in credential.scopes):
        assert await world.status(credential, route, elsewhere) == 403
        return
    place = cells["project"] if credential.in_project else YES
    # A kind of usage is no resource.
    is_about_things = "{" in route.path.replace("{kind}", "") or route.path.startswith("/v1/usage")
    if place == YES:
        status = await world.status(credential, route, elsewhere)
        is_known = all(name in elsewhere for name in re.findall(NAME_IN_PATH, route.path))
        # A tenant or project may have no monthly limit.
        is_known = is_known and not route.path.endswith("/spend_limit")
        sees_all = any(cells[scope] == YES for scope in credential.scopes)
        if route.method == "GET" and is_known and sees_all:
            assert status in (200, 400)
        # An earlier credential may have removed the resource.
        assert status in (200, 400, 404, 409)
        return
    if is_about_things:
        assert await world.status(credential, route, elsewhere) in (403, 404)
    inside = await world.status(credential, route, world.inside)
    assert inside == 403 if place == NO else inside in (200, 400)


UNBOUND: dict[str, Any] = {
    "project_id": None,
    "scopes": ["usage"],
    "allowed_models": None,
    "allowed_addresses": None,
    "expires_at": None,
    "limits": {"requests_per_minute": None},
}


async def test_bounds_of_a_key_hold_on_every_route(management: Management) -> None:
    services = management.services
    shop = await ProjectService(services[Database], services[ChangeAnnouncer]).create(
        "acme", name="shop"
    )
    bounds: dict[str, Any] = {
        "project_id": shop.id,
        "scopes": frozenset({Scope.KEYS, Scope.MEMBERS, Scope.COMPLETIONS}),
        "allowed_models": ["m1"],
        "allowed_addresses": read_addresses(["127.0.0.0/8"]),
        "expires_at": utc_now() + timedelta(hours=1),
        "limits": {LimitName.REQUESTS_PER_MINUTE: 5},
    }
    assert bounds.keys() == UNBOUND.keys() == BOUNDS.keys()
    admin = await management.key("ops", Scope.ADMIN)
    for name, bound in bounds.items():
        options = {"scopes": TENANT_SCOPES, name: bound}
        holder = await management.key("acme", *options.pop("scopes"), **options)
        wide = {"scopes": ["usage"]} if name == "scopes" else {"scopes": ["completions"]}
        target = await management.call(
            admin, "POST", "/admin/tenants/acme/keys", {"name": "wide", **wide}
        )
        path, own = f"/v1/keys/{target.json()['id']}", f"/v1/keys/{holder[3:15]}"
        beyond = {name: UNBOUND[name]}
        requests: list[tuple[str, str, dict[str, Any] | None]] = [
            ("POST", "/v1/keys", {"name": "x", **beyond}),
            ("PATCH", path, {"name": "mine"}),
            ("POST", f"{path}:rotate", {}),
            ("DELETE", path, None),
            ("POST", "/v1/members", {"subject": f"owner by {name}", "role": "owner"}),
        ]
        if name != "project_id":
            requests.append(("PATCH", own, beyond))
        if name in ("project_id", "limits"):
            limits = {"limits": {"requests_per_minute": None}}
            requests.append(("POST", "/v1/projects", {"name": "x", **limits}))
            requests.append(("PATCH", f"/v1/projects/{shop.id}", limits))
            requests.append(("POST", f"/v1/projects/{shop.id}:archive", None))
        for method, where, body in requests:
            with case((name, method, where)):
                response = await management.call(holder, method, where, body)
                hidden = name == "project_id" and where.startswith(path)
                assert response.status_code == (404 if hidden else 403), response.text
        made = await management.call(holder, "POST", "/v1/keys", {"name": "heir"})
        with case((name, "inherited")):
            assert made.status_code == 200, made.text
            inherited = await management.call(admin, "GET", f"/admin/tenants/acme{own[3:]}")
            expected = inherited.json()[name]
            assert made.json()[name] == (["completions"] if name == "scopes" else expected)


async def test_bounded_operator_key_creates_no_unbounded_operator(
    management: Management,
) -> None:
    addresses = read_addresses(["127.0.0.0/8"])
    bound = await management.key("ops", Scope.ADMIN, allowed_addresses=addresses)
    other = await management.key("ops", Scope.ADMIN)
    made = await management.call(
        bound, "POST", "/admin/tenants/acme/keys", {"name": "x", "scopes": ["admin:read"]}
    )
    assert made.json()["allowed_addresses"] == ["127.0.0.0/8"]
    for method, path, body in (
        ("POST", "/keys", {"name": "x", "scopes": ["admin"], "allowed_addresses": None}),
        ("PATCH", f"/keys/{bound[3:15]}", {"allowed_addresses": None}),
        ("PATCH", f"/keys/{other[3:15]}", {"name": "mine"}),
        ("POST", f"/keys/{other[3:15]}:rotate", {}),
    ):
        with case((method, path)):
            response = await management.call(bound, method, f"/admin/tenants/ops{path}", body)
            assert response.status_code == 403, response.text
    of_customer = await management.call(
        bound, "POST", "/admin/tenants/acme/keys", {"name": "x", "scopes": ["keys"]}
    )
    assert of_customer.json()["allowed_addresses"] is None


async def test_usage_is_limited_to_the_scope_of_the_credential(world: World) -> None:
    management, inside = world.management, world.inside["project_id"]
    project = {"project_id": inside}
    keys = {
        "own": await management.key("acme", Scope.COMPLETIONS, **project),
        "project": await management.key("acme", Scope.USAGE, **project),
        "tenant": await management.key("acme", Scope.USAGE),
    }
    for name, scopes in (
        ("own", ["key"]),
        ("project", ["key", "project"]),
        ("tenant", ["key", "tenant"]),
    ):
        shown = await management.call(keys[name], "GET", "/v1/limits")
        assert [each["scope"] for each in shown.json()["scopes"]] == scopes
    rows = {
        name: (await management.call(key, "GET", "/v1/usage/requests")).json()["data"]
        for name, key in keys.items()
    }
    assert rows["own"] == []
    assert {row["project"] for row in rows["project"]} == {inside}
    assert len(rows["tenant"]) == 2 == 2 * len(rows["project"])
    other = {"project": world.elsewhere["acme"]["project_id"]}
    refused = await management.call(keys["project"], "GET", "/v1/usage", params=other)
    message = message_of(
        refused, status=403, kind="permission_error", code="insufficient_scope", param="project"
    )
    assert inside in message


async def test_token_with_text_invalid_in_the_database_is_refused(management: Management) -> None:
    for claims in ({"sub": "a\0"}, {"sub": "\ud800"}, {"tenant": "\0"}, {"project": "\ud800"}):
        with case(claims):
            response = await management.call(token(**claims), "GET", "/v1/limits")
            message_of(response, status=401, kind="authentication_error", code="invalid_api_key")
