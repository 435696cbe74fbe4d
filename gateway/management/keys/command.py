"""`sluice keys`: API keys of tenants."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from gateway.management.keys.addresses import read_addresses
from gateway.management.keys.rules import MadeKeys
from gateway.management.keys.schemas import CreatedKeyBody, KeyBody
from gateway.management.keys.service import CreatedKey, KeyService, public_name
from gateway.tenancy.records import KeyRecord
from gateway.tenancy.scopes import Scope
from gateway.tenancy.times import utc_now
from gateway.terminal.entities import (
    LIMITS_HELP,
    Duration,
    limit_option,
    print_fields,
    prints,
    table,
    tenant_option,
    to_limits,
)
from gateway.terminal.options import (
    NONE,
    Decorator,
    Stores,
    changed_dialect_option,
    dialect_option,
    to_dialect,
    with_database,
    with_stores,
)
from gateway.terminal.output import show_time

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


def _print_secret(created: CreatedKey) -> None:
    click.echo(created.key.reveal())
    click.echo(
        f"\nThis is the key {created.record.id} of tenant {created.record.tenant_id}. "
        "Store it now: it cannot be shown again.",
        err=True,
    )


_prints = prints(
    table(
        (
            *("ID", "PREFIX", "NAME", "SCOPES", "MODELS", "DIALECT", "PROJECT", "EXPIRES"),
            "REVOKED",
        ),
        _to_row,
    ),
    KeyBody.of,
)
_prints_secret = prints(_print_secret, CreatedKeyBody.of_created)


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
@_prints_secret
@with_stores
async def create(
    stores: Stores, tenant_id: str, *, project_id: str | None, **given: Any
) -> CreatedKey:
    """Create an API key. It is shown only once."""
    return await _keys(stores).create(
        tenant_id, project_id=project_id, actor=stores.actor, **_changes(given)
    )


@command.command("list")
@tenant_option
@_prints
@with_database
async def list_keys(stores: Stores, tenant_id: str) -> list[KeyRecord]:
    """List the keys of a tenant, including revoked ones."""
    return await _keys(stores).list_of_tenant(tenant_id)


@command.command()
@tenant_option
@click.argument("key")
@prints(print_fields)
@with_database
async def show(stores: Stores, tenant_id: str, key: str) -> KeyBody:
    """Show all settings of KEY (its id or public prefix)."""
    return KeyBody.of(await _keys(stores).get(tenant_id, key))


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
@_prints
@with_stores
async def set_options(stores: Stores, tenant_id: str, key: str, **given: Any) -> KeyRecord:
    """Change given settings of KEY (its id or public prefix) on every gateway within a second."""
    return await _keys(stores).update(tenant_id, key, actor=stores.actor, **_changes(given))


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
@_prints_secret
@with_stores
async def rotate(stores: Stores, tenant_id: str, key: str, *, grace: timedelta) -> CreatedKey:
    """Give KEY (its id or public prefix) a new secret, which is shown once.

    Id, limits and usage remain. Any secret older than the current one stops working at once.
    """
    return await _keys(stores).rotate(tenant_id, key, grace=grace, actor=stores.actor)


@command.command()
@tenant_option
@click.argument("key")
@click.option(
    "--made-keys",
    type=click.Choice([each.value for each in MadeKeys]),
    default=MadeKeys.IN_GRACE.value,
    show_default=True,
    help="Keys to revoke too: all that KEY made; those made with its former secret in a grace "
    "period; or none.",
)
@with_stores
async def revoke(stores: Stores, tenant_id: str, key: str, *, made_keys: str) -> None:
    """Revoke KEY (its id or public prefix) on every gateway within a second."""
    _, *made = await _keys(stores).revoke(
        tenant_id, key, actor=stores.actor, made_keys=MadeKeys(made_keys)
    )
    click.echo(f"Revoked {public_name(key)}.")
    for each in made:
        click.echo(f"Revoked {each.id}, which it made.")


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
