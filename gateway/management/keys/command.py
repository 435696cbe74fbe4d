"""`sluice keys`: API keys of tenants."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from gateway.management.keys.addresses import read_addresses
from gateway.management.keys.schemas import CreatedKeyBody, KeyBody
from gateway.management.keys.service import CreatedKey, KeyService, public_name
from gateway.tenancy.records import KeyRecord
from gateway.tenancy.scopes import Scope
from gateway.tenancy.times import utc_now
from gateway.terminal.entities import (
    LIMITS_HELP,
    Duration,
    limit_option,
    print_bodies,
    print_one,
    tenant_option,
    to_limits,
)
from gateway.terminal.options import (
    NONE,
    Decorator,
    Stores,
    changed_dialect_option,
    database_option,
    dialect_option,
    json_option,
    open_stores,
    redis_option,
    runs_async,
    to_dialect,
)
from gateway.terminal.output import print_table, show_time

EPILOG = f"""\
\b
Examples:
  sluice keys create --tenant acme --name "web site"
  sluice keys create --tenant acme --name trial --expires-in 30d --model llama-8b
  sluice keys create --tenant acme --name shop --project prj_0123456789abcdef \\
      --address 192.0.2.0/24 --limit requests_per_minute=60
  sluice keys set --tenant acme --dialect vllm key_0123456789abcdef
  sluice keys list --tenant acme
  sluice keys rotate --tenant acme --grace 12h key_0123456789abcdef
  sluice keys revoke --tenant acme key_0123456789abcdef

{LIMITS_HELP}"""

_SCOPES: Final = click.Choice([scope.value for scope in Scope])


def _keys(stores: Stores) -> KeyService:
    return KeyService(stores.database, stores.announcer)


@click.group("keys", epilog=EPILOG)
def command() -> None:
    """Create, change, list, rotate and revoke API keys."""


_address_option: Decorator = click.option(
    "--address",
    "allowed_addresses",
    multiple=True,
    metavar="CIDR",
    help="Address or network that may use the key; repeatable.  [default: any]",
)


@command.command()
@tenant_option
@click.option("--name", required=True, help="Name of the key.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=_SCOPES,
    default=(Scope.COMPLETIONS.value,),
    show_default=True,
    help="Scope of the key; repeatable.",
)
@click.option("--project", "project_id", help="Id of the project of the key.")
@click.option(
    "--model",
    "allowed_models",
    multiple=True,
    help="Model that the key may use; repeatable.  [default: all]",
)
@_address_option
@click.option(
    "--expires-in",
    type=Duration(),
    help="Lifetime of the key, such as 90m, 12h or 30d.  [default: unlimited]",
)
@limit_option
@dialect_option
@json_option
@database_option
@redis_option
@runs_async
async def create(
    tenant_id: str,
    *,
    project_id: str | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
    **given: Any,
) -> None:
    """Create an API key. It is shown only once."""
    options = _changes(given)
    async with open_stores(database_url, redis_url) as stores:
        created = await _keys(stores).create(
            tenant_id, project_id=project_id, actor=stores.actor, **options
        )
    _print_created(created, as_json=as_json)


@command.command("list")
@tenant_option
@json_option
@database_option
@runs_async
async def list_keys(tenant_id: str, *, as_json: bool, database_url: str | None) -> None:
    """List the keys of a tenant, including revoked ones."""
    async with open_stores(database_url, None) as stores:
        keys = await _keys(stores).list_of_tenant(tenant_id)
    if as_json:
        print_bodies(map(KeyBody.of, keys))
    else:
        _print_table(keys)


@command.command()
@tenant_option
@click.argument("key")
@json_option
@database_option
@runs_async
async def show(tenant_id: str, key: str, *, as_json: bool, database_url: str | None) -> None:
    """Show all settings of KEY (its id or public prefix)."""
    async with open_stores(database_url, None) as stores:
        found = await _keys(stores).get(tenant_id, key)
    print_one(KeyBody.of(found), as_json=as_json)


@command.command("set")
@tenant_option
@click.argument("key")
@click.option("--name", help="Name of the key.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=_SCOPES,
    help="Scope of the key; repeatable.",
)
@click.option(
    "--model",
    "allowed_models",
    multiple=True,
    help="Model that the key may use, repeatable; none: all.",
)
@click.option(
    "--address",
    "allowed_addresses",
    multiple=True,
    metavar="CIDR",
    help="Address or network that may use the key, repeatable; none: any.",
)
@click.option(
    "--expires-in",
    type=Duration(allows_none=True),
    help="Lifetime of the key from now, such as 90m, 12h or 30d; none: unlimited.",
)
@limit_option
@changed_dialect_option
@json_option
@database_option
@redis_option
@runs_async
async def set_options(
    tenant_id: str,
    key: str,
    *,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
    **given: Any,
) -> None:
    """Change given settings of KEY (its id or public prefix) on every gateway within a second."""
    options = _changes(given)
    async with open_stores(database_url, redis_url) as stores:
        changed = await _keys(stores).update(tenant_id, key, actor=stores.actor, **options)
    if as_json:
        print_one(KeyBody.of(changed), as_json=True)
    else:
        _print_table([changed])


@command.command()
@tenant_option
@click.argument("key")
@click.option(
    "--grace",
    type=Duration(allows_zero=True),
    default="1d",
    show_default=True,
    help="How long the current secret remains valid, such as 90m or 12h, at most 30d; 0: it ends "
    "at once.",
)
@json_option
@database_option
@redis_option
@runs_async
async def rotate(
    tenant_id: str,
    key: str,
    *,
    grace: timedelta,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Give KEY (its id or public prefix) a new secret, which is shown once.

    Id, limits and usage remain. Any secret older than the current one stops working at once.
    """
    async with open_stores(database_url, redis_url) as stores:
        rotated = await _keys(stores).rotate(tenant_id, key, grace=grace, actor=stores.actor)
    _print_created(rotated, as_json=as_json)


