"""Keys: list, create, change, rotate and revoke."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Depends, Request, Response

from gateway.accounts.keys.routes import KeyChange, KeyCreation, KeyId, KeyRotation, Keys
from gateway.accounts.keys.rules import MadeKeys
from gateway.accounts.limits import LimitReports
from gateway.accounts.projects.service import ProjectService
from gateway.billing.usage.parts import NOTHING, UsageFilter, UsageSums
from gateway.billing.usage.periods import Span
from gateway.billing.usage.routes import own_usage
from gateway.billing.usage.service import UsageService
from gateway.console.formats import shortened, until
from gateway.console.forms import Form, checked, number
from gateway.console.limit_fields import fields_of, limit_group, read_limits
from gateway.console.lists import Newest, following
from gateway.console.rendering import confirmation, form_page, page
from gateway.console.routing import FORM, SentForm, TenantRoute, Visitor, needs, redirect
from gateway.console.tables import Action, Cell, Column, Field, Table, pairs
from gateway.console.usage_pages import MOST_OPTIONS, options_of
from gateway.http.services import AllServices, Services
from gateway.models.books import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue
from gateway.platform.database.paging import PageRequest
from gateway.records.limits import Limits, LimitScope
from gateway.records.records import KeyRecord
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import month_start, utc_now

GRACE: Final = "How long the current secret remains valid"
GRACES: Final = (
    ("0", "none: it ends at once"),
    ("3600", "1 hour"),
    ("86400", "1 day"),
    ("604800", "7 days"),
)
_TIME: Final = "%Y-%m-%dT%H:%M:%S"
NOTICES: Final = {
    "changed": "The key is changed on all gateways within a second.",
    "revoked": "The key is revoked. All gateways reject it within a second.",
}

router = APIRouter(route_class=TenantRoute, prefix="/keys", include_in_schema=False)

ManagesKeys = Annotated[Visitor, Depends(needs(Scope.KEYS))]


@router.get("")
async def list_keys(
    request: Request, services: AllServices, keys: Keys, visitor: ManagesKeys, wanted: Newest
) -> Response:
    """List keys, newest first."""
    found = await keys.page(visitor.tenant_id, wanted, grantor=visitor.caller.grant)
    limits = await services.make(LimitReports).of_keys(visitor.tenant_id, found.entries)
    columns = _columns(
        visitor,
        await _use_of(services, visitor, found.entries),
        limits=dict(zip((each.id for each in found.entries), limits, strict=True)),
        projects=dict(await _projects(services, visitor) or ()),
    )
    return page(
        request,
        "list.html",
        title="Keys",
        action=Action("Create a key", f"{visitor.home}/keys/new"),
        table=Table("Keys", list(columns), found.entries, "There is no key yet."),
        following=following(found, f"{visitor.home}/keys"),
        notices=NOTICES,
    )


@router.api_route("/new", methods=FORM)
async def create_key(
    request: Request, services: AllServices, keys: Keys, visitor: ManagesKeys, form: SentForm
) -> Response:
    """Create a key and show it, once."""
    if not form.is_sent:
        shown = _shown(form) if form else {"scopes": [Scope.COMPLETIONS], "models": []}
        return await _key_form(request, services, visitor, form=shown)
    body = checked(KeyCreation, _values(form, is_new=True))
    created = await keys.create(visitor.tenant_id, **body.options(), **visitor.caller.key_by)
    return page(request, "key_secret.html", key=created.record, secret=created.key.reveal())


@router.api_route("/{key_id}", methods=FORM)
async def change_key(
    request: Request,
    services: AllServices,
    keys: Keys,
    visitor: ManagesKeys,
    *,
    key_id: KeyId,
    form: SentForm,
) -> Response:
    """Show a key, and change its bounds and limits."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    if not form.is_sent:
        shown = _shown(form) if form else _fields(key)
        return await _key_form(request, services, visitor, form=shown, key=key)
    options = _changed(key, checked(KeyChange, _values(form, is_new=False)).options())
    await keys.update(visitor.tenant_id, key.id, **options, **visitor.caller.key_by)
    return redirect(f"{visitor.home}/keys/{key.id}", done="changed")


