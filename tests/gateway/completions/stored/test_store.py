"""Only the present owner changes a stored response; repeated and late writes do nothing."""

from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from common.not_none import not_none
from contract import keys
from contract.messages import Delta
from contract.prompts import packed
from gateway.completions.stored import store as store_module
from gateway.completions.stored.journal import (
    MESSAGES_OF_ENTRY,
    SLICE_BYTES,
    Received,
    decode_entry,
    decode_slices,
    encode_entries,
    encode_message,
)
from gateway.completions.stored.store import (
    JournalPage,
    ResponseStore,
    WriteResult,
    packed_head,
)
from gateway.dialects.profile import Dialect
from gateway.limits.replies import RequestState, RequestStatus
from gateway.limits.store import QuotaStore
from gateway.records.usage_record import Counts
from tests.gateway.completions.stored.test_head import completion_of, head_of, request_of
from tests.support.kinds import every_redis

HEAD = head_of(completion_of(request_of(Dialect.VLLM)))
ID = HEAD.request_id
TENANT = HEAD.tenant_id
RECORD = keys.request(keys.bucket_of(TENANT), ID)


@pytest.fixture
def store(any_redis: "Redis") -> ResponseStore:
    """An empty store."""
    return ResponseStore(any_redis, QuotaStore(any_redis))


async def opened(store: ResponseStore, *, term: int = 1, **fields: Any) -> bool:
    known: dict[str, Any] = {"gateway": "a", "handles": (1, 2), "ttl_ms": 60_000}
    known |= {"packed": await packed_head(HEAD)}
    return await store.open(ID, term=term, **(known | fields)) is WriteResult.DONE


async def appended(
    store: ResponseStore, *entries: bytes, index: int, term: int = 1, **fields: Any
) -> WriteResult:
    known: dict[str, Any] = {"gateway": "a", "handles": (1, 2), "ttl_ms": 50_000}
    return await store.append(ID, term=term, index=index, entries=entries, **(known | fields))


async def adopted(store: ResponseStore, *, term: int, packed: bytes = b"") -> bool:
    return await store.adopt(ID, packed, term=term, ttl_ms=70_000)


async def page_of(store: ResponseStore) -> JournalPage:
    return not_none(await store.read_page(ID, index=0))


async def entries(store: ResponseStore) -> list[bytes]:
    return (await page_of(store)).entries


@every_redis
async def test_response_is_read_as_it_was_written(store: ResponseStore, any_redis: "Redis") -> None:
    assert await store.read(TENANT, ID) is None
    record = {"owner": "a", "term": 1, "background": 1, "created_ms": 1}
    await any_redis.hset(RECORD, mapping=record)  # type: ignore[arg-type]
    assert await opened(store)
    assert await appended(store, b"x", b"y", index=0) is WriteResult.DONE
    assert await appended(store, b"z", index=2, handles=(4,)) is WriteResult.DONE

    stored = await store.read(TENANT, ID)

    status = RequestStatus(RequestState.RUNNING, "a", 1, True, Counts())
    assert stored is not None
    assert (stored.head.request_id, stored.head.jobs) == (ID, HEAD.jobs)
    assert (stored.status, stored.total_entries) == (status, 3)
    assert await store.status(TENANT, ID) == status
    assert await store.read("other", ID) is None
    assert await page_of(store) == JournalPage("a", (4,), 3, [b"x", b"y", b"z"])
    for key in (keys.content(ID), keys.journal(ID)):
        assert 0 < await any_redis.pttl(key) <= 50_000
    await store.discard(ID)
    assert await store.read(TENANT, ID) is None


async def test_written_entries_are_not_written_again(store: ResponseStore) -> None:
    await opened(store)
    await appended(store, b"x", index=0)
    assert await appended(store, b"x", b"y", index=0) is WriteResult.DONE
    assert await appended(store, b"x", b"y", index=0, handles=(3,)) is WriteResult.DONE
    assert await entries(store) == [b"x", b"y"]


async def test_owner_rewrites_what_redis_lost(store: ResponseStore, any_redis: "Redis") -> None:
    assert await appended(store, b"x", index=0) is WriteResult.MISSING
    await opened(store)
    await appended(store, b"x", b"y", index=0)
    await any_redis.rpop(keys.journal(ID))
    assert await appended(store, b"z", index=2) is WriteResult.MISSING

    assert await opened(store, entries=[b"x", b"y", b"z"])

    assert await entries(store) == [b"x", b"y", b"z"]
    assert await any_redis.pttl(keys.journal(ID)) > 0


