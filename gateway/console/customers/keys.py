"""Keys: list, create, change, rotate and revoke."""

from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.accounts.keys.routes import KeyChange, KeyCreation, KeyId, KeyRotation, Keys
from gateway.accounts.keys.rules import MadeKeys
from gateway.accounts.shared import AfterId
from gateway.console.forms import Form, checked, number
from gateway.console.limit_fields import fields_of, labels_of, read_limits
from gateway.console.rendering import confirmation, page
from gateway.console.routing import SentForm, TenantRoute, Visitor, following, needs, redirect
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.platform.database.paging import PageRequest
from gateway.records.errors import ApiError
from gateway.records.limits import LimitScope
from gateway.records.records import KeyRecord
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.times import utc_now

ROWS: Final = 50
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
    request: Request,
    keys: Keys,
    visitor: ManagesKeys,
    after: AfterId = None,
    done: Annotated[str, Query(max_length=20)] = "",
) -> Response:
    """List keys, newest first."""
    wanted = PageRequest(after, ROWS, is_newest_first=True)
    found = await keys.page(visitor.tenant_id, wanted, grantor=visitor.caller.grant)
    return page(
        request,
        "keys.html",
        keys=found.entries,
        now=utc_now(),
        following=following(found, f"{visitor.home}/keys"),
        notice=NOTICES.get(done),
    )


@router.get("/new")
async def show_new_key(request: Request, services: AllServices, visitor: ManagesKeys) -> Response:
    """Show the form of a new key."""
    form = {"scopes": [Scope.COMPLETIONS]}
    return _key_form(request, visitor, models=list(services[Catalogue].names), form=form)


@router.post("/new")
async def create_key(
    request: Request, services: AllServices, keys: Keys, visitor: ManagesKeys, form: SentForm
) -> Response:
    """Create a key and show it, once."""
    try:
        body = checked(KeyCreation, _values(form, is_new=True))
        created = await keys.create(
            visitor.tenant_id,
            **body.options(),
            **visitor.caller.key_by,
        )
    except ApiError as error:
        return _key_form(
            request, visitor, models=list(services[Catalogue].names), form=_shown(form), error=error
        )
    return page(request, "key_secret.html", key=created.record, secret=created.key.reveal())


@router.get("/{key_id}")
async def show_key(
    request: Request,
    services: AllServices,
    keys: Keys,
    visitor: ManagesKeys,
    key_id: KeyId,
    done: Annotated[str, Query(max_length=20)] = "",
) -> Response:
    """Show a key and the form that changes it."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    return _key_form(
        request,
        visitor,
        models=list(services[Catalogue].names),
        form=_fields(key),
        key=key,
        notice=NOTICES.get(done),
    )


@router.post("/{key_id}")
async def change_key(
    request: Request,
    services: AllServices,
    keys: Keys,
    visitor: ManagesKeys,
    *,
    key_id: KeyId,
    form: SentForm,
) -> Response:
    """Change the bounds and limits of a key."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    try:
        body = checked(KeyChange, _values(form, is_new=False))
        await keys.update(
            visitor.tenant_id,
            key.id,
            **_changed(key, body.options()),
            **visitor.caller.key_by,
        )
    except ApiError as error:
        return _key_form(
            request,
            visitor,
            models=list(services[Catalogue].names),
            form=_shown(form),
            key=key,
            error=error,
        )
    return redirect(f"{visitor.home}/keys/{key.id}", done="changed")


@router.get("/{key_id}/rotate")
async def ask_to_rotate(
    request: Request, keys: Keys, visitor: ManagesKeys, key_id: KeyId
) -> Response:
    """Ask how long the current secret remains valid."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    return page(request, "key_rotate.html", key=key, graces=GRACES)


@router.post("/{key_id}/rotate")
async def rotate_key(
    request: Request, keys: Keys, visitor: ManagesKeys, *, key_id: KeyId, form: SentForm
) -> Response:
    """Replace the secret and show the new one, once."""
    body = checked(KeyRotation, {"grace_seconds": number(form["grace_seconds"])})
    rotated = await keys.rotate(
        visitor.tenant_id,
        key_id,
        grace=timedelta(seconds=body.grace_seconds),
        **visitor.caller.key_by,
    )
    return page(request, "key_secret.html", key=rotated.record, secret=rotated.key.reveal())


@router.get("/{key_id}/revoke")
async def ask_to_revoke(
    request: Request, keys: Keys, visitor: ManagesKeys, key_id: KeyId
) -> Response:
    """Ask for confirmation."""
    key = await keys.get(visitor.tenant_id, key_id, grantor=visitor.caller.grant)
    return confirmation(
        request,
        f"{visitor.home}/keys/{key.id}",
        "revoke",
        title=f"Revoke the key “{key.name}”?",
        text=f"All gateways reject sk-{key.prefix}-… within a second. This cannot be undone.",
        button="Revoke the key",
        options={"made_keys": "Also revoke all keys that it made"},
    )


@router.post("/{key_id}/revoke")
async def revoke_key(keys: Keys, visitor: ManagesKeys, key_id: KeyId, form: SentForm) -> Response:
    """Revoke the key, and keys that it made."""
    await keys.revoke(
        visitor.tenant_id,
        key_id,
        **visitor.caller.by,
        made_keys=MadeKeys.ALL if form["made_keys"] else MadeKeys.IN_GRACE,
    )
    return redirect(f"{visitor.home}/keys", done="revoked")


def _key_form(
    request: Request,
    visitor: Visitor,
    *,
    models: list[str],
    form: Mapping[str, Any],
    key: KeyRecord | None = None,
    error: ApiError | None = None,
    notice: str | None = None,
) -> Response:
    principal = visitor.principal
    scopes = TENANT_SCOPES if visitor.tenant else principal.scopes & TENANT_SCOPES
    if visitor.tenant and key is not None:
        scopes |= key.scopes
    return page(
        request,
        "key.html",
        status=200 if error is None else error.status,
        key=key,
        form=defaultdict(str, form),
        error=error,
        notice=notice,
        limits=labels_of(LimitScope.KEY),
        scopes=[each for each in Scope if each in scopes],
        models=sorted(each for each in models if visitor.tenant or principal.allows_model(each)),
        now=utc_now(),
    )


def _values(form: Form, *, is_new: bool) -> dict[str, Any]:
    """Return the request body that a form stands for."""
    values: dict[str, Any] = {"name": form["name"], "scopes": form.all("scopes")}
    bounds: dict[str, Any] = {
        "allowed_models": form.words("models"),
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
        "models": " ".join(sorted(key.allowed_models or ())),
        "addresses": " ".join(map(str, key.allowed_addresses or ())),
        "expires_at": "" if key.expires_at is None else key.expires_at.strftime(_TIME),
        **fields_of(key.limits),
    }


def _shown(form: Form) -> dict[str, Any]:
    return {**{name: form[name] for name in form}, "scopes": form.all("scopes")}
