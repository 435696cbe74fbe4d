"""A client in a separate process, which can be killed at any moment."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.stack import MODEL

_PROGRAM = """
import http.client, sys
host, key = sys.argv[1:]
connection = http.client.HTTPConnection(host)
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
connection.request("POST", "/v1/completions", sys.stdin.buffer.read(), headers)
for line in connection.getresponse():
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""


class Caller:
    """A request in progress."""

    def __init__(self, url: str, key: str, body: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, url.removeprefix("http://"), key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"model": MODEL, **body}).encode())
        self._process.stdin.close()

    def read_events(self, number: int) -> list[Any]:
        """Wait until so many server-sent events have arrived, and return them."""
        events: list[Any] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"data: "):
                events.append(json.loads(line.removeprefix(b"data: ")))
            if len(events) == number:
                return events
        raise EOFError(f"the answer ended after {len(events)} of {number} events")

    def kill(self) -> bytes:
        """Kill the process; return the part of the response that was not read yet."""
        self._process.kill()
        assert self._process.stdout is not None
        rest = self._process.stdout.read()
        self._process.wait(5)
        self._process.stdout.close()
        return rest

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process.returncode is None:
            self.kill()


@contextmanager
def calling(url: str, key: str, **body: Any) -> Iterator[Caller]:
    """Send a request from another process for the length of a block."""
    caller = Caller(url, key, body)
    try:
        yield caller
    finally:
        caller.close()
