"""`sluice up`: run a complete deployment on this machine."""

import asyncio
import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from gateway.cli.launch.bring_up import BringUp
from gateway.cli.launch.launch_plan import DEFAULT_OPERATOR_PORT, DEFAULT_PORT, UpOptions, make_plan
from gateway.platform.settings import LOCAL_FOLDER, load_settings
from gateway.records.errors import StartupError

EPILOG = """\
\b
Examples:
  sluice up
  sluice up --model Qwen/Qwen2.5-0.5B --max-model-len 4096
  sluice up --gateways 2 --port 9000
  sluice up --engine scripted -- --scripted-step-seconds 0.01

Options after -- are passed to the worker (see `sluice worker --help`). The folder .sluice in the
current folder contains the database, the data of Redis, the logs, and demo.env with SLUICE_URL,
SLUICE_KEY, SLUICE_MODEL and SLUICE_ADMIN_KEY. While `sluice up` runs, other commands in the same
folder manage it: they read the URLs of Redis and the database from .sluice/cli.env.
"""


@click.command("up", epilog=EPILOG)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Port of the (first) gateway.  [default: {DEFAULT_PORT}, or the next free one]",
)
@click.option(
    "--operator-port",
    type=click.IntRange(1, 65535),
    help="Port of /admin and /metrics of the (first) gateway.  "
    f"[default: {DEFAULT_OPERATOR_PORT}, or the next free one]",
)
@click.option(
    "--gateways",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Number of gateways, on consecutive ports.",
)
@click.option(
    "--workers", type=click.IntRange(1, 100), default=1, show_default=True, help="Workers."
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Folder or Hugging Face id of the model.  [default: the bundled tiny model]",
)
@click.option(
    "--engine",
    type=click.Choice(["vllm", "scripted"]),
    default="vllm",
    show_default=True,
    help="`scripted` generates placeholder text at a steady rate.",
)
@click.option(
    "--max-model-len",
    "--context-window",
    "context_window",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Maximum tokens of prompt and completion.  [default: the model's maximum]",
)
@click.option("--redis-url", metavar="URL", help="Use this Redis server instead of starting one.")
@click.option(
    "--database-url", metavar="URL", help="Use this database instead of a file in .sluice."
)
@click.argument("worker_arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    sluice: tuple[str, ...],
    *,
    port: int | None,
    operator_port: int | None,
    gateways: int,
    workers: int,
    model: str | None,
    engine: str,
    context_window: int | None,
    redis_url: str | None,
    database_url: str | None,
    worker_arguments: tuple[str, ...],
) -> None:
    """Run Redis, a database, gateways, a worker and background jobs on loopback, until Ctrl-C."""
    options = UpOptions(
        sluice=sluice,
        port=port,
        operator_port=operator_port,
        gateways=gateways,
        workers=workers,
        model=model,
        engine=engine,
        context_window=context_window,
        redis_url=redis_url,
        database_url=database_url,
        worker_arguments=worker_arguments,
    )
    folder = _own_folder()
    (folder / "logs").mkdir(exist_ok=True)
    with _only_one(folder), ExitStack() as held:
        asyncio.run(BringUp(make_plan(options, folder, load_settings(), held)).run())


def _own_folder() -> Path:
    """Return the folder, which only this user can enter."""
    folder = LOCAL_FOLDER.absolute()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise StartupError(f"Cannot use the folder {folder}: {error.strerror}.") from error
    return folder


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it however this process ends."""
    with (folder / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StartupError(
                f"`sluice up` is already running in this folder ({folder} is in use). "
                "Stop it with Ctrl-C in its terminal, or use another folder."
            ) from error
        yield