async def test_handles_of_the_last_owner_that_wrote_stay_until_the_next_has_written(
    store: ResponseStore,
) -> None:
    async def follower() -> tuple[str, tuple[int, ...]]:
        page = await page_of(store)
        return page.gateway, page.handles

    await opened(store)
    assert await adopted(store, term=2)
    assert await adopted(store, term=3)
    assert await follower() == ("a", (1, 2))
    await appended(store, index=0, term=3, gateway="b", handles=(7,))
    assert await follower() == ("b", (7,))
    assert await adopted(store, term=4, packed=await packed_head(HEAD))
    assert await follower() == ("b", (7,))


@every_redis
async def test_former_owner_changes_nothing(store: ResponseStore) -> None:
    await opened(store)
    await appended(store, b"x", index=0)
    await adopted(store, term=2)
    assert await appended(store, b"late", index=1) is WriteResult.NOT_OWNER
    assert not await opened(store, entries=[b"late"])
    assert not await adopted(store, term=1)
    assert await entries(store) == [b"x"]


async def test_owner_rewrites_everything_if_redis_lost_its_term(store: ResponseStore) -> None:
    await opened(store)
    assert await appended(store, b"x", index=0, term=2) is WriteResult.MISSING
    assert await opened(store, term=2, gateway="b", entries=[b"x"])
    page = await page_of(store)
    assert (page.gateway, page.entries) == ("b", [b"x"])
    assert await appended(store, b"y", index=1) is WriteResult.NOT_OWNER


async def test_unknown_response_cannot_be_adopted(store: ResponseStore, any_redis: "Redis") -> None:
    assert not await adopted(store, term=1)
    assert await any_redis.dbsize() == 0


async def test_large_heads_and_entries_are_compressed(
    store: ResponseStore, any_redis: "Redis"
) -> None:
    large = msgspec.structs.replace(HEAD.jobs[0], prompt_token_ids=packed([7] * 100_000))
    head = msgspec.structs.replace(HEAD, jobs=[large])
    record = {"owner": "a", "term": 1, "background": 1, "created_ms": 1}
    await any_redis.hset(RECORD, mapping=record)  # type: ignore[arg-type]
    assert await opened(store, packed=await packed_head(head))
    delta = Delta(1, 1, 0, 0, "a" * 100_000, [1])
    [entry] = encode_entries([encode_message(0, delta)], "1-0")
    await appended(store, entry, index=0)

    stored = await store.read(TENANT, ID)

    assert stored is not None
    assert stored.head.jobs == [large]
    assert [decode_entry(each) for each in await entries(store)] == [([Received(0, delta)], "1-0")]
    for key in (keys.content(ID), keys.journal(ID)):
        assert (await any_redis.memory_usage(key) or 0) < 20_000


@every_redis
async def test_a_journal_is_read_in_pages_without_the_head(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await store.read_page(ID, index=0) is None
    assert await opened(store, entries=[b"aaa", b"bbb", b"ccc", b"ddd"])
    monkeypatch.setattr(store_module, "PAGE_BYTES", 4)
    pages = [await store.read_page(ID, index=index) for index in (0, 2, 3, 4)]
    assert [page and page.entries for page in pages] == [
        [b"aaa", b"bbb"],
        [b"ccc", b"ddd"],
        [b"ddd"],
        [],
    ]
    assert {page.total_entries for page in pages if page} == {4}


def test_an_entry_is_read_in_slices_by_its_bytes() -> None:
    text = "a" * (SLICE_BYTES // 3)
    deltas = [(0, Delta(1, 1, 0, start, text, [1])) for start in range(5)]
    deltas.insert(3, (0, Delta(1, 1, 0, 9, "b" * SLICE_BYTES, [1])))
    [entry] = encode_entries([encode_message(*each) for each in deltas], "1-0")
    slices = list(decode_slices(entry))
    assert [len(each) for each in slices] == [2, 1, 1, 2]
    assert [tuple(received) for each in slices for received in each] == deltas


def test_replies_are_written_in_entries_of_bounded_length() -> None:
    deltas = [(0, Delta(1, 1, 0, start, "a", [1])) for start in range(MESSAGES_OF_ENTRY + 1)]
    encoded = encode_entries([encode_message(*each) for each in deltas], "1-0")
    entries = [decode_entry(each) for each in encoded]
    assert [len(received) for received, _ in entries] == [MESSAGES_OF_ENTRY, 1]
    assert [tuple(each) for received, _ in entries for each in received] == deltas
    assert {through for _, through in entries} == {"1-0"}
