"""`sluice check`: look at a deployment from the place of one of its processes."""

import asyncio
import sys
from typing import Final

import click

from common.checks import report
from gateway.cli.terminal import DATABASE, JSON, REDIS, argument, choice
from gateway.cli.worker import CHECK
from gateway.platform.concurrency.parent_death import become

ROLES: Final = ("gateway", "jobs", "beat", "worker")

EPILOG = """\
\b
Examples:
  sluice check
  sluice check --role jobs --json
  sluice check --role worker --model-path /models/llama
  kubectl exec deploy/sluice-gateway -- sluice check

The settings are those of the process: run it where the process runs, with its environment. The exit
code is 1 if a line begins with ERROR. Only the role worker has further options: those of `sluice
worker`.
"""


@click.command(
    "check",
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True},
    params=[
        choice("--role", ROLES, "Process in whose place to look.", default="gateway"),
        DATABASE,
        REDIS,
        JSON,
        argument("options", nargs=-1, type=click.UNPROCESSED),
    ],
)
def command(role: str, *, as_json: bool, options: tuple[str, ...], **urls: str | None) -> None:
    """Check a deployment from the place of a process; print what is wrong, and what to do."""
    if role == "worker":
        redis = urls["redis_url"]
        redis_option = () if redis is None else ("--redis-url", redis)
        become([*CHECK, "--as-json", str(as_json), *redis_option, *options])
    if options:
        raise click.UsageError(f"No such option: {options[0]}")
    from gateway.cli.place import findings_of

    sys.exit(report(asyncio.run(findings_of(role, **urls)), as_json=as_json))
