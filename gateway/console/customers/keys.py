"""Keys: list, create, change, rotate and revoke."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Depends, Response

from gateway.accounts.keys.routes import KeyChange, KeyCreation, KeyId, KeyRotation, Keys
from gateway.accounts.keys.rules import MadeKeys
from gateway.accounts.keys.service import CreatedKey
from gateway.accounts.limits import LimitReports
from gateway.accounts.projects.service import ProjectService
from gateway.billing.usage.parts import NOTHING, UsageFilter, UsageSums
from gateway.billing.usage.periods import Span
from gateway.billing.usage.routes import own_usage
from gateway.billing.usage.service import UsageService
from gateway.console.customers.account import first_chat
from gateway.console.formats import shortened, until
from gateway.console.forms import Form, checked, number
from gateway.console.limit_fields import fields_of, limit_group, read_limits
from gateway.console.lists import Newest
from gateway.console.routing import FORM, TenantRoute, base_url, needs, redirect
from gateway.console.tables import Action, Cell, Column, Field, pairs
from gateway.console.usage import MOST_OPTIONS, options_of
from gateway.console.visitor import Visitor
from gateway.http.services import AllServices, Services
from gateway.models.alias_and_adapter_caches import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue
from gateway.platform.database.paging import PageRequest
from gateway.platform.settings import Settings
from gateway.records.limits import Limits, LimitScope
from gateway.records.records import KeyRecord
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import month_start, utc_now

GRACES: Final = (
    ("0", "none: it ends at once"),
    ("3600", "1 hour"),
    ("86400", "1 day"),
    ("604800", "7 days"),
)
_TIME: Final = "%Y-%m-%dT%H:%M:%S"
GRACE: Final = Field(
    "grace_seconds", "How long the current secret remains valid", options=GRACES, default="86400"
)
NOTICES: Final = {
    "changed": "The key is changed on all gateways within a second.",
    "revoked": "The key is revoked. All gateways reject it within a second.",
}

router = APIRouter(route_class=TenantRoute, prefix="/keys", include_in_schema=False)

Manager = Annotated[Visitor, Depends(needs(Scope.KEYS))]


@router.get("")
async def list_keys(visitor: Manager, keys: Keys, wanted: Newest) -> Response:
    """List keys, newest first."""
    found = await keys.page(visitor.tenant_id, wanted, grantor=visitor.caller.grant)
    limits = await visitor.make(LimitReports).of_keys(visitor.tenant_id, found.entries)
    return visitor.list_page(
        "Keys",
        _columns(
            visitor,
            await _use_of(visitor, found.entries),
            limits=dict(zip((each.id for each in found.entries), limits, strict=True)),
            projects=dict(await _projects(visitor) or ()),
        ),
        found,
        "There is no key yet.",
        action=Action("Create a key", f"{visitor.home}/keys/new"),
        notices=NOTICES,
    )


@router.api_route("/new", methods=FORM)
async def create(visitor: Manager, services: AllServices, keys: Keys) -> Response:
    """Create a key and show it, once."""
    if not visitor.form.is_sent:
        return await _key_form(visitor, services, {"scopes": [Scope.COMPLETIONS], "models": []})
    body = checked(KeyCreation, _values(visitor.form, is_new=True))
    created = await keys.create(visitor.tenant_id, **body.options(), **visitor.caller.key_by)
    return secret_page(visitor, services, created)


@router.api_route("/{key_id}", methods=FORM)
async def change(visitor: Manager, services: AllServices, keys: Keys, key_id: KeyId) -> Response:
    """Show a key, and change its bounds and limits."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    if not visitor.form.is_sent:
        return await _key_form(visitor, services, _fields(key), key)
    options = _changed(key, checked(KeyChange, _values(visitor.form, is_new=False)).options())
    await keys.update(visitor.tenant_id, key.id, **options, **visitor.caller.key_by)
    return redirect(f"{visitor.home}/keys/{key.id}", done="changed")


