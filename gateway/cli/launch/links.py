"""`sluice console link`: links that log in to the console."""

import asyncio

import click

from gateway.auth.api_key import ApiKey, MalformedKeyError
from gateway.cli.launch.bring_up import DEMO_FILE, make_console_links
from gateway.cli.terminal import REDIS, option
from gateway.platform.env_file import EnvFile
from gateway.platform.settings import LOCAL_FOLDER, load_command_settings

EPILOG = """\
\b
Examples:
  sluice console link
  SLUICE_ADMIN_KEY=sk-... SLUICE_PUBLIC_URL=https://api.example.com sluice console link

In the folder of a running `sluice up`, the links log in with the key of its demo. Other deployments
need the key and the URLs of the console: SLUICE_PUBLIC_URL, SLUICE_OPERATOR_PUBLIC_URL, or both.
"""
_KEY = option(
    "--key", "Key that the links log in with.  [SLUICE_ADMIN_KEY]", envvar="SLUICE_ADMIN_KEY"
)


@click.group("console")
def command() -> None:
    """Print links that log in to the console."""


@command.command("link", epilog=EPILOG, params=[_KEY, REDIS])
def link(key: str | None, redis_url: str | None) -> None:
    """Print a new link for each console. It logs in once, within an hour."""
    settings, up = load_command_settings(redis_url=redis_url)
    demo = {} if up is None else EnvFile(LOCAL_FOLDER / DEMO_FILE).read()
    urls = {
        "customers": settings.public_url or demo.get("SLUICE_URL"),
        "operators": settings.operator_public_url or demo.get("SLUICE_OPERATOR_URL"),
    }
    key = key or demo.get("SLUICE_ADMIN_KEY")
    if key is None or not any(urls.values()):
        raise click.ClickException(
            "`sluice up` does not run in this folder. For another deployment, set SLUICE_ADMIN_KEY "
            "and SLUICE_PUBLIC_URL or SLUICE_OPERATOR_PUBLIC_URL."
        )
    try:
        ApiKey.parse(key)
    except MalformedKeyError as error:
        raise click.ClickException(f"The key is malformed: {error}.") from None
    links = asyncio.run(make_console_links(settings.redis_url, key))
    for audience, url in urls.items():
        if url is not None:
            click.echo(f"For {audience}  {url}{links[audience]}")
