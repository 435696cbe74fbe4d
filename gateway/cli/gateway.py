"""`sluice gateway`: run a gateway, in one or more processes."""

import asyncio
import logging
import sys
from typing import Final

import click
import msgspec

from common.logs import configure_logs
from gateway.auth.jwt_verifier import JwtVerifier
from gateway.cli.terminal import DATABASE, option
from gateway.platform.database.schema import check_schema
from gateway.platform.settings import Settings, environment_of, load_settings
from gateway.process.supervision.processes import OneOfMany
from gateway.records.errors import StartupError

EXIT_FAILED: Final = 1

EPILOG = """\
\b
Examples:
  sluice gateway
  sluice gateway --host 0.0.0.0 --port 8080 --redis-url redis://redis.internal:6379/0
  sluice gateway --operator-port 9463
  sluice gateway --processes 4

Each setting is also an environment variable SLUICE_*.
"""


_PARAMS: Final = [
    DATABASE,
    option("--host ADDRESS", "Address to listen on.  [SLUICE_HOST]"),
    option("--port PORT", "Port to listen on.  [SLUICE_PORT]"),
    option(
        "--operator-port PORT",
        "Port of /admin and /metrics, on SLUICE_OPERATOR_HOST; 0 disables it.  With --processes, "
        "the first of as many ports.  [SLUICE_OPERATOR_PORT]",
    ),
    option("--redis-url URL", "Redis server that workers share.  [SLUICE_REDIS_URL]"),
    option(
        "--processes COUNT",
        "Processes that share the port, for machines with several cores.  [SLUICE_PROCESSES]",
    ),
    click.Option(["--one-of-many"], hidden=True),
]


@click.command("gateway", epilog=EPILOG, params=_PARAMS)
@click.pass_obj
def command(sluice: tuple[str, ...], /, *, one_of_many: str | None, **options: str | None) -> None:
    """Run a gateway until SIGTERM or Ctrl-C; open streams may then continue for a while."""
    settings = load_settings(**options)
    if one_of_many is not None:
        one = msgspec.json.decode(one_of_many, type=OneOfMany)
        if one.serving is None:
            asyncio.run(_check(settings))
        _serve(settings, one)
        return
    asyncio.run(_check(settings))
    if settings.processes == 1:
        _serve(settings, None)
        return
    from gateway.process.supervision import processes as several

    # In the environment, because all users of the machine can read the command line.
    given = {name: value for name, value in options.items() if value is not None}
    configure_logs(settings.log_format, level=logging.INFO)
    if not asyncio.run(several.run_gateways(settings, sluice, environment_of(given))):
        sys.exit(EXIT_FAILED)


def _serve(settings: Settings, one: OneOfMany | None) -> None:
    # The parent of several processes does not import the server.
    from gateway.process.server import serve

    serve.run(settings, one)


async def _check(settings: Settings) -> None:
    """Raise errors that would stop the gateway later, while one sentence can still report them."""
    JwtVerifier.from_settings(settings)
    await check_schema(settings.database_url.get_secret_value())
    if not settings.cache_salt_secret.get_secret_value():
        raise StartupError(
            "SLUICE_CACHE_SALT_SECRET is not set. Set it to the same random text on all gateways. "
            "With a known salt, tenants could infer the prompts of others from response times."
        )
