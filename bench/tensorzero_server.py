"""TensorZero as an HTTP server: `python tensorzero_server.py CONFIG URL_FILE REDIS_URL`.

PyPI has its Python package only. That chooses the port; the base URL is written to a file. It runs
in TensorZero's own environment.
"""

import signal
import sys
from pathlib import Path

from tensorzero import tensorzero

if __name__ == "__main__":
    config, url_file, redis_url = sys.argv[1:]
    gateway = tensorzero._start_http_gateway(  # noqa: SLF001 - it has no public function for this
        config_file=config,
        clickhouse_url=None,
        postgres_url=None,
        valkey_url=redis_url,
        async_setup=False,
    )
    Path(url_file).write_text(gateway.base_url)
    signal.pause()
