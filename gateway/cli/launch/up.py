"""`sluice up`: run a complete deployment on this machine."""

import asyncio
import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import click

from gateway.cli.launch.bring_up import BringUp
from gateway.cli.launch.launch_plan import DEFAULT_OPERATOR_PORT, DEFAULT_PORT, make_plan
from gateway.cli.terminal import argument, choice, option
from gateway.platform.settings import LOCAL_FOLDER, load_settings
from gateway.records.errors import StartupError

EPILOG = """\
\b
Examples:
  sluice up
  sluice up --model Qwen/Qwen2.5-0.5B -- --context-window 4096
  sluice up --gateways 2 --port 9000
  sluice up --runner pooling
  sluice up --runner transcription --model openai/whisper-tiny
  sluice up --engine scripted -- --scripted-step-seconds 0.01

Options after -- are passed to the worker (see `sluice worker --help`). The folder .sluice in the
current folder contains the database, the data of Redis, the logs, and demo.env with SLUICE_URL,
SLUICE_KEY, SLUICE_MODEL and SLUICE_ADMIN_KEY. While `sluice up` runs, other commands in the same
folder manage it: they read the URLs of Redis and the database from .sluice/cli.env.
"""


def _port_option(flag: str, text: str, default: int) -> click.Option:
    text = f"Port of {text} (first) gateway.  [default: {default}, or the next free one]"
    return option(flag, text, type=click.IntRange(1, 65535))


_PARAMS: Final = [
    _port_option("--port", "the", DEFAULT_PORT),
    _port_option("--operator-port", "/admin and /metrics of the", DEFAULT_OPERATOR_PORT),
    option(
        "--gateways",
        "Number of gateways, on consecutive ports.",
        type=click.IntRange(1, 100),
        default=1,
        show_default=True,
    ),
    option(
        "--model MODEL",
        "Folder or Hugging Face id of the model.  [default: the bundled tiny model]",
    ),
    choice(
        "--engine",
        ("vllm", "scripted"),
        "`scripted` generates placeholder text at a steady rate.",
        default="vllm",
        show_default=True,
    ),
    choice(
        "--runner",
        ("generate", "pooling", "transcription"),
        "`pooling` serves embeddings, scores and ranks in place of completions, `transcription` "
        "the audio endpoints with a Whisper model.",
        default="generate",
        show_default=True,
    ),
    argument("worker_arguments", nargs=-1, type=click.UNPROCESSED),
]


@click.command("up", epilog=EPILOG, params=_PARAMS)
@click.pass_obj
def command(sluice: tuple[str, ...], /, **given: Any) -> None:
    """Run Redis, a database, gateways, a worker and background jobs on loopback, until Ctrl-C."""
    with _own_folder() as folder, ExitStack() as held:
        plan = make_plan(folder, load_settings(), held, sluice=sluice, **given)
        asyncio.run(BringUp(plan).run())


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Hold the folder, which only this user can enter.

    The system releases its lock however this process ends.
    """
    folder = LOCAL_FOLDER.absolute()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise StartupError(f"Cannot use the folder {folder}: {error.strerror}.") from error
    with (folder / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StartupError(
                f"`sluice up` is already running in this folder ({folder} is in use). "
                "Stop it with Ctrl-C in its terminal, or use another folder."
            ) from error
        yield folder
