"""`sluice` with long timeouts for Redis, its database and its sandboxes, for busy machines.

    python -m tests.support.long_timeouts gateway --port 8080

With other tests, any process may get no CPU for seconds, and requests would fail with "try again".
Tests in which a store stops, and chaos, use the product's timeouts.
"""

import sys
from functools import partial

from tests.support.patience import PATIENCE_SECONDS


def wait_for_sandboxes() -> None:
    """Limit the check of a structure only by CPU time in this process."""
    from gateway.completions.structure.sandbox import pool
    from gateway.process import services

    settings = partial(
        pool.SandboxSettings, wait_seconds=PATIENCE_SECONDS, task_seconds=PATIENCE_SECONDS
    )
    # The product declares them final, and reads them as globals of their modules.
    vars(services).update(SandboxSettings=settings)
    vars(pool).update(_START_SECONDS=PATIENCE_SECONDS, _LOAD_SECONDS=PATIENCE_SECONDS)


def wait_for_stores() -> None:
    """Let requests wait for Redis and the database. Refused connections fail at once."""
    from gateway.completions.stored import service as responses
    from gateway.limits import reservations as endings
    from gateway.platform import redis_client
    from gateway.platform.database import engine
    from gateway.process import health

    vars(redis_client).update(
        CONNECT_TIMEOUT_SECONDS=PATIENCE_SECONDS,
        COMMAND_TIMEOUT_SECONDS=PATIENCE_SECONDS,
        SHARED_TIMEOUT_SECONDS=PATIENCE_SECONDS,
    )
    vars(engine).update(TIMEOUT_SECONDS=PATIENCE_SECONDS)
    vars(responses).update(CANCEL_SECONDS=PATIENCE_SECONDS)
    vars(health).update(PING_SECONDS=PATIENCE_SECONDS)
    vars(endings).update(WAIT_SECONDS=PATIENCE_SECONDS)


def main() -> None:
    """Run the command that the first argument names."""
    from gateway.cli.main import main as sluice

    if sys.argv[1] == "gateway":
        wait_for_sandboxes()
        wait_for_stores()
    sluice(prog_name="sluice", obj=(sys.executable, "-P", "-m", "tests.support.long_timeouts"))


if __name__ == "__main__":
    main()
