"""The owner of a stream dies at each of its commands to Redis, before it or after it."""

import asyncio
import itertools
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from common.tasks import end_task
from contract import keys
from contract.scripts import CommandExecutor
from gateway.billing.ledger.sweep import Sweep
from gateway.records.usage_record import Outcome
from tests.gateway.completions.stored.conftest import OpenHouse
from tests.gateway.completions.stored.house import TENANT, House, Reader, usage_records
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS

ID = "cmpl-killed"
TEXTS = ("a", "b", "c")
BUCKET = keys.bucket_of(TENANT)


class Mortal:
    """Sends commands until a given one of the request. That one is sent, or not; nothing returns.

    Args:
        executor: what sends them.
        last: the number of the last command, from 1.
        is_sent: whether Redis receives it.
    """

    def __init__(self, executor: CommandExecutor, *, last: int, is_sent: bool) -> None:
        self._executor = executor
        self._left = last
        self._is_sent = is_sent
        self.died = asyncio.Event()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command and return its reply, if the gateway lives."""
        if any(ID in str(each) for each in args):
            self._left -= 1
        if self._left <= 0 and not self.died.is_set():
            self.died.set()
            if self._is_sent:
                await self._executor.execute_command(*args, **options)
        if self.died.is_set():
            await asyncio.Event().wait()
        return await self._executor.execute_command(*args, **options)


async def work(worker: FakeWorker, ended: list[str]) -> None:
    """Run each job that is claimed to its end, and note its id."""
    while True:
        claim = await worker.claim_one()
        resumption = claim.job.resumption
        done = len(resumption.sequences[0].token_ids) if resumption else 0
        for text in TEXTS[done:-1]:
            await worker.say(claim, text)
            await asyncio.sleep(0.03)
        await worker.conclude(claim, *TEXTS[max(done, len(TEXTS) - 1) :])
        ended.append(claim.job.id)


async def stream(house: House) -> str:
    """Submit a stream, read it to its end, and settle it, as the API does."""
    request = await house.submit(request_id=ID)
    reader = await Reader(request.generation).to_the_end()
    await house.responses.of(request.settlement).finish()
    return reader.text


async def settle_abandoned(redis: "Redis") -> None:
    """Let leases expire, and run the sweep."""
    expired: Any = dict.fromkeys(await redis.zrange(keys.open_requests(BUCKET), 0, -1), 1)
    if expired:
        await redis.zadd(keys.open_requests(BUCKET), expired)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await redis.zcard(keys.open_requests(BUCKET)):
            await Sweep(redis).run()


@pytest.mark.parametrize("is_sent", [False, True], ids=["before", "after"])
async def test_stream_whose_owner_dies_at_any_command_is_whole_and_charged_once(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis", *, is_sent: bool
) -> None:
    for last in itertools.count(1):
        await redis.flushdb()
        await worker.announce()
        through = partial(Mortal, last=last, is_sent=is_sent)
        first = await open_house(f"gw1-{last}", through=through)
        second, mortal = await open_house(f"gw2-{last}"), first.executor
        assert isinstance(mortal, Mortal)
        ended: list[str] = []
        working = asyncio.create_task(work(worker, ended))
        streaming = asyncio.create_task(stream(first))
        dying = asyncio.create_task(mortal.died.wait())
        await asyncio.wait([streaming, dying], return_when=asyncio.FIRST_COMPLETED)
        has_died = mortal.died.is_set()
        await end_task(streaming, dying)
        await first.kill()
        found = await second.responses.find(ID, tenant_id=TENANT)
        if found is not None:
            reader = await Reader((await second.attach(ID)).generation).to_the_end()
            assert (reader.failure, reader.text) == (None, "".join(TEXTS)), last
        await settle_abandoned(redis)
        records = [*(await usage_records(redis)).values()]
        charged = sum(each.completion_tokens - each.free_completion_tokens for each in records)
        prompts = sum(each.prompt_tokens - each.free_prompt_tokens for each in records)
        outcomes = {each.outcome for each in records}
        if found is not None:
            assert (charged, prompts, Outcome.FINISHED in outcomes) == (3, 3, True), (last, records)
        else:
            # It is not stored yet. Tokens of a job that was enqueued may have been received.
            assert outcomes <= {Outcome.LOST}, (last, records)
            assert charged == len(TEXTS) * len(ended), (last, records)
        assert not await redis.hexists(keys.request(BUCKET, ID), "amounts"), last
        await end_task(working)
        await second.kill()
        if not has_died:
            break
    assert last > 5