@router.api_route("/{key_id}/rotate", methods=FORM)
async def rotate_key(
    request: Request, keys: Keys, visitor: ManagesKeys, *, key_id: KeyId, form: SentForm
) -> Response:
    """Ask how long the current secret remains valid; replace it and show the new one, once."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    if not form.is_sent:
        return form_page(
            request,
            title=f"Rotate the key “{key.name}”?",
            text="The key gets a new secret, which is shown once. Its id, limits and usage stay. "
            "An even older secret ends at once.",
            fields=[Field("grace_seconds", GRACE, options=GRACES)],
            form=form or {"grace_seconds": "86400"},
            button="Rotate the key",
        )
    body = checked(KeyRotation, {"grace_seconds": number(form["grace_seconds"])})
    grace = timedelta(seconds=body.grace_seconds)
    rotated = await keys.rotate(visitor.tenant_id, key_id, grace=grace, **visitor.caller.key_by)
    return page(request, "key_secret.html", key=rotated.record, secret=rotated.key.reveal())


@router.api_route("/{key_id}/revoke", methods=FORM)
async def revoke_key(
    request: Request, keys: Keys, visitor: ManagesKeys, *, key_id: KeyId, form: SentForm
) -> Response:
    """Ask for confirmation, then revoke a key, and keys that it made."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    if form.is_sent:
        made = MadeKeys.ALL if form["made_keys"] else MadeKeys.IN_GRACE
        await keys.revoke(visitor.tenant_id, key_id, **visitor.caller.by, made_keys=made)
        return redirect(f"{visitor.home}/keys", done="revoked")
    return confirmation(
        request,
        title=f"Revoke the key “{key.name}”?",
        text=f"All gateways reject sk-{key.prefix}-… within a second. This cannot be undone.",
        button="Revoke the key",
        options={"made_keys": "Also revoke all keys that it made"},
    )


async def _key_form(
    request: Request,
    services: Services,
    visitor: Visitor,
    *,
    form: Mapping[str, Any],
    key: KeyRecord | None = None,
) -> Response:
    scopes = TENANT_SCOPES if visitor.tenant else visitor.principal.scopes & TENANT_SCOPES
    if visitor.tenant and key is not None:
        scopes |= key.scopes
    projects, use, used = await _projects(services, visitor), None, None
    if key is not None:
        use = (await _use_of(services, visitor, [key])).get(key.id)
    if key is not None and use is not None:
        reports = services.make(LimitReports)
        used = (await reports.of_tenant(visitor.tenant_id, key=key.id)).scopes[0]
    return page(
        request,
        "key.html",
        key=key,
        use=use,
        form=defaultdict(str, form),
        notices=NOTICES,
        limits=limit_group(LimitScope.KEY),
        used_limits=used,
        scopes=pairs(each for each in Scope if each in scopes),
        models=pairs(_models(services, visitor, form["models"])),
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


async def _projects(services: Services, visitor: Visitor) -> list[tuple[str, str]] | None:
    """Return the ids and names of the projects that the visitor sees; None if there are many."""
    wanted = PageRequest(None, MOST_OPTIONS, is_newest_first=True)
    projects = services.make(ProjectService)
    return options_of(await projects.page(visitor.tenant_id, wanted, grantor=visitor.caller.grant))


class _Use(NamedTuple):
    """What a key was used for."""

    last_used: datetime | None
    month: UsageSums


async def _use_of(
    services: Services, visitor: Visitor, keys: Sequence[KeyRecord]
) -> dict[str, _Use]:
    """Return the use of those of these keys whose usage the visitor sees."""
    wanted, now = UsageFilter(tenant_id=visitor.tenant_id), utc_now()
    if not visitor.is_operator:
        wanted = own_usage(visitor.principal, wanted)
    ids = [each.id for each in keys if wanted.credential_id in (None, each.id)]
    usage = services.make(UsageService)
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

    yield Column("Name", lambda key: Cell(key.name, f"{visitor.home}/keys/{key.id}"), "name")
    yield Column("Key", lambda key: f"sk-{key.prefix}-…", "mono wide")
    yield Column("State", lambda key: key_state(key, now))
    yield Column("Spend this month", spend, "budget")
    yield Column("Last used (UTC)", lambda key: use.get(key.id, none).last_used, "time wide")
    yield Column("Project", project, "wide")
    yield Column("Scopes", lambda key: ", ".join(sorted(key.scopes)), "wide")
    yield Column("Models", models, "name wide")


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


def _shown(form: Form) -> dict[str, Any]:
    return dict(form) | {name: form.all(name) for name in ("scopes", "models")}
