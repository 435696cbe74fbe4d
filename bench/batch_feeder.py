"""Feeds batch jobs: `python -m bench.batch_feeder REDIS_URL WINDOW PROMPT_TOKENS TOKENS LINES`.

It follows its jobs as a gateway does, and requeues those that are returned. A window of jobs is in
flight at any time. Completions have between half and one and a half times TOKENS.
"""

import asyncio
import secrets
import sys
from random import Random

import uvloop

from bench.starting import MODEL
from common import clock
from contract.messages import GenerationJob, JobFailed, JobFinished
from contract.prompts import packed
from contract.sampling import SamplingSpec
from contract.tier import ServiceTier
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.generation import Generation
from gateway.models.catalogue import Catalogue
from gateway.platform.redis_client import connect, shared_connection

_TENANT = "batches"
_DEADLINE_MS = 3_600_000
_UNREAD_BYTES = 1 << 20
_FIRST_TOKEN, _TOKENS = 300, 1_000
"""Ids of ordinary tokens of the demo model."""


class _Feeder:
    def __init__(self, dispatcher: Dispatcher, *, prompt_tokens: int, tokens: int) -> None:
        self._dispatcher = dispatcher
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens
        self._random = Random(dispatcher.gateway)

    async def feed(self, window: int, lines: int) -> None:
        """Run all lines, at most a window of them at once."""
        left = iter(range(lines))

        async def run() -> None:
            for _ in left:
                await self._run_line()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(window):
                tasks.create_task(run())

    async def _run_line(self) -> None:
        generation, job = Generation(max_unread_bytes=_UNREAD_BYTES), self._job()
        await self._dispatcher.enqueue(MODEL, [job], weight=1.0, generation=generation)
        while True:
            for _, message in await generation.replies():
                if isinstance(message, JobFailed):
                    raise SystemExit(f"a line failed: {message.code} {message.message}")
                if isinstance(message, JobFinished):
                    if message.completion_tokens != job.max_tokens:
                        raise SystemExit(f"a line has {message.completion_tokens} tokens")
                    return

    def _job(self) -> GenerationJob:
        gateway, handle = self._dispatcher.gateway, self._dispatcher.next_handle()
        last = _FIRST_TOKEN + _TOKENS - 1
        prompt = [self._random.randint(_FIRST_TOKEN, last) for _ in range(self._prompt_tokens)]
        return GenerationJob(
            id=f"{gateway}-{handle}",
            handle=handle,
            gateway=gateway,
            tenant=_TENANT,
            cache_salt=_TENANT,
            prompt_token_ids=packed(prompt),
            max_tokens=self._random.randint(self._tokens // 2, self._tokens * 3 // 2),
            sampling=SamplingSpec(seed=handle, temperature=0.0, ignore_eos=True),
            deadline_ms=clock.now_ms() + _DEADLINE_MS,
            service_tier=ServiceTier.BATCH,
        )


async def _main(
    redis_url: str, *, window: int, prompt_tokens: int, tokens: int, lines: int
) -> None:
    redis = connect(redis_url, max_connections=64)
    catalogue = Catalogue(shared_connection(redis))
    dispatcher = Dispatcher(
        gateway=f"batches-{secrets.token_hex(4)}",
        client=redis,
        catalogue=catalogue,
        max_waiting_jobs=10_000,
        max_waiting_jobs_of_tenant=10_000,
        queue_timeout_seconds=60.0,
        resume_after_seconds=5.0,
    )
    await dispatcher.beat()
    await catalogue.refresh()
    running = asyncio.create_task(dispatcher.run())
    feeder = _Feeder(dispatcher, prompt_tokens=prompt_tokens, tokens=tokens)
    try:
        await feeder.feed(window, lines)
    finally:
        running.cancel()
        await dispatcher.aclose()
        await redis.aclose()


if __name__ == "__main__":
    url, *numbers = sys.argv[1:]
    window, prompt_tokens, tokens, lines = map(int, numbers)
    uvloop.run(_main(url, window=window, prompt_tokens=prompt_tokens, tokens=tokens, lines=lines))
