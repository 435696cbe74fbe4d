"""`sluice` with short leases and long Redis timeouts, and workers, for busy machines.

python -m tests.failures.proofs.program gateway --port 8080
python -m tests.failures.proofs.program worker
"""

import sys

from tests.support import long_timeouts
from tests.support.patience import PATIENCE_SECONDS
from tests.support.short_leases import shorten_leases


def work() -> None:
    """Run a worker whose announcements last, though it may get no CPU for seconds."""
    from worker import registration
    from worker.__main__ import command
    from worker.queue import held

    lifetime_ms = round(PATIENCE_SECONDS * 1000)
    for module in (held, registration):
        vars(module).update(CARD_TTL_MS=lifetime_ms)
    command(sys.argv[2:], prog_name="python -m worker")


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work()
    else:
        shorten_leases()
        long_timeouts.main()
