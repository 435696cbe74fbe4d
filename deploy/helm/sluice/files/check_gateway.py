"""Script for `helm test`: checks that a gateway is ready and requires a key. Takes its base URL.

It uses only the standard library, and is easy to read for operators whose test failed.
"""

import json
import sys
import time
import urllib.error
import urllib.request

PATIENCE_SECONDS = 60
PAUSE_SECONDS = 2


def get(url: str) -> tuple[int, bytes]:
    """Return status and body of a GET; status 0 and the reason if there is no response."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return 0, str(error).encode()


def main(base: str) -> None:
    """Raise SystemExit with a message if a check fails."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (ready := get(f"{base}/readyz"))[0] != 200:
        if time.monotonic() > deadline:
            raise SystemExit(f"The gateway is not ready: {ready[0]} {ready[1].decode()}")
        time.sleep(PAUSE_SECONDS)
    status, body = get(f"{base}/v1/models")
    if status != 401 or "error" not in json.loads(body):
        raise SystemExit(f"A request without a key should be refused with 401, not {status}")
    print("The gateway is ready, and asks for a key.")


if __name__ == "__main__":
    main(sys.argv[1])
