"""`sluice worker` and `sluice host`: run a worker process, or a host of several models in turns.

The gateway's code never imports the worker's code, so these commands start it as a program.
"""

import sys

import click

from gateway.platform.concurrency.parent_death import become

PROGRAM = (sys.executable, "-P", "-m", "worker")
"""With `-P`, Python does not import a folder called `worker` in the current folder by mistake."""


def program_command(name: str, program: tuple[str, ...]) -> click.Command:
    """Return a command that becomes a program of the worker's code, with all its arguments."""

    @click.command(
        name,
        help=f"Run a {name}; `sluice {name} --help` lists its options.",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def start(arguments: tuple[str, ...]) -> None:
        become([*program, *arguments])

    return start


command = program_command("worker", PROGRAM)

host = program_command("host", (*PROGRAM[:-1], "worker.hosting"))
CHECK = (*PROGRAM[:-1], "worker.check")
"""The program that checks a deployment from the place of a worker."""
