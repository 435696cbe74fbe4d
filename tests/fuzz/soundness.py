"""Whether a deployment is as it was."""

import httpx

from tests.e2e.examples import LONG
from tests.support.stack import MODEL, Stack


def check_sound(stack: Stack) -> None:
    """Check that every process lives, none has logged a bug, and the engine says what it always says."""
    assert {name: process.poll() for name, process in stack.processes.items()} == dict.fromkeys(
        stack.processes
    )
    for name in stack.processes:
        log = stack.log(name)
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:5000]
    body = {
        "model": MODEL,
        "prompt": LONG.prompt,
        "max_tokens": LONG.max_tokens,
        "temperature": 0,
    }
    for url in stack.gateways:
        response = httpx.post(
            f"{url}/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {stack.key()}"},
            timeout=60,
        )
        assert response.json()["choices"][0]["text"] == LONG.completion
