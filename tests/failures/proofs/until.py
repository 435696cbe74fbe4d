"""Waits for the progress of other processes, however busy the machine is."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from tests.failures.proofs.client import Answer
from tests.support.stack import Stack, metric

PATIENCE_SECONDS = 120.0
"""Only a failure takes that long."""
PAUSE_SECONDS = 0.05


async def until(condition: Callable[[], bool], *, what: str) -> None:
    """Wait until a slow condition holds. Raises TimeoutError with `what`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {PATIENCE_SECONDS} s")
        await asyncio.sleep(PAUSE_SECONDS)


def engine_tokens(stack: Stack, worker: str = "worker") -> int:
    """Return the completion tokens that the engine has counted."""
    return int(metric(stack.worker_url(worker), "sluice_worker_completion_tokens_total"))


async def generating(
    stack: Stack, *, after: int | None = None, tokens: int = 20, worker: str = "worker"
) -> None:
    """Wait until the engine has counted more tokens, by default more than now."""
    after = await asyncio.to_thread(engine_tokens, stack, worker) if after is None else after
    await until(
        lambda: engine_tokens(stack, worker) >= after + tokens, what="tokens being generated"
    )


async def running(stack: Stack, sequences: int, worker: str = "worker") -> None:
    """Wait until the engine runs so many sequences."""
    url = stack.worker_url(worker)
    await until(
        lambda: metric(url, "sluice_worker_sequences_running") >= sequences,
        what=f"{sequences} sequences running",
    )


async def leave(request: "asyncio.Task[Answer]") -> None:
    """Disconnect the client of a running request."""
    assert not request.done()
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request
