"""`sluice` whose sandboxes have as long as they need: only processor time decides what becomes of a structure.

python -m tests.support.patient gateway --port 8080
"""

from functools import partial

from tests.support.patience import PATIENCE_SECONDS


def wait_for_sandboxes() -> None:
    """Let structures wait for the processor in this process, which others may have for seconds."""
    from gateway.api import context
    from gateway.structure import pool

    settings = partial(
        pool.SandboxSettings, wait_seconds=PATIENCE_SECONDS, task_seconds=PATIENCE_SECONDS
    )
    # These are final for the product, which reads them as globals of their modules.
    vars(context).update(SandboxSettings=settings)
    vars(pool).update(_START_SECONDS=PATIENCE_SECONDS, _LOAD_SECONDS=PATIENCE_SECONDS)


def main() -> None:
    """Run the command that the first argument names."""
    from gateway.cli import main as sluice

    wait_for_sandboxes()
    sluice(prog_name="sluice")


if __name__ == "__main__":
    main()
