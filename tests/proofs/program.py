"""`sluice` whose leases expire soon, and which waits for Redis as long as a busy machine makes it.

python -m tests.proofs.program gateway --port 8080
"""

from tests.support import patient
from tests.support.hasty import shorten_leases

if __name__ == "__main__":
    shorten_leases()
    patient.main()