@router.api_route("/{key_id}/rotate", methods=FORM)
async def rotate(visitor: Manager, services: AllServices, keys: Keys, key_id: KeyId) -> Response:
    """Ask how long the current secret remains valid; replace it and show the new one, once."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    if not visitor.form.is_sent:
        return visitor.form_page(
            f"Rotate the key “{key.name}”?",
            [GRACE],
            "Rotate the key",
            text="The key gets a new secret, which is shown once. Its id, limits and usage stay. "
            "An even older secret ends at once.",
        )
    body = checked(KeyRotation, {"grace_seconds": number(visitor.form["grace_seconds"])})
    grace = timedelta(seconds=body.grace_seconds)
    rotated = await keys.rotate(visitor.tenant_id, key_id, grace=grace, **visitor.caller.key_by)
    return secret_page(visitor, services, rotated)


@router.api_route("/{key_id}/revoke", methods=FORM)
async def revoke(visitor: Manager, keys: Keys, key_id: KeyId) -> Response:
    """Ask for confirmation, then revoke a key, and keys that it made."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    if visitor.form.is_sent:
        made = MadeKeys.ALL if visitor.form["made_keys"] else MadeKeys.IN_GRACE
        await keys.revoke(visitor.tenant_id, key_id, **visitor.caller.by, made_keys=made)
        return redirect(f"{visitor.home}/keys", done="revoked")
    return visitor.confirmation(
        "Revoke the key",
        of=key.name,
        text=f"All gateways reject sk-{key.prefix}-… within a second. This cannot be undone.",
        options={"made_keys": "Also revoke all keys that it made"},
    )


def secret_page(visitor: Visitor, services: Services, created: CreatedKey) -> Response:
    """Return the page that shows a new secret, with a first request for a key that may send it."""
    key, url = created.record, services[Settings].public_url
    known = sorted(filter(visitor.principal.allows_model, services[Catalogue].names))
    models = sorted(key.allowed_models or ()) or known
    # The listener of operators does not know the address of the customers' one.
    can_try = Scope.COMPLETIONS in key.scopes and (url or not visitor.tenant) and models
    return visitor.page(
        "key_secret.html",
        key=key,
        secret=created.key.reveal(),
        base_url=base_url(visitor.request),
        chat=first_chat(models[0]) if can_try else "",
    )


async def _key_form(
    visitor: Visitor, services: Services, values: Mapping[str, Any], key: KeyRecord | None = None
) -> Response:
    if sent := visitor.form:
        values = dict(sent) | {name: sent.all(name) for name in ("scopes", "models")}
    scopes = TENANT_SCOPES if visitor.tenant else visitor.principal.scopes & TENANT_SCOPES
    projects, use, used = await _projects(visitor), None, None
    if key is not None:
        scopes |= key.scopes if visitor.tenant else frozenset()
        use = (await _use_of(visitor, [key])).get(key.id)
        if use is not None:
            reports = services.make(LimitReports)
            used = (await reports.of_tenant(visitor.tenant_id, key=key.id)).scopes[0]
    return visitor.page(
        "key.html",
        key=key,
        use=use,
        form=defaultdict(str, values),
        notices=NOTICES,
        limits=limit_group(LimitScope.KEY),
        used_limits=used,
        scopes=pairs(each for each in Scope if each in scopes),
        models=pairs(_models(services, visitor, values["models"])),
        projects=None if projects is None else [("", "none"), *projects],
        project_names=dict(projects or ()),
    )


def _models(services: Services, visitor: Visitor, chosen: Iterable[str]) -> list[str]:
    """Return the names that a key may be bound to: the chosen ones, and all unless too many."""
    known = {
        *services[Catalogue].names,
        *(alias.name for alias in services[AliasBook].aliases),
        *(each.name for each in services[AdapterBook].visible_to(visitor.tenant_id)),
    }
    allowed = {each for each in known if visitor.tenant or visitor.principal.allows_model(each)}
    return sorted({*chosen} | (allowed if len(allowed) <= MOST_OPTIONS else set()))


async def _projects(visitor: Visitor) -> list[tuple[str, str]] | None:
    """Return the ids and names of the projects that the visitor sees; None if there are many."""
    wanted = PageRequest(None, MOST_OPTIONS, is_newest_first=True)
    projects = visitor.make(ProjectService)
    return options_of(await projects.page(visitor.tenant_id, wanted, grantor=visitor.caller.grant))


