"""`sluice worker`: run a worker process.

The gateway's code never imports the worker's code, so this command starts it as a program.
"""

import os
import sys

import click

PROGRAM = (sys.executable, "-P", "-m", "worker")
"""With `-P`, Python does not import a folder called `worker` in the current folder by mistake."""


@click.command(
    "worker",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run a worker; `sluice worker --help` lists its options."""
    os.execv(PROGRAM[0], [*PROGRAM, *arguments])  # noqa: S606 - our own program, without a shell
