"""`sluice gateway`: run one gateway process."""

import asyncio

import click

from gateway.auth.jwt_verifier import JwtVerifier
from gateway.database.engine import Database
from gateway.database.schema import require_current_schema
from gateway.errors import StartupError
from gateway.settings import Settings, load_settings
from gateway.terminal.options import database_option

EPILOG = """\
\b
Examples:
  sluice gateway
  sluice gateway --host 0.0.0.0 --port 8080 --redis-url redis://redis.internal:6379/0
  sluice gateway --operator-port 9463

Each setting is also an environment variable SLUICE_*.
"""


@click.command("gateway", epilog=EPILOG)
@click.option("--host", metavar="ADDRESS", help="Address to listen on.  [SLUICE_HOST]")
@click.option("--port", metavar="PORT", help="Port to listen on.  [SLUICE_PORT]")
@click.option(
    "--operator-port",
    metavar="PORT",
    help="Port of /admin and /metrics, on SLUICE_OPERATOR_HOST; 0 disables it.  "
    "[SLUICE_OPERATOR_PORT]",
)
@click.option(
    "--redis-url", metavar="URL", help="Redis server that workers share.  [SLUICE_REDIS_URL]"
)
@database_option
def command(
    *,
    host: str | None,
    port: str | None,
    operator_port: str | None,
    redis_url: str | None,
    database_url: str | None,
) -> None:
    """Run a gateway until SIGTERM or Ctrl-C; open streams may then continue for a while."""
    settings = load_settings(
        host=host,
        port=port,
        operator_port=operator_port,
        redis_url=redis_url,
        database_url=database_url,
    )
    asyncio.run(_check(settings))
    from gateway.server import serve

    serve.run(settings)


async def _check(settings: Settings) -> None:
    """Raise errors that would stop the gateway later, while one sentence can still report them."""
    JwtVerifier.from_settings(settings)
    database = Database(settings.database_url.get_secret_value())
    try:
        await require_current_schema(database)
    finally:
        await database.aclose()
    if not settings.cache_salt_secret.get_secret_value():
        raise StartupError(
            "SLUICE_CACHE_SALT_SECRET is not set. Set it to the same random text on all gateways. "
            "With a known salt, tenants could infer the prompts of others from response times."
        )
