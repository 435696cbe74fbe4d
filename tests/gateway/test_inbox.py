"""The bounded inbox between the reply reader and one request."""

import asyncio

from contract.messages import Delta, JobFinished
from gateway.dispatch.generation import DELTA_BYTES, Generation


def delta(text: str) -> Delta:
    """Make a delta."""
    return Delta(1, 1, 0, 0, text, [])


async def test_replies_are_taken_once_and_in_order() -> None:
    inbox = Generation(max_unread_bytes=10_000)
    for text in ("a", "b", "c"):
        assert inbox.push(2, delta(text))
    taken = await inbox.replies()
    assert [(index, message) for index, message in taken] == [(2, delta(t)) for t in "abc"]
    inbox.push(0, delta("d"))
    assert len(await inbox.replies()) == 1


async def test_waiting_consumer_is_woken_by_a_reply() -> None:
    inbox = Generation(max_unread_bytes=10_000)
    waiting = asyncio.create_task(inbox.replies())
    await asyncio.sleep(0)
    inbox.push(0, delta("a"))
    inbox.push(0, delta("b"))
    assert len(await waiting) == 2


async def test_waiting_consumer_is_woken_by_a_wake() -> None:
    inbox = Generation(max_unread_bytes=10_000)
    waiting = asyncio.create_task(inbox.replies())
    await asyncio.sleep(0)
    inbox.wake()
    inbox.wake()
    assert await waiting == []


async def test_unread_text_beyond_the_bound_is_dropped_and_noted() -> None:
    inbox = Generation(max_unread_bytes=2 * DELTA_BYTES + 10)
    assert inbox.push(0, delta("12345"))
    assert inbox.push(0, delta("12345"))
    assert not inbox.push(0, delta("1"))
    assert inbox.overflowed
    assert len(await inbox.replies()) == 2


async def test_text_that_was_read_counts_no_more() -> None:
    inbox = Generation(max_unread_bytes=DELTA_BYTES + 10)
    for _ in range(5):
        assert inbox.push(0, delta("1234567890"))
        await inbox.replies()
    assert not inbox.overflowed


async def test_end_of_a_job_is_never_dropped() -> None:
    inbox = Generation(max_unread_bytes=1)
    inbox.push(0, delta("a"))
    assert inbox.push(0, JobFinished(1, 1, 1, 1, 0))
    assert len(await inbox.replies()) == 1


async def test_consumer_hears_of_an_overflow_by_a_single_delta() -> None:
    inbox = Generation(max_unread_bytes=100)
    waiting = asyncio.create_task(inbox.replies())
    await asyncio.sleep(0)
    assert not inbox.push(0, delta("x" * 200))
    async with asyncio.timeout(1):
        assert await waiting == []
    assert inbox.overflowed