class _Use(NamedTuple):
    """What a key was used for."""

    last_used: datetime | None
    month: UsageSums


async def _use_of(visitor: Visitor, keys: Sequence[KeyRecord]) -> dict[str, _Use]:
    """Return the use of those of these keys whose usage the visitor sees."""
    wanted, now = UsageFilter(tenant_id=visitor.tenant_id), utc_now()
    if not visitor.is_operator:
        wanted = own_usage(visitor.principal, wanted)
    ids = [each.id for each in keys if wanted.credential_id in (None, each.id)]
    usage = visitor.make(UsageService)
    sums = await usage.of_keys(wanted, Span(month_start(now), now), ids)
    last_used = await usage.last_used(ids)
    return {each: _Use(last_used.get(each), sums.get(each, NOTHING)) for each in ids}


def _columns(
    visitor: Visitor,
    use: Mapping[str, _Use],
    *,
    limits: Mapping[str, Limits],
    projects: Mapping[str, str],
) -> Iterator[Column]:
    now, none = utc_now(), _Use(None, NOTHING)

    def spend(key: KeyRecord) -> tuple[int, int | None] | None:
        found = use.get(key.id)
        return None if found is None else (found.month.cost_micros, limits[key.id].budget_micros)

    def models(key: KeyRecord) -> str:
        return "all" if key.allowed_models is None else ", ".join(sorted(key.allowed_models))

    def project(key: KeyRecord) -> str:
        return projects.get(key.project_id or "", shortened(key.project_id or ""))

    def revocation(key: KeyRecord) -> Cell | None:
        href = f"{visitor.home}/keys/{key.id}/revoke"
        return None if key.revoked_at else Cell("Revoke", href, label=f"Revoke {key.name}")

    yield Column("Name", lambda key: Cell(key.name, f"{visitor.home}/keys/{key.id}"), "name")
    yield Column("Key", lambda key: f"sk-{key.prefix}-…", "mono wide")
    yield Column("State", lambda key: key_state(key, now))
    yield Column("Spend this month", spend, "budget")
    yield Column("Last used (UTC)", lambda key: use.get(key.id, none).last_used, "time wide")
    yield Column("Project", project, "wide")
    yield Column("Scopes", lambda key: ", ".join(sorted(key.scopes)), "wide")
    yield Column("Models", models, "name wide")
    if visitor.may_change:
        yield Column("", revocation, "actions")


def key_state(key: KeyRecord, now: datetime) -> Cell:
    """Return whether a key works."""
    if key.revoked_at is not None:
        return Cell("revoked", kind="bad")
    if key.expires_at is None:
        return Cell("active", kind="good")
    if key.expires_at <= now:
        return Cell("expired", kind="warn")
    return Cell(f"expires {until(key.expires_at)}", kind="good")


def _values(form: Form, *, is_new: bool) -> dict[str, Any]:
    """Return the request body that a form stands for."""
    values: dict[str, Any] = {"name": form["name"], "scopes": form.all("scopes")}
    bounds: dict[str, Any] = {
        "allowed_models": [*form.all("models"), *form.words("more_models")],
        "allowed_addresses": form.words("addresses"),
        "expires_at": f"{form['expires_at']}Z" if form["expires_at"] else "",
    }
    # An empty field of a new key leaves the bound of the visitor's credential.
    values |= {name: value or None for name, value in bounds.items() if value or not is_new}
    if is_new and form["project_id"]:
        values["project_id"] = form["project_id"]
    return values | {"limits": read_limits(form, LimitScope.KEY, is_new=is_new)}


def _changed(key: KeyRecord, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that differ: an unchanged expiry may be in the past."""
    return {
        name: value
        for name, value in options.items()
        if name == "limits" or value != getattr(key, name)
    }


def _fields(key: KeyRecord) -> dict[str, Any]:
    return {
        "name": key.name,
        "scopes": list(key.scopes),
        "project_id": key.project_id or "",
        "models": sorted(key.allowed_models or ()),
        "addresses": " ".join(map(str, key.allowed_addresses or ())),
        "expires_at": "" if key.expires_at is None else key.expires_at.strftime(_TIME),
        **fields_of(key.limits),
    }
