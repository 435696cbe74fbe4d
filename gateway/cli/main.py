"""The `sluice` command line.

The module of a command is imported when the command runs. This lets
`sluice worker` run where only the worker's dependencies are installed.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem
from pydantic import ValidationError
from typing_extensions import override

from gateway.cli.terminal import URL_SOURCE
from gateway.records.errors import ApiError, StartupError, StoreUnavailableError

PROGRAM: Final = (sys.executable, "-P", "-m", "gateway.cli.main")
"""The program of this command line, for commands that start others. With `-P`, Python ignores a
folder called `gateway` in the current folder."""

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "up": (".launch.up", "Start everything on this machine, to try it out."),
    "console": (".launch.links", "Print links that log in to the console."),
    "gateway": (".gateway", "Run a gateway."),
    "worker": (".worker", "Run a worker."),
    "host": (".worker:host", "Run a host: serve several models in turns."),
    "jobs": (".jobs", "Run background jobs: usage into the ledger, expiries, webhooks."),
    "beat": (".jobs:beat", "Schedule background jobs."),
    "tenants": (".resources:tenants", "Create, change, list, suspend and activate tenants."),
    "projects": (".resources:projects", "Create, change, list and archive a tenant's projects."),
    "members": (".resources:members", "Add, change, list and remove a tenant's members."),
    "spend-limits": (
        ".resources:spend_limits",
        "Add, change, list and remove a tenant's spend limits.",
    ),
    "keys": (".resources:keys", "Create, change, list, rotate and revoke API keys."),
    "models": (".resources:models", "List models, and remove those that are no longer served."),
    "adapters": (".resources:adapters", "Add, list and delete LoRA adapters of tenants."),
    "aliases": (".resources:aliases", "Define, list and remove names that stand for models."),
    "plans": (".resources:plans", "Create, change and list plans: limits of groups of tenants."),
    "prices": (".resources:prices", "Add, list and remove model prices."),
    "credits": (".resources:credits_", "Grant, adjust and show prepaid credits."),
    "invoices": (".resources:invoices", "Show the statement of a tenant's month."),
    "webhooks": (".resources:webhooks", "Register, list, test and remove a tenant's webhooks."),
    "prompt-log": (".resources:prompt_log", "Start, show and stop a tenant's prompt log."),
    "files": (".resources:files", "List and delete a tenant's files."),
    "batches": (".resources:batches", "List, show and cancel a tenant's batches."),
    "requests": (".resources:requests", "List and cancel a tenant's requests that wait or run."),
    "usage": (".records:usage", "Show, list, export and reconcile usage."),
    "exports": (".resources:exports", "List, pause and repair exports to billing systems."),
    "audit": (".records:audit", "List changes and verify the audit log."),
    "capacity": (".capacity", "Compute the machines for a load, from measured costs."),
    "check": (".check", "Check a deployment from the place of a process."),
    "db": (".db", "Create or upgrade the database's schema."),
}
"""For each command, its module relative to `gateway.cli`, with its name there unless it is
`command`, and its line in `sluice --help`."""

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
SLUICE_DATABASE_URL, commands manage the `sluice up` that runs in the current folder; with --url,
or --profile, they manage the deployment of a gateway from any machine.

Complete commands and options in bash (or zsh, fish) with: eval "$(_SLUICE_COMPLETE=bash_source
sluice)"
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
        module_name, _, name = COMMANDS[cmd_name][0].partition(":")
        try:
            module = importlib.import_module(module_name, "gateway.cli")
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"`sluice {cmd_name}` needs the package {error.name}: "
                "install Sluice with the extra [gateway]."
            ) from error
        command: click.Command = getattr(module, name or "command")
        command.help = command.help or COMMANDS[cmd_name][1]
        return command

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # click would import every command for its help.
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        items = [CompletionItem(name, help=COMMANDS[name][1]) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

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
