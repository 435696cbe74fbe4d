"""Checks that a deployment is as it was."""

import httpx

from tests.e2e.examples import LONG
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack, http_status, metric

PROCESSES = ("gateway-1", "gateway-2", "worker")


def check_sound(stack: Stack, *, text: str | None = None) -> None:
    """Check that every process runs, none has logged a bug, and the engine's output is as expected.

    The output of a scripted engine need only be the same through each gateway.
    """
    urls = [*stack.gateways, stack.worker_url()]
    assert {url: http_status(f"{url}/readyz") for url in urls} == dict.fromkeys(urls, 200)
    assert metric(stack.worker_url(), "sluice_worker_engine_restarts_total") == 0
    for name in PROCESSES:
        log = stack.log(name)
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:5000]
    body = {
        "model": MODEL,
        "prompt": LONG.prompt,
        "max_tokens": LONG.max_tokens,
        "temperature": 0,
    }
    outputs = {_output(url, stack.key(), body) for url in stack.gateways}
    assert len(outputs) == 1
    assert text is None or outputs == {text}


def _output(url: str, key: str, body: dict[str, object]) -> str:
    headers = {"authorization": f"Bearer {key}"}
    response = httpx.post(
        f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS
    )
    return str(response.json()["choices"][0]["text"])
