"""`prefixd serve` with leases of PREFIXD_TEST_LEASE_S seconds, so that a test need not wait for three times thirty.

Nothing else differs: the figure is set before any module of the server has read it.
"""

import os

from cache_server import leases

if __name__ == "__main__":
    leases.LEASE_S = float(os.environ["PREFIXD_TEST_LEASE_S"])
    from cache_server.cli import main

    main()
