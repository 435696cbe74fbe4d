"""Each way in which a request can end has one row, with the right counts and cost."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from gateway.records.limits import LimitScope
from tests.failures.proofs.accounts import Accounts, Credential
from tests.failures.proofs.client import request
from tests.failures.proofs.conftest import WORKER, cost_of
from tests.failures.proofs.ledger import Books, Row
from tests.failures.proofs.test_lessons import PROMPT_TOKENS, body, both_ways
from tests.failures.proofs.until import leave, running, until
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port
from tests.support.stack import Stack, metric

pytestmark = pytest.mark.parametrize("stack", ["sqlite"], indirect=True)

STRICT = {
    "strict": {"SLUICE_MAX_UNREAD_BYTES": "2000", "SLUICE_MAX_WAITING_JOBS_OF_TENANT": "1"},
    "hurried": {"SLUICE_REQUEST_TIMEOUT": "1.5"},
}
"""Gateways with one way each to end a request early, so that no other comes first."""
CROWD = {"prompt": ["x"] * 64, "n": 4, "ignore_eos": True}
"""As many sequences as the engine runs."""
WINDOW_FULL = 1_900


def one_more(stack: Stack, name: str, **environment: str) -> str:
    """Start another gateway for one test or module, and return its base URL."""
    url = stack.launch_gateway(name, environment, port=free_port())
    stack.await_gateway(name, url)
    stack.gateways.remove(url)
    return url


@pytest.fixture(scope="module")
def strict(stack: Stack) -> Iterator[dict[str, str]]:
    """Base URLs of more gateways, with short timeouts."""
    urls = {
        name: stack.launch_gateway(name, environment, port=free_port())
        for name, environment in STRICT.items()
    }
    for name, url in urls.items():
        stack.await_gateway(name, url)
        stack.gateways.remove(url)
    yield urls
    for name in urls:
        stack.stop(name)


@pytest.fixture
async def key(accounts: Accounts, name: Callable[[], str]) -> Credential:
    """A key of a new tenant, with limits of each kind that are never reached."""
    limits = {"requests_per_minute": 1_000, "concurrent_requests": 100, "budget_micros": 10**9}
    return await accounts.holder(LimitScope.KEY, name(), limits)


async def only_row(books: Books, key: Credential) -> Row:
    """Return the only row of a tenant after the end; check that nothing else is left."""
    await books.settled()
    [row] = await books.rows(key.tenant)
    await books.nothing_left()
    return row


@both_ways
async def test_request_finished_by_length_or_stop_string_has_one_row(
    stack: Stack, books: Books, key: Credential, stream: bool
) -> None:
    asked = body(stream=stream, max_tokens=100, seed=1)
    first = await request(stack.url, key.text, asked)
    row = await only_row(books, key)
    assert (row["outcome"], row["code"]) == ("finished", "")
    assert row["completion_tokens"] == 100
    assert row["cost_micros"] == cost_of(PROMPT_TOKENS, 100)
    texts = [e["choices"][0]["text"] for e in (first.events if stream else [first.json])]
    word = "".join(texts).split(" ")[5]

    stopped = await request(stack.url, key.text, asked | {"stop": [word]})
    await books.settled()
    rows = {row["request_id"]: row for row in await books.rows(key.tenant)}
    row = rows[str(stopped.request_id)]
    assert len(rows) == 2
    assert row["outcome"] == "finished"
    assert 0 < row["completion_tokens"] < 100
    assert row["cost_micros"] == cost_of(PROMPT_TOKENS, row["completion_tokens"])


@both_ways
async def test_timed_out_request_costs_what_was_delivered(
    stack: Stack,
    strict: dict[str, str],
    accounts: Accounts,
    books: Books,
    name: Callable[[], str],
    stream: bool,
) -> None:
    row: Row = {"completion_tokens": 0}
    # On a busy machine the time may be over before the first token.
    while not row["completion_tokens"]:
        key = await accounts.key(await accounts.tenant(name()))
        asked = body(stream=stream, max_tokens=WINDOW_FULL)
        answer = await request(strict["hurried"], key.text, asked)
        row = await only_row(books, key)

    assert answer.status == (200 if stream else 504), answer.body
    assert row["outcome"] == "timed_out"
    assert 0 < row["completion_tokens"] < WINDOW_FULL
    assert row["cost_micros"] == cost_of(PROMPT_TOKENS, row["completion_tokens"])


async def test_request_of_a_stalled_client_is_cancelled_and_charged(
    stack: Stack, strict: dict[str, str], books: Books, key: Credential
) -> None:
    wanted = body(stream=True, n=128, max_tokens=1_000, logprobs=5)
    stalling = asyncio.create_task(
        request(strict["strict"], key.text, wanted, stall_after=PATIENCE_SECONDS)
    )
    # It may have ended before a look at the open requests.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await books.rows(key.tenant):
            await asyncio.sleep(0.05)
    row = await only_row(books, key)
    await leave(stalling)

    assert (row["outcome"], row["code"]) == ("cancelled", "slow_reader")
    assert row["completion_tokens"] >= 128
    assert row["cost_micros"] == cost_of(PROMPT_TOKENS, row["completion_tokens"])


async def test_unclaimed_job_times_out_and_costs_nothing(
    stack: Stack, strict: dict[str, str], books: Books, key: Credential
) -> None:
    # Another tenant would get room.
    full = asyncio.create_task(request(stack.url, key.text, body(**CROWD, max_tokens=WINDOW_FULL)))
    await running(stack, 256)
    answer = await request(strict["hurried"], key.text, body())
    await leave(full)
    await books.settled()
    rows = {row["outcome"]: row for row in await books.rows(key.tenant)}

    assert answer.status == 504, answer.body
    assert {*rows} == {"cancelled", "timed_out"}
    row = rows["timed_out"]
    assert (row["prompt_tokens"], row["completion_tokens"], row["cost_micros"]) == (0, 0, 0)


async def test_request_refused_by_a_full_queue_leaves_no_row(
    stack: Stack, strict: dict[str, str], books: Books, key: Credential
) -> None:
    answer = await request(strict["strict"], key.text, body(prompt=["x", "y", "z"]))
    assert answer.status == 429, answer.body
    assert answer.error["code"] != "requests"
    await books.nothing_left()
    assert await books.rows(key.tenant) == []
    reported = (await request(stack.url, key.text, path="/v1/limits")).json
    used = [values["used"] for scope in reported["scopes"] for values in scope["limits"].values()]
    assert set(used) - {None} == {0}


async def test_another_worker_finishes_a_job_lost_before_its_first_token(
    stack: Stack, books: Books, key: Credential
) -> None:
    stack.kill("worker")
    # Its prefill is so slow that the worker dies during it.
    stack.start_worker("doomed", **{**WORKER, "SLUICE_SCRIPTED_PREFILL_SECONDS_PER_TOKEN": "10"})
    waiting = asyncio.create_task(request(stack.url, key.text, body()))
    await until(
        lambda: metric(stack.worker_url("doomed"), "sluice_worker_jobs_running") == 1,
        what="the job being claimed",
    )
    stack.kill("doomed")
    await books.expire_leases()
    stack.start_worker(**WORKER)
    answer = await waiting
    row = await only_row(books, key)

    assert answer.status == 200, answer.body
    assert (row["outcome"], row["completion_tokens"]) == ("finished", 10)
    assert row["prompt_tokens"] == PROMPT_TOKENS
    assert row["cost_micros"] == cost_of(PROMPT_TOKENS, 10)


@pytest.mark.slow
async def test_draining_gateway_settles_everything_before_it_exits(
    stack: Stack, books: Books, key: Credential
) -> None:
    url = await asyncio.to_thread(one_more, stack, "leaving")
    asking = [
        asyncio.create_task(
            request(
                url,
                key.text,
                body(stream=number % 2 == 0, max_tokens=100 + number),
                leave_after=None if number % 4 else 0.1,
            )
        )
        for number in range(40)
    ]
    # On a busy machine the first have ended when the last begin.
    while len(await books.open_requests()) < 20 and not all(each.done() for each in asking):
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(stack.stop, "leaving") == 0
    still_open = await books.open_requests()
    answers = await asyncio.gather(*asking)
    await books.settled()
    rows = {row["request_id"]: row for row in await books.rows(key.tenant)}

    assert still_open == []
    assert len(rows) >= 20
    assert {row["outcome"] for row in rows.values()} <= {"finished", "cancelled"}
    for answer in answers:
        assert not answer.is_finished or answer.request_id in rows
