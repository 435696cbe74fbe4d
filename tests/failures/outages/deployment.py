"""A whole deployment whose Redis becomes unavailable, and requests with known responses."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.failures.proofs.accounts import Credential, open_accounts
from tests.failures.proofs.client import Answer, ask
from tests.failures.proofs.conftest import COMPLETION_PRICE, PROMPT_PRICE
from tests.failures.proofs.ledger import LEASE_AND_SWEEP_SECONDS, Books
from tests.failures.proofs.until import until
from tests.support.events import parse_chunks, texts_by_choice
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port
from tests.support.redis_server import RedisServer
from tests.support.sentinels import WatchedRedis
from tests.support.stack import MODEL, REPOSITORY, Stack, metric, running_stack

GATEWAYS: Final = ("gateway-1", "gateway-2")
WORKERS: Final = ("worker-1", "worker-2")
FAST_MODEL: Final = "sluice-fast"
"""The text of the scripted engine at full speed: it depends only on prompt and seed."""
SLOW_STEP_SECONDS: Final = 0.02
SHOWN_CHARACTERS: Final = 6_000
HASTY_GATEWAY: Final = {
    "SLUICE_RESUME_AFTER": "2.5",
    # Longer than a balancer takes to notice.
    "SLUICE_DRAIN_DELAY": "1",
}
HASTY_WORKER: Final = {
    "SLUICE_LEASE_SECONDS": "2",
    # Shorter than most requests, so that workers return some of them to the queue.
    "SLUICE_DRAIN_SECONDS": "1",
}
LIMITS: Final = {
    "requests_per_minute": 1_000_000,
    "tokens_per_day": 10**9,
    "concurrent_requests": 1_000,
    "budget_micros": 10**9,
}

GATEWAY_METRICS: Final = (
    "sluice_gateway_requests_in_progress",
    "sluice_gateway_jobs_in_flight",
    "sluice_queue_waiting_jobs",
    "sluice_queue_leased_jobs",
)
WORKER_METRICS: Final = ("sluice_worker_sequences_running", "sluice_worker_jobs_running")


@dataclass(slots=True)
class Wish:
    """A request and its expected response."""

    body: dict[str, Any]
    texts: dict[int, str] = field(default_factory=dict)
    """By choice."""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """The number of sequences that an engine generates for it."""
        prompt = self.body["prompt"]
        each: int = self.body.get("best_of", self.body.get("n", 1))
        return each * (len(prompt) if isinstance(prompt, list) else 1)

    def check(self, answer: Answer) -> None:
        """Raise AssertionError unless the response equals the expected one."""
        reported = answer.body[-300:]
        assert answer.status == 200, (answer.status, reported)
        assert answer.is_complete, reported
        texts = texts_of(answer)
        assert texts.keys() == self.texts.keys()
        for choice, text in texts.items():
            pairs = zip(text, self.texts[choice], strict=False)
            same = next((n for n, (is_, should) in enumerate(pairs) if is_ != should), "its end")
            assert text == self.texts[choice], f"differs from character {same} on: {reported!r}"
        assert answer.usage is not None, reported
        for name in ("prompt_tokens", "completion_tokens"):
            assert answer.usage[name] == self.usage[name], (answer.usage, self.usage)


def texts_of(answer: Answer) -> dict[int, str]:
    """Return the text of each choice. Raises AssertionError unless each has ended exactly once."""
    if answer.is_stream:
        return texts_by_choice(parse_chunks(answer.body))
    return {choice["index"]: choice["text"] for choice in json.loads(answer.body)["choices"]}


def long_wishes(seconds: float) -> list[Wish]:
    """Return requests of all kinds that take so long each when undisturbed."""
    tokens = int(seconds / SLOW_STEP_SECONDS)
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    bodies: list[dict[str, Any]] = [
        {"prompt": "one", "seed": 1, "stop": ["never"], **streamed},
        {"prompt": "two", "temperature": 0, **streamed},
        {"prompt": "three", "seed": 3, "n": 2, **streamed},
        {"prompt": "four", "seed": 4, **streamed},
        {"prompt": ["five", "six"], "temperature": 0, **streamed},
        {"prompt": "seven", "seed": 7},
        {"prompt": "eight", "n": 2, "best_of": 3, "seed": 8},
    ]
    return [Wish({"max_tokens": tokens, "ignore_eos": True, **body}) for body in bodies]


class Deployment:
    """Two gateways, two slow workers and a fast one, background jobs."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._are_running = False

    async def customer(self, name: str) -> Credential:
        """Add a tenant with limits of every kind that are never reached."""
        async with open_accounts(self.stack) as accounts:
            await accounts.tenant(name, limits=LIMITS)
            return await accounts.key(name, limits=LIMITS)

    async def serves(self, key: Credential) -> None:
        """Wait until both gateways have both models."""
        async with asyncio.timeout(2 * PATIENCE_SECONDS):
            for url in self.stack.gateways:
                for model in (MODEL, FAST_MODEL):
                    while (
                        await ask(url, key.text, model=model, prompt="x", max_tokens=1)
                    ).status != 200:
                        await asyncio.sleep(0.1)

    async def learn(self, wishes: Sequence[Wish], key: Credential) -> None:
        """Record the expected responses."""
        bodies = [{**wish.body, "model": FAST_MODEL} for wish in wishes]
        answers = await asyncio.gather(*(insist(self.stack.url, key, body) for body in bodies))
        for wish, answer in zip(wishes, answers, strict=True):
            assert answer.status == 200, answer.body
            assert answer.usage is not None
            wish.texts, wish.usage = texts_of(answer), answer.usage

    def begin(self, wishes: Sequence[Wish], key: Credential) -> list[asyncio.Task[Answer]]:
        """Send the requests to both gateways in turn, and wait until they run."""
        urls = self.stack.gateways
        self._are_running = False
        return [
            asyncio.create_task(
                insist(urls[number % len(urls)], key, wish.body, is_over=lambda: self._are_running)
            )
            for number, wish in enumerate(wishes)
        ]

    async def running(self, sequences: int) -> None:
        """Wait until the slow workers run so many sequences."""

        def are_running() -> bool:
            counts = [
                metric(self.stack.worker_url(name), "sluice_worker_sequences_running")
                for name in WORKERS
            ]
            return sum(counts) >= sequences

        await until(are_running, what=f"{sequences} sequences running")
        self._are_running = True

    async def quiet(self, books: Books) -> None:
        """Wait until nothing of any request is left, in Redis or in a process."""
        await books.settled(seconds=LEASE_AND_SWEEP_SECONDS)
        await books.nothing_left()
        for url in self.stack.gateways:
            for name in GATEWAY_METRICS:
                await self._zero(self.stack.operators_of(url), name)
        for worker in WORKERS:
            for name in WORKER_METRICS:
                await self._zero(self.stack.worker_url(worker), name)

    async def _zero(self, url: str, name: str) -> None:
        await until(lambda: metric(url, name) == 0, what=f"{name} of {url} being 0")


