"""`sluice` that waits for Redis and for its sandboxes as long as a busy machine makes it.

python -m tests.support.patient gateway --port 8080

Beside other tests a process may wait for the processor for seconds, and would answer 503. What a test shows is
to depend on what it does. Tests in which Redis stops use the product's own time-outs.
"""

import sys
from functools import partial

from tests.support.patience import PATIENCE_SECONDS


def wait_for_redis() -> None:
    """Let every request of this process wait for Redis until it answers or its connection ends."""
    from gateway import redis_client

    # These are final for the product, which reads them as globals of their modules.
    vars(redis_client).update(
        CONNECT_TIMEOUT_SECONDS=PATIENCE_SECONDS,
        COMMAND_TIMEOUT_SECONDS=PATIENCE_SECONDS,
        FLUSH_TIMEOUT_SECONDS=PATIENCE_SECONDS,
    )


def wait_for_sandboxes() -> None:
    """Let only processor time decide what becomes of a structure in this process."""
    from gateway.api import context
    from gateway.structure import pool

    settings = partial(
        pool.SandboxSettings, wait_seconds=PATIENCE_SECONDS, task_seconds=PATIENCE_SECONDS
    )
    vars(context).update(SandboxSettings=settings)
    vars(pool).update(_START_SECONDS=PATIENCE_SECONDS, _LOAD_SECONDS=PATIENCE_SECONDS)


def main() -> None:
    """Run the command that the first argument names."""
    from gateway.cli import main as sluice

    wait_for_redis()
    if sys.argv[1] == "gateway":
        wait_for_sandboxes()
    sluice(prog_name="sluice")


if __name__ == "__main__":
    main()
