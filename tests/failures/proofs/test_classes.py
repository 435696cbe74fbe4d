"""A pool of two exactness classes: receipts and fingerprints name those that ran, through kills."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable

import pytest

from tests.failures.proofs.accounts import Accounts
from tests.failures.proofs.client import Answer, request
from tests.failures.proofs.conftest import COMPLETION_TOKENS, WORKER
from tests.failures.proofs.ledger import Books
from tests.failures.proofs.test_exit_paths import WINDOW_FULL
from tests.failures.proofs.test_lessons import body
from tests.failures.proofs.until import engine_tokens, until
from tests.support.stack import Stack
from worker.engine.exactness import exactness_of

pytestmark = pytest.mark.parametrize("stack", ["sqlite"], indirect=True)

FIRST = "worker"
"""The shared worker, of the class `OLD`."""
CLASSES = {FIRST: COMPLETION_TOKENS, "old": COMPLETION_TOKENS, "new-1": 13, "new-2": 13}
"""Tokens of a text, which make the class of a scripted engine, by worker."""
OLD, NEW = (
    exactness_of({"engine": "scripted", "completion_tokens": str(tokens)}).digest
    for tokens in (COMPLETION_TOKENS, 13)
)


def signalled(stack: Stack, names: Iterable[str], number: int) -> None:
    """Stop or continue workers; a stopped one claims no job, and its lease is long."""
    for name in names:
        os.kill(stack.processes[name].pid, number)


async def next_worker(stack: Stack, names: Iterable[str]) -> str:
    """Return the first of these workers that generates tokens from now on."""
    before = {each: engine_tokens(stack, each) for each in names}
    found: list[str] = []

    def generates() -> bool:
        found.extend(each for each in before if engine_tokens(stack, each) > before[each])
        return bool(found)

    await until(generates, what="tokens of another worker")
    return found[0]


@pytest.mark.slow
async def test_receipt_and_fingerprint_name_the_classes_through_kills(
    stack: Stack, accounts: Accounts, books: Books, name: Callable[[], str]
) -> None:
    """A response goes to the new class, stays there while it has a worker, and goes back."""
    for other in [each for each in CLASSES if each != FIRST]:
        tokens = {"SLUICE_SCRIPTED_COMPLETION_TOKENS": str(CLASSES[other])}
        stack.launch_worker(other, {**WORKER, **tokens})
    for other in CLASSES:
        stack.await_worker(other)
    key = await accounts.key(await accounts.tenant(name()))
    answer = Answer()
    new = {"new-1", "new-2"}
    try:
        signalled(stack, {*new, "old"}, signal.SIGSTOP)
        asked = body(stream=True, max_tokens=WINDOW_FULL)
        reading = asyncio.create_task(request(stack.url, key.text, asked, answer=answer))
        assert await next_worker(stack, [FIRST]) == FIRST
        signalled(stack, new, signal.SIGCONT)
        await asyncio.to_thread(stack.kill, FIRST)
        crossed = await next_worker(stack, new)
        signalled(stack, ["old"], signal.SIGCONT)
        await asyncio.to_thread(stack.kill, crossed)
        (kept,) = new - {crossed}
        assert await next_worker(stack, [kept, "old"]) == kept, "its class has a worker"
        await asyncio.to_thread(stack.kill, kept)
        assert await next_worker(stack, ["old"]) == "old"
        await reading
    finally:
        for each in CLASSES.keys() & stack.processes.keys():
            stack.kill(each)
        stack.start_worker(FIRST, **WORKER)
    await books.settled()
    [row] = await books.rows(key.tenant)
    assert (row["outcome"], row["completion_tokens"]) == ("finished", WINDOW_FULL)
    assert (row["exactness_class"], row["class_crossings"]) == (f"{OLD}, {NEW}", 2)
    prints = list(dict.fromkeys(event["system_fingerprint"] for event in answer.events))
    base = prints[0].removesuffix(f"-{OLD}")
    assert prints == [f"{base}-{OLD}", f"{base}-{OLD}-{NEW}"]