async def insist(
    url: str, key: Credential, body: dict[str, Any], *, is_over: Callable[[], bool] = lambda: False
) -> Answer:
    """Retry after `Retry-After` until `is_over`: a busy gateway may miss a reply of Redis."""
    while True:
        answer = await ask(url, key.text, **body)
        is_refusal = answer.status == 503 and answer.error["code"] == "store_unavailable"
        if not is_refusal or is_over():
            return answer
        await asyncio.sleep(float(answer.headers["retry-after"]))


@contextmanager
def deployed(redis: RedisServer | WatchedRedis, *, code: Path = REPOSITORY) -> Iterator[Deployment]:
    """Start a Redis and run a deployment of a checkout on it for the length of a block."""
    with running_stack(redis=redis) as stack:
        stack.code = code
        asyncio.run(_set_price(stack))
        stack.program = "tests.support.short_leases"
        gateways = {
            name: stack.launch_gateway(name, HASTY_GATEWAY, port=free_port()) for name in GATEWAYS
        }
        stack.start_jobs()
        stack.start_beat()
        for name in WORKERS:
            stack.start_worker(name, **slow_worker())
        stack.start_worker("fast", **_worker(FAST_MODEL, 0))
        for name, address in gateways.items():
            stack.await_gateway(name, address)
        try:
            yield Deployment(stack)
        finally:
            for name in stack.processes:
                # Printed if a test fails.
                print(f"--- {name}\n{stack.log(name)[-SHOWN_CHARACTERS:]}")  # noqa: T201


def slow_worker() -> dict[str, Any]:
    """Return the variables of a worker of MODEL."""
    return _worker(MODEL, SLOW_STEP_SECONDS) | HASTY_WORKER


def _worker(model: str, step_seconds: float) -> dict[str, Any]:
    return {
        "SLUICE_ENGINE": "scripted",
        "SLUICE_MODEL_NAME": model,
        "SLUICE_SCRIPTED_STEP_SECONDS": str(step_seconds),
    }


async def _set_price(stack: Stack) -> None:
    async with open_accounts(stack) as accounts:
        await accounts.price(prompt=PROMPT_PRICE, completion=COMPLETION_PRICE)
