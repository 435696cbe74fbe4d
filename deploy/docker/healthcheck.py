"""Health check: exit with 0 if a URL of this container returns 200, else with 1 and a message.

    python healthcheck.py http://127.0.0.1:8080/readyz

The images have Python but no curl. Only the standard library is used, so that a check is cheap.
"""

import http.client
import sys
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 3.0
"""Less than Docker's timeout, so that this program can report the reason."""


def main(url: str) -> int:
    """Request the URL once and return the exit status."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        text = answer.read(200).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        print(f"{url} does not answer: {error}")
        return 1
    finally:
        connection.close()
    if answer.status != http.client.OK:
        print(f"{url} answers {answer.status}: {text}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
