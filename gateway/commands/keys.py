"""`sluice keys`: the tenants' API keys."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
from typing_extensions import override

from gateway.accounts.records import KeyOptions, KeyRecord
from gateway.accounts.scopes import Scope
from gateway.accounts.times import utc_now
from gateway.auth.key_service import CreatedKey
from gateway.commands.options import (
    changed_dialect_option,
    database_option,
    dialect_option,
    json_option,
    open_accounts,
    redis_option,
    runs_async,
    to_dialect,
)
from gateway.commands.output import print_json, print_table, show_time

EPILOG = """\
\b
Examples:
  sluice keys create --tenant acme --name "web site"
  sluice keys create --tenant acme --name trial --expires-in 30d --model llama-8b
  sluice keys set --tenant acme --dialect vllm key_0123456789abcdef
  sluice keys list --tenant acme
  sluice keys revoke --tenant acme key_0123456789abcdef
"""

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}
_DURATION = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_WHOLE_KEY = re.compile(r"sk-([A-Za-z0-9]{12})(-.*)?")


class Duration(click.ParamType[timedelta]):
    """A number of minutes, hours or days, such as 30d."""

    name = "duration"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        match = _DURATION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a number with m, h or d, such as 30d.", param, ctx)
        return timedelta(**{_UNITS[match[2]]: int(match[1])})


tenant_option = click.option("--tenant", "tenant_id", required=True, help="Id of the tenant.")


@click.group("keys", epilog=EPILOG)
def command() -> None:
    """Create, change, list and revoke API keys."""


@command.command()
@tenant_option
@click.option("--name", required=True, help="What the key is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice([scope.value for scope in Scope]),
    default=(Scope.COMPLETIONS.value,),
    show_default=True,
    help="What the key may be used for; may be repeated.",
)
@click.option(
    "--model", "models", multiple=True, help="A model it may use, repeatable; all if not given."
)
@click.option(
    "--expires-in", type=Duration(), help="Life of the key: 90m, 12h, 30d; endless if not given."
)
@dialect_option
@json_option
@database_option
@redis_option
@runs_async
async def create(
    tenant_id: str,
    name: str,
    scopes: tuple[str, ...],
    *,
    models: tuple[str, ...],
    expires_in: timedelta | None,
    dialect: str | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Make an API key. It is shown once and cannot be shown again."""
    async with open_accounts(database_url, redis_url) as accounts:
        created = await accounts.keys.create(
            tenant_id,
            name=name,
            scopes=[Scope(scope) for scope in scopes],
            allowed_models=models or None,
            expires_at=None if expires_in is None else _from_now(expires_in),
            dialect=to_dialect(dialect),
        )
    _print_created(created, as_json=as_json)


@command.command("list")
@tenant_option
@json_option
@database_option
@runs_async
async def list_keys(tenant_id: str, *, as_json: bool, database_url: str | None) -> None:
    """Show the keys of a tenant, the revoked ones included."""
    async with open_accounts(database_url, None) as accounts:
        keys = await accounts.keys.list_of_tenant(tenant_id)
    if as_json:
        print_json([_to_json(key) for key in keys])
        return
    _print_table(keys)


@command.command("set")
@tenant_option
@click.argument("key")
@changed_dialect_option
@json_option
@database_option
@redis_option
@runs_async
async def set_options(
    tenant_id: str,
    key: str,
    *,
    dialect: str | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Change what is given of KEY (its id or public prefix), on every gateway within a second."""
    options = KeyOptions() if dialect is None else KeyOptions(dialect=to_dialect(dialect))
    async with open_accounts(database_url, redis_url) as accounts:
        changed = await accounts.keys.update(tenant_id, _id_or_prefix(key), **options)
    if as_json:
        print_json(_to_json(changed))
    else:
        _print_table([changed])


@command.command()
@tenant_option
@click.argument("key")
@database_option
@redis_option
@runs_async
async def revoke(
    tenant_id: str, key: str, *, database_url: str | None, redis_url: str | None
) -> None:
    """End KEY (its id or public prefix) on every gateway, within a second."""
    id_or_prefix = _id_or_prefix(key)
    async with open_accounts(database_url, redis_url) as accounts:
        await accounts.keys.revoke(tenant_id, id_or_prefix)
    click.echo(f"Revoked {id_or_prefix}.")


def _id_or_prefix(key: str) -> str:
    """Return what names a key, even where somebody gives the whole key."""
    whole = _WHOLE_KEY.fullmatch(key)
    return key if whole is None else whole[1]


def _from_now(duration: timedelta) -> datetime:
    try:
        return utc_now() + duration
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def _print_created(created: CreatedKey, *, as_json: bool) -> None:
    if as_json:
        print_json({**_to_json(created.record), "key": created.key.reveal()})
        return
    click.echo(created.key.reveal())
    click.echo(
        f"\nThis is the key {created.record.id} of tenant {created.record.tenant_id}. "
        "Keep it now: it cannot be shown again.",
        err=True,
    )


def _print_table(keys: list[KeyRecord]) -> None:
    print_table(
        ("ID", "PREFIX", "NAME", "SCOPES", "MODELS", "DIALECT", "EXPIRES", "REVOKED"),
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
        show_time(key.expires_at),
        show_time(key.revoked_at, missing="no"),
    )


def _to_json(key: KeyRecord) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant_id": key.tenant_id,
        "prefix": key.prefix,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "allowed_models": None if key.allowed_models is None else sorted(key.allowed_models),
        "dialect": key.dialect,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "created_at": key.created_at,
    }
