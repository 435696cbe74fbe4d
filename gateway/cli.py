"""The `sluice` command line.

The module of a command is imported when the command runs. This lets
`sluice worker` run where only the worker's dependencies are installed.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import click
from pydantic import ValidationError
from typing_extensions import override

from gateway.errors import ApiError, StartupError, StoreUnavailableError
from gateway.terminal.output import URL_SOURCE

PROGRAM: Final = (sys.executable, "-P", "-m", "gateway.cli")
"""The program of this command line, for commands that start others. With `-P`, Python ignores a
folder called `gateway` in the current folder."""

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "up": ("gateway.launch.up", "Start everything on this machine, to try it out."),
    "gateway": ("gateway.commands.gateway", "Run a gateway."),
    "worker": ("gateway.commands.worker", "Run a worker."),
    "host": ("gateway.commands.host", "Run a host: serve several models in turns."),
    "jobs": (
        "gateway.commands.jobs",
        "Run background jobs: usage into the ledger, expiries, webhooks.",
    ),
    "beat": ("gateway.commands.beat", "Schedule background jobs."),
    "tenants": (
        "gateway.management.tenants.command",
        "Create, change, list, suspend and activate tenants.",
    ),
    "projects": (
        "gateway.management.projects.command",
        "Create, change, list, archive and activate a tenant's projects.",
    ),
    "members": (
        "gateway.management.members.command",
        "Add, change, list and remove a tenant's members.",
    ),
    "keys": (
        "gateway.management.keys.command",
        "Create, change, list, rotate and revoke API keys.",
    ),
    "models": (
        "gateway.commands.models",
        "List models, and remove those that are no longer served.",
    ),
    "adapters": ("gateway.adapters.command", "Add, list and delete LoRA adapters of tenants."),
    "aliases": (
        "gateway.management.aliases.command",
        "Define, list and remove aliases: names that split their requests over models.",
    ),
    "plans": (
        "gateway.management.plans.command",
        "Create, change and list plans: default limits for groups of tenants.",
    ),
    "prices": ("gateway.management.prices.command", "Add and list model prices."),
    "credits": ("gateway.management.credits.command", "Grant, adjust and show prepaid credits."),
    "webhooks": (
        "gateway.management.webhooks.command",
        "Register, list, test and remove a tenant's webhooks.",
    ),
    "files": ("gateway.files.command", "List and delete a tenant's files."),
    "batches": ("gateway.batches.command", "List, show and cancel a tenant's batches."),
    "requests": (
        "gateway.management.live.command",
        "List and cancel the requests of a tenant that wait or run now.",
    ),
    "usage": ("gateway.management.usage.command", "Show, list, export and reconcile usage."),
    "exports": (
        "gateway.management.exports.command",
        "List, pause and repair the export of usage to billing systems.",
    ),
    "audit": (
        "gateway.management.audit.command",
        "List changes and verify the audit log.",
    ),
    "db": ("gateway.commands.db", "Create or upgrade the database's schema."),
}
"""For each command, its module and its line in `sluice --help`."""

EPILOG = """\
\b
Examples:
  sluice up                              everything on loopback, with the bundled tiny model
  sluice db upgrade                      prepare the database
  sluice tenants create "Acme" --id acme
  sluice keys create --tenant acme --name "web site"
  sluice gateway --port 8080
  sluice worker --model-path /models/llama

Each setting is also an environment variable SLUICE_*. Without SLUICE_REDIS_URL and
SLUICE_DATABASE_URL, commands manage the `sluice up` that runs in the current folder.
"""


class SluiceGroup(click.Group):
    """Imports commands on demand, and reports expected errors as one sentence."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            module = importlib.import_module(COMMANDS[cmd_name][0])
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"`sluice {cmd_name}` needs the package {error.name}: "
                "install Sluice with the extra [gateway]."
            ) from error
        command: click.Command = module.command
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    @override
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValidationError as error:
            _fail(_describe(error), error)
        except StoreUnavailableError as error:
            file = ctx.meta.get(URL_SOURCE)
            source = "" if file is None else f" The URL is from {file}."
            _fail(f"{error}{source}", error)
        except ApiError as error:
            _fail(error.message, error)
        except StartupError as error:
            _fail(str(error), error)


@click.group(
    "sluice",
    cls=SluiceGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "obj": PROGRAM},
)
@click.version_option(package_name="sluice")
def main() -> None:
    """Sluice: a multi-tenant completions gateway with batched GPU workers."""


def _fail(message: str, cause: Exception) -> NoReturn:
    raise click.ClickException(message) from cause


def _describe(error: ValidationError) -> str:
    """Name the invalid settings without their values, since some values are secret."""
    problems = []
    for problem in error.errors(include_input=False, include_url=False):
        name = "_".join(str(part) for part in problem["loc"]).upper()
        message = problem["msg"].removeprefix("Value error, ")
        problems.append(f"SLUICE_{name}: {message}" if name else message)
    return "; ".join(problems)


if __name__ == "__main__":
    main(prog_name="sluice")
