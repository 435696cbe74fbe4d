"""A real S3 server on loopback: moto's."""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.processes import free_port, spawn, stop, wait_until
from tests.support.stack import http_status

BUCKET = "bucket"


@contextmanager
def running_s3() -> Iterator[dict[str, str]]:
    """Run a server with one bucket; yield the standard variables of its clients."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = spawn(
        sys.executable,
        *("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: http_status(f"{url}/moto-api/data.json") == 200, what="the S3 server")
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    finally:
        stop(process)