@command.command()
@tenant_option
@click.argument("key")
@database_option
@redis_option
@runs_async
async def revoke(
    tenant_id: str, key: str, *, database_url: str | None, redis_url: str | None
) -> None:
    """Revoke KEY (its id or public prefix) on every gateway within a second."""
    async with open_stores(database_url, redis_url) as stores:
        await _keys(stores).revoke(tenant_id, key, actor=stores.actor)
    click.echo(f"Revoked {public_name(key)}.")


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options; `none` removes a value."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    if "scopes" in options:
        options["scopes"] = frozenset(map(Scope, options["scopes"]))
    for name, read in (("allowed_models", frozenset), ("allowed_addresses", read_addresses)):
        if name in options:
            options[name] = None if options[name] == (NONE,) else read(options[name])
    if "expires_in" in options:
        duration = options.pop("expires_in")
        options["expires_at"] = None if duration == NONE else _from_now(duration)
    if "limits" in options:
        options["limits"] = to_limits(options["limits"])
    if "dialect" in options:
        options["dialect"] = to_dialect(options["dialect"])
    return options


def _from_now(duration: timedelta) -> datetime:
    try:
        return utc_now() + duration
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def _print_created(created: CreatedKey, *, as_json: bool) -> None:
    if as_json:
        print_one(CreatedKeyBody.of_created(created), as_json=True)
        return
    click.echo(created.key.reveal())
    click.echo(
        f"\nThis is the key {created.record.id} of tenant {created.record.tenant_id}. "
        "Store it now: it cannot be shown again.",
        err=True,
    )


def _print_table(keys: list[KeyRecord]) -> None:
    print_table(
        (
            *("ID", "PREFIX", "NAME", "SCOPES", "MODELS", "DIALECT", "PROJECT", "EXPIRES"),
            "REVOKED",
        ),
        [_to_row(key) for key in keys],
    )


def _to_row(key: KeyRecord) -> tuple[str, ...]:
    models = "all" if key.allowed_models is None else ",".join(sorted(key.allowed_models))
    return (
        key.id,
        key.prefix,
        key.name,
        ",".join(sorted(key.scopes)),
        models,
        key.dialect or "-",
        key.project_id or "-",
        show_time(key.expires_at),
        show_time(key.revoked_at, missing="no"),
    )
