"""`sluice` with short leases and long Redis timeouts, for busy machines.

python -m tests.failures.proofs.program gateway --port 8080
"""

from tests.support import long_timeouts
from tests.support.short_leases import shorten_leases

if __name__ == "__main__":
    shorten_leases()
    long_timeouts.main()
