"""The bounded inbox between the reply reader and one request."""

import asyncio
from typing import Any

from contract.messages import Delta, JobFinished, JobStarted, PromptScored
from gateway.completions.queue.generation import DELTA_BYTES, Generation, Message, Selection
from tests.contract.test_queue import job
from tests.support.patience import PATIENCE_SECONDS


def delta(text: str, choice: int = 0) -> Delta:
    """Make a delta of one token."""
    return Delta(1, 1, choice, 0, text, [7])


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


async def test_unread_text_beyond_the_bound_is_dropped() -> None:
    inbox = Generation(max_unread_bytes=2 * DELTA_BYTES + 10)
    assert inbox.push(0, delta("12345"))
    assert inbox.push(0, delta("12345"))
    assert not inbox.push(0, delta("1"))
    assert inbox.overflowed
    assert len(await inbox.replies()) == 2


async def test_chosen_candidates_need_no_room() -> None:
    inbox = Generation(max_unread_bytes=1)
    inbox.expect(0, job("j1", n=1, best_of=2))
    end = JobFinished(1, 1, 3, 1, 0, chosen=[1])
    assert all(inbox.push(0, each) for each in (delta("a"), delta("b", choice=1), end))
    assert not inbox.overflowed
    assert [message for _, message in await inbox.replies()] == [delta("b"), end]


async def test_text_that_was_read_frees_room() -> None:
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


async def test_single_delta_overflow_reaches_the_consumer() -> None:
    inbox = Generation(max_unread_bytes=100)
    waiting = asyncio.create_task(inbox.replies())
    await asyncio.sleep(0)
    assert not inbox.push(0, delta("x" * 200))
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await waiting == []
    assert inbox.overflowed


async def test_everything_received_is_noted_before_it_is_held_back_or_dropped() -> None:
    inbox = Generation(max_unread_bytes=1)
    inbox.expect(1, job("j1", n=1, best_of=2))
    noted: list[Any] = []
    inbox.on_reply = lambda index, message: noted.append((index, message))
    said: list[tuple[int, Any]] = [
        (0, JobStarted(1, 1, 3, 0, "class")),
        (0, delta("there is no room for this")),
        (1, delta("a candidate")),
        (1, JobFinished(2, 1, 3, 1, 0, chosen=[0])),
    ]
    for index, message in said:
        inbox.push(index, message)
    assert noted == said
    assert inbox.started == {0: said[0][1]}
    assert inbox.received_tokens == {0: 1, 1: 1}
    assert inbox.finished == {1: said[3][1]}


async def test_inbox_without_a_consumer_stores_nothing_and_keeps_counting() -> None:
    inbox = Generation(max_unread_bytes=100)
    inbox.expect(1, job("j1", n=1, best_of=2))
    inbox.push(0, delta("a"))
    inbox.detach()
    for _ in range(100):
        assert inbox.push(0, delta("x" * 50))
        assert inbox.push(1, delta("x" * 50))
    end = JobFinished(1, 1, 1, 101, 0)
    assert inbox.push(0, end)
    assert not inbox.overflowed
    assert inbox.received_tokens == {0: 101, 1: 100}
    assert inbox.finished == {0: end}
    inbox.wake()
    waiting = asyncio.create_task(inbox.replies())
    await asyncio.sleep(0)
    inbox.wake()
    assert await waiting == []


def test_chosen_candidates_have_the_numbers_of_choices() -> None:
    selection = Selection()
    scored = PromptScored(1, 1, [])
    end = JobFinished(1, 1, 3, 5, 0, chosen=[2, 0])
    reported: list[Message] = []
    for message in (
        delta("0a"),
        scored,
        delta("1a", 1),
        delta("2a", 2),
        delta("0b"),
        delta("2b", 2),
        end,
    ):
        reported += selection.take(message)
    assert reported == [scored, delta("2a"), delta("2b"), delta("0a", 1), delta("0b", 1), end]
