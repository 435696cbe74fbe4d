"""The simulated upstream of benchmarks keeps the pace of the scripted engine."""

import asyncio
from contextlib import suppress
from statistics import median

from bench import client, fake_backend
from bench.client import Lane, Request
from bench.processes import Meter
from bench.starting import free_port

STEP_SECONDS = 0.05


async def _is_listening(port: int) -> bool:
    with suppress(ConnectionRefusedError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


async def test_every_step_sends_one_token_of_each_stream() -> None:
    port = free_port()
    server = asyncio.create_task(fake_backend.serve(port, STEP_SECONDS))
    async with asyncio.timeout(20):
        while not await _is_listening(port):
            await asyncio.sleep(0.005)
    requests = [
        Request(model="any", prompt="", completion_tokens=6, streamed=streamed, messages=messages)
        for streamed, messages in ((True, ()), (True, (b"{}",)), (False, ()), (False, (b"{}",)))
    ]
    lanes = [Lane(f"http://127.0.0.1:{port}", "", requests) for _ in range(8)]
    try:
        answers, _ = await client.run(lanes, meter=Meter({}), timeout_seconds=20)
    finally:
        server.cancel()
    # The client checks the number of tokens and the end.
    assert not any(each.error for each in answers)
    for each in answers:
        # The first token follows at once.
        assert each.ended - each.sent > 4.5 * STEP_SECONDS
    streamed = [each for each in answers if each.request.streamed]
    assert {len(each.reads) for each in streamed} == {6}, "each token arrives alone"
    texts = [each for each in streamed if not each.request.messages]
    steps = zip(*(each.reads for each in texts), strict=True)
    spread = median(max(reads) - min(reads) for reads in steps)
    assert spread < STEP_SECONDS / 2, "all streams share their steps"
