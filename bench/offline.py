"""vLLM's offline `LLM` as a system under test: all prompts of a load at once, without a server."""

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from bench.client import Answer, Request
from bench.measure import TIMEOUT_SECONDS, MeasureError
from bench.processes import Consumption, Meter
from bench.scenarios import Scenario, prompts
from bench.starting import MODEL, free_port, start
from bench.systems import Deployment
from bench.vllm_server import ENVIRONMENT, READY_SECONDS, VllmServer


class OfflineVllm(VllmServer):
    """A running `bench.offline_program`, whose URL is no server of completions."""

    name = "offline vLLM"
    front = "LLM"

    def drive(self, scenario: Scenario, *, seed: str) -> tuple[list[Answer], Consumption]:
        """Complete a scenario's prompts at once. Raises MeasureError."""
        texts = list(islice(prompts(seed, scenario.prompt_words), scenario.number_of_requests))
        load = {
            "prompts": texts,
            "tokens": scenario.completion_tokens,
            "temperature": 1.0 if scenario.temperature is None else scenario.temperature,
        }
        meter = Meter(self.groups(1))
        meter.start()
        sent = time.perf_counter()
        try:
            body = json.dumps(load).encode()
            with urllib.request.urlopen(self._url, body, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - our own process
                found = json.loads(response.read())
        except OSError as error:
            raise MeasureError(f"{self.name} failed {scenario.title}: {error}") from error
        used = meter.stop()
        ended = time.perf_counter()
        return [
            self._answer(text, scenario.completion_tokens, *each, sent=sent, ended=ended)
            for text, each in zip(texts, found, strict=True)
        ], used

    def _answer(
        self, prompt: str, expected: int, tokens: int, seconds: float, *, sent: float, ended: float
    ) -> Answer:
        request = Request(model=MODEL, prompt=prompt, completion_tokens=expected, streamed=False)
        answer = Answer(request, "", sent, [sent + seconds], ended, completion_tokens=tokens)
        if tokens != expected:
            answer.error = f"{tokens} completion tokens instead of {expected}"
        return answer


@contextmanager
def running_offline_vllm(deployment: Deployment, folder: Path) -> Iterator[OfflineVllm]:
    """Run the process within a block."""
    port = free_port()
    arguments = json.dumps(deployment.vllm_arguments())
    program = [sys.executable, "-m", "bench.offline_program", str(port), arguments]
    server = start("offline vllm", program, folder=folder, environment=ENVIRONMENT)
    try:
        url = f"http://127.0.0.1:{port}/"
        server.wait_until_ready(url, seconds=READY_SECONDS)
        yield OfflineVllm(server, url)
    finally:
        server.stop()
