"""Options that several commands share, and the resources that they open."""

import asyncio
import getpass
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import click
from redis.asyncio import Redis

from contract.dialect import Dialect
from gateway.database.engine import Database
from gateway.database.schema import CheckedDatabase
from gateway.redis_client import connect
from gateway.settings import Settings, load_command_settings
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.terminal.output import URL_SOURCE

P = ParamSpec("P")
T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

database_option: Decorator = click.option(
    "--database-url",
    metavar="URL",
    help="sqlite+aiosqlite:///FILE or postgresql+asyncpg://USER:PASSWORD@HOST/NAME.  "
    "[SLUICE_DATABASE_URL]",
)
redis_option: Decorator = click.option(
    "--redis-url", metavar="URL", help="Redis server of the gateways.  [SLUICE_REDIS_URL]"
)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of a table."
)

NONE: Final = "none"
"""The value that unsets an option of a tenant or a key."""

dialect_option: Decorator = click.option(
    "--dialect",
    type=click.Choice([dialect.value for dialect in Dialect]),
    help="Dialect of requests that specify none.",
)
changed_dialect_option: Decorator = click.option(
    "--dialect",
    type=click.Choice([*(dialect.value for dialect in Dialect), NONE]),
    help="Dialect of requests that specify none; none removes it.",
)


def to_dialect(name: str | None) -> Dialect | None:
    """Return the dialect that an option names; None for NONE and for a missing option."""
    return None if name in (None, NONE) else Dialect(name)


def command_settings(**given: str | None) -> Settings:
    """Return the settings of a command that manages a deployment; see `load_command_settings`."""
    settings, file = load_command_settings(**given)
    click.get_current_context().meta[URL_SOURCE] = file
    return settings


@dataclass(frozen=True, slots=True)
class Stores:
    """Resources of the management commands."""

    database: Database
    announcer: ChangeAnnouncer
    redis: Redis
    settings: Settings
    actor: str
    """Actor in the audit log: `cli:USER`."""


@asynccontextmanager
async def open_stores(database_url: str | None, redis_url: str | None) -> AsyncIterator[Stores]:
    """Open the database and Redis from the options, the environment or a running `sluice up`."""
    settings = command_settings(database_url=database_url, redis_url=redis_url)
    database = CheckedDatabase(settings.database_url.get_secret_value())
    redis = connect(settings.redis_url, max_connections=1)
    announcer = ChangeAnnouncer(redis)
    try:
        actor = f"cli:{getpass.getuser()}"
        yield Stores(database, announcer, redis, settings=settings, actor=actor)
    finally:
        await redis.aclose()
        await database.aclose()


def runs_async(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Let click call a coroutine function."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return asyncio.run(function(*args, **kwargs))

    return run


def with_database(function: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Add `--database-url`, and let click call a coroutine function with open `Stores`."""

    @database_option
    @runs_async
    @wraps(function)
    async def run(
        *args: Any, database_url: str | None, redis_url: str | None = None, **options: Any
    ) -> T:
        async with open_stores(database_url, redis_url) as stores:
            return await function(stores, *args, **options)

    return run


def with_stores(function: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Do the same as `with_database`, with `--redis-url` to announce changes to the gateways."""
    return with_database(redis_option(function))
