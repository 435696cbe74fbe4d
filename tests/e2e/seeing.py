"""A worker with a tiny model that sees, and pictures to show it."""

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from tests.e2e.seeds.calling import Caller
from tests.support.processes import wait_until
from tests.support.stack import CHECKPOINT, ENGINE_START_SECONDS, REPOSITORY, Stack

SEEING = "sluice-seeing"
AROUND_IMAGE = 3
"""Tokens that the model puts around those of an image."""


def picture(color: str, kind: str = "jpeg") -> str:
    """Return a picture of one color as a data URI."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def make_seeing_model(folder: Path) -> None:
    """Write the model in a process of its own: what that imports is not for the tests'."""
    program = [sys.executable, "-m", "tests.support.vision_model", str(CHECKPOINT), str(folder)]
    subprocess.run(program, check=True, cwd=REPOSITORY, capture_output=True, timeout=240)


@contextmanager
def seeing_worker(stack: Stack, folder: Path) -> Iterator[Caller]:
    """Serve the model for the length of a block; yields a key that may use it only."""
    stack.start_worker(
        "seeing",
        ready_seconds=ENGINE_START_SECONDS,
        SLUICE_MODEL_PATH=str(folder),
        SLUICE_MODEL_NAME=SEEING,
        SLUICE_MAX_SEQUENCES="8",
    )
    caller = Caller(stack.url, stack.key("documents", allowed_models=(SEEING,)))
    wait_until(
        lambda: caller.get(f"/v1/models/{SEEING}").json().get("ready", False),
        seconds=10,
        what=f"{SEEING} being known as ready",
    )
    try:
        yield caller
    finally:
        caller.close()
        stack.stop("seeing")
