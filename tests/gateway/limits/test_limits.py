"""The scripts on real servers, by a clock that the tests set: reserve, refuse, settle."""

from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys
from gateway.limits.replies import Admitted, NeedsSeed, Refused, Withdrawn
from gateway.limits.store import QuotaStore
from gateway.records.limits import RESERVED_LIMITS, LimitName, LimitScope, SubjectLimits
from tests.gateway.limits.building import (
    BUCKET,
    DAY_MS,
    LEASE_MS,
    MINUTE_MS,
    NOON,
    TENANT,
    Desk,
    TestClock,
    bucket_keys,
    key_of,
    left,
    project_of,
    release_of,
    remaining,
    seed,
    tenant_of,
    usage,
)

SLOT_MS = 250
NONE = (key_of(), project_of(), tenant_of())
EVERYTHING = {name.value: 1000 for name in RESERVED_LIMITS}


def desk(store: QuotaStore, *subjects: SubjectLimits, is_prepaid: bool = False) -> Desk:
    """Return a desk whose other subjects have no limits."""
    given = {one.scope: one for one in subjects}
    return Desk(store, tuple(given.get(one.scope, one) for one in NONE), is_prepaid=is_prepaid)


async def test_requests_without_limits_are_admitted_and_leave_only_reservations(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    answer = await desk(store).admit("r1", prompt=10**9, completion=10**9, cost=10**12)
    assert answer == Admitted(NOON, remaining({one: {} for one in NONE}))
    assert await bucket_keys(any_redis) == {
        keys.request(BUCKET, "r1"),
        keys.open_requests(BUCKET),
    }


async def test_limits_of_null_and_limits_of_zero(store: QuotaStore, clock: TestClock) -> None:
    for name in RESERVED_LIMITS:
        free = desk(store, key_of(**{name.value: None}))
        assert isinstance(await free.reserve(f"free {name}", cost=5), Admitted)
        closed = desk(store, key_of(**{name.value: 0}))
        await closed.seed()
        refused = await closed.refuse(cost=5)
        assert (refused.limit, refused.value, refused.used) == (name, 0, 0)
        assert refused.is_too_large
        assert refused.retry_ms is None
        await store.unseed(TENANT, key_of().subject)


async def test_zero_budget_admits_free_requests(store: QuotaStore, clock: TestClock) -> None:
    one = desk(store, tenant_of(budget_micros=0, completion_tokens_per_minute=0), is_prepaid=True)
    await one.seed(tenant_of(), credit_micros=-5)
    assert isinstance(await one.reserve(completion=0, cost=0), Admitted)
    assert (await one.refuse(completion=0, cost=1)).limit is LimitName.BUDGET
    assert (await one.refuse(completion=1, cost=0)).limit is LimitName.COMPLETION_TOKENS_PER_MINUTE


@pytest.mark.parametrize("scope", LimitScope)
@pytest.mark.parametrize(
    ("name", "limit", "fits"),
    [
        ("requests_per_minute", 4, 4),
        ("tokens_per_minute", 95, 3),
        ("prompt_tokens_per_minute", 39, 3),
        ("completion_tokens_per_minute", 80, 4),
        ("requests_per_day", 2, 2),
        ("tokens_per_day", 89, 2),
        ("audio_seconds_per_day", 16, 3),
        ("concurrent_requests", 3, 3),
        ("budget_micros", 699, 6),
    ],
)
async def test_each_limit_of_each_scope_admits_exactly_what_fits(
    store: QuotaStore, clock: TestClock, scope: LimitScope, name: str, limit: int, fits: int
) -> None:
    makers = {
        LimitScope.KEY: key_of,
        LimitScope.PROJECT: project_of,
        LimitScope.TENANT: tenant_of,
    }
    one = desk(store, makers[scope](**{name: limit}))
    await one.seed()
    for _ in range(fits):
        await one.admit(cost=100)
        await clock.advance(1)
    refused = await one.refuse(cost=100)
    assert (refused.limit, refused.subject.scope, refused.value) == (LimitName(name), scope, limit)
    assert not refused.is_too_large


async def test_refused_request_changes_nothing(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    """Whatever limit refuses, no other limit of any subject has paid for it."""
    subjects = [maker(**EVERYTHING) for maker in (key_of, project_of, tenant_of)]
    one = desk(store, *subjects, is_prepaid=True)
    await one.seed(credit_micros=1000)
    await one.admit("r1", prompt=100, completion=100, cost=100)
    before = await store.status(TENANT, subjects)
    there = await bucket_keys(any_redis)
    for name in RESERVED_LIMITS:
        tight = desk(
            store, *subjects[:2], tenant_of(**(EVERYTHING | {name.value: 1})), is_prepaid=True
        )
        refused = await tight.refuse("r2", cost=10)
        assert refused.limit is name
    assert (await one.refuse("r2", cost=901)).limit is None
    assert await store.status(TENANT, subjects) == before
    assert await bucket_keys(any_redis) == there


async def test_reply_has_the_remaining_limits_of_each_subject(
    store: QuotaStore, clock: TestClock
) -> None:
    one = desk(
        store,
        key_of(requests_per_minute=5, tokens_per_minute=100),
        tenant_of(completion_tokens_per_minute=50, budget_micros=900),
        is_prepaid=True,
    )
    await one.seed(credit_micros=700)
    answer = await one.admit(cost=100)
    assert left(answer, LimitScope.KEY) == {
        LimitName.REQUESTS_PER_MINUTE: 4,
        LimitName.TOKENS_PER_MINUTE: 70,
    }
    assert left(answer, LimitScope.PROJECT) == {}
    expected = {LimitName.COMPLETION_TOKENS_PER_MINUTE: 30, LimitName.BUDGET: 800, None: 600}
    assert left(answer, LimitScope.TENANT) == expected
    refused = await one.refuse(completion=31, cost=100)
    assert left(refused, LimitScope.TENANT) == expected


async def test_repeated_reserve_takes_nothing_and_returns_the_first_result(
    store: QuotaStore, clock: TestClock
) -> None:
    subjects = [maker(**EVERYTHING) for maker in (key_of, project_of, tenant_of)]
    one = desk(store, *subjects, is_prepaid=True)
    await one.seed(credit_micros=1000)
    first = await one.admit("r1", cost=10)
    before = await store.status(TENANT, subjects)
    await clock.advance(100)
    assert await one.admit("r1", cost=10) == first
    await store.unseed(TENANT, key_of().subject)
    assert (await one.admit("r1", cost=10)).created_ms == first.created_ms
    after = await store.status(TENANT, subjects)
    assert [s.used(name) for s in after for name in RESERVED_LIMITS] == [
        s.used(name) for s in before for name in RESERVED_LIMITS
    ]


async def test_request_larger_than_a_limit_never_fits(store: QuotaStore, clock: TestClock) -> None:
    one = desk(store, key_of(tokens_per_minute=29), tenant_of(requests_per_minute=1))
    refused = await one.refuse()
    assert refused.is_too_large
    assert (refused.limit, refused.wanted) == (LimitName.TOKENS_PER_MINUTE, 30)
    await one.admit(prompt=1, completion=1)
    # It precedes the other limit, which a retry would satisfy.
    assert (await one.refuse()).is_too_large


async def test_longest_wait_is_returned_when_several_limits_refuse(
    store: QuotaStore, clock: TestClock
) -> None:
    one = desk(
        store,
        key_of(requests_per_minute=2, concurrent_requests=2),
        project_of(tokens_per_minute=50),
        tenant_of(budget_micros=20),
    )
    await one.seed()
    await one.admit("r1", prompt=1, completion=1)
    await clock.advance(10_000)
    await one.admit("r2", prompt=20, completion=20, cost=15)
    # For requests the first one must leave the window, for tokens the second one.
    assert (await one.refuse()).limit is LimitName.TOKENS_PER_MINUTE
    assert (await one.refuse(cost=6)).limit is LimitName.BUDGET
    assert (await one.refuse(prompt=1, completion=1)).limit is LimitName.REQUESTS_PER_MINUTE


async def test_any_sixty_seconds_admit_at_most_the_limit(
    store: QuotaStore, clock: TestClock
) -> None:
    one = desk(store, key_of(requests_per_minute=3))
    admitted: list[int] = []
    for _ in range(800):
        if isinstance(await one.reserve(), Admitted):
            admitted.append(clock.now_ms)
        await clock.advance(321)
    for first, fourth in zip(admitted, admitted[3:], strict=False):
        assert fourth - first > MINUTE_MS
        assert fourth - first < MINUTE_MS + 2 * SLOT_MS + 2 * 321


@pytest.mark.parametrize(
    ("limits", "amounts"),
    [
        ({"requests_per_minute": 3}, {}),
        ({"tokens_per_minute": 90}, {}),
        ({"tokens_per_minute": 100}, {"prompt": 55, "completion": 0}),
        ({"prompt_tokens_per_minute": 30}, {}),
        ({"completion_tokens_per_minute": 79}, {}),
        ({"requests_per_day": 3}, {}),
        ({"tokens_per_day": 90}, {}),
        ({"audio_seconds_per_day": 15}, {"audio": 1}),
        ({"budget_micros": 3}, {"cost": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("start_ms", [NOON, NOON + 249, NOON + 12 * 3_600_000 - 20_000])
async def test_retry_time_is_exact_to_the_millisecond(
    store: QuotaStore,
    clock: TestClock,
    limits: dict[str, int],
    amounts: dict[str, Any],
    start_ms: int,
) -> None:
    await clock.set(start_ms)
    one = desk(store, project_of(**limits))
    await one.seed(now_ms=start_ms)
    for wait in (10, 3_000, 777):
        await one.admit(cost=1)
        await clock.advance(wait)
    refused = await one.refuse(**amounts)
    assert refused.retry_ms is not None
    await clock.advance(refused.retry_ms - 1)
    again = await one.refuse(**amounts)
    assert (again.limit, again.retry_ms) == (refused.limit, 1)
    await clock.advance(1)
    await one.admit(**amounts)


@pytest.mark.parametrize(
    ("now", "next_month"),
    [
        ("2027-01-31T23:59:59.999", "2027-02-01"),
        ("2027-02-28T00:00:00", "2027-03-01"),
        ("2028-02-29T12:00:00", "2028-03-01"),
        ("2028-12-31T23:00:00", "2029-01-01"),
        ("2031-01-01T00:00:00", "2031-02-01"),
        ("2096-02-29T00:00:00", "2096-03-01"),
        ("2099-12-31T00:00:00", "2100-01-01"),
        ("2026-11-21T12:00:00", "2026-12-01"),
    ],
)
async def test_budget_begins_anew_with_the_calendar_month(
    store: QuotaStore, clock: TestClock, now: str, next_month: str
) -> None:
    from datetime import datetime

    at, then = (
        int(datetime.fromisoformat(f"{text}+00:00").timestamp() * 1000)
        for text in (now, f"{next_month}T00:00:00")
    )
    await clock.set(at)
    one = desk(store, tenant_of(budget_micros=100))
    await one.seed(now_ms=at)
    await one.admit("r1", cost=100)
    assert (await one.refuse(cost=1)).retry_ms == then - at
    await clock.set(then - 1)
    await one.refuse(cost=1)
    await clock.set(then)
    await one.admit("r2", cost=60)
    # Reservations of the old month are returned to the old month.
    assert await one.settle("r1", cost=100, created_ms=at)
    assert (await one.refuse(cost=41)).used == 60
    await one.admit(cost=40)


async def test_settle_returns_the_rest_to_the_slot_of_the_reservation(
    store: QuotaStore, clock: TestClock
) -> None:
    key = key_of(tokens_per_minute=100, requests_per_minute=10)
    one = desk(store, key)
    await one.admit("r1", prompt=40, completion=50)
    await clock.advance(20_000)
    await one.admit("r2", prompt=5, completion=5)
    assert await one.settle("r1", prompt=40, completion=10)
    (status,) = await store.status(TENANT, [key])
    assert (status.prompt_tokens_of_minute, status.completion_tokens_of_minute) == (45, 15)
    assert status.requests_of_minute == 2
    refused = await one.refuse(prompt=41, completion=0)
    # The fifty tokens of the first leave a minute after its slot, not a minute after its end.
    assert refused.retry_ms == MINUTE_MS + SLOT_MS - 20_000
    await clock.advance(MINUTE_MS + SLOT_MS - 20_000)
    (status,) = await store.status(TENANT, [key])
    assert (status.requests_of_minute, status.prompt_tokens_of_minute) == (1, 5)
    assert await one.settle("r2", prompt=5, completion=1)
    (status,) = await store.status(TENANT, [key])
    assert status.completion_tokens_of_minute == 1


async def test_settle_after_its_slot_has_left_changes_no_window(
    store: QuotaStore, clock: TestClock
) -> None:
    key = key_of(tokens_per_minute=100)
    one = desk(store, key)
    await one.admit("r1", prompt=40, completion=50)
    await clock.advance(2 * MINUTE_MS)
    await one.admit("r2", prompt=40, completion=50)
    assert await one.settle("r1", prompt=1, completion=1)
    (status,) = await store.status(TENANT, [key])
    assert status.prompt_tokens_of_minute + status.completion_tokens_of_minute == 90


async def test_settle_may_exceed_the_reservation(store: QuotaStore, clock: TestClock) -> None:
    """The worker may count more prompt tokens than the gateway; they are charged."""
    key = key_of(tokens_per_minute=100, tokens_per_day=100, budget_micros=100)
    one = desk(store, key)
    await one.seed()
    await one.admit("r1", prompt=10, completion=10, cost=10)
    assert await one.settle("r1", prompt=300, completion=10, cost=150)
    answer = await one.refuse(prompt=1, completion=0, cost=1)
    assert left(answer, LimitScope.KEY) == {
        LimitName.TOKENS_PER_MINUTE: 0,
        LimitName.BUDGET: 0,
    }
    (status,) = await store.status(TENANT, [key])
    assert (status.tokens_today, status.cost_this_month) == (310, 150)


async def test_release_undoes_a_reservation_completely(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    subjects = [maker(**EVERYTHING) for maker in (key_of, project_of, tenant_of)]
    one = desk(store, *subjects, is_prepaid=True)
    await one.seed(credit_micros=1000)
    await one.admit("r1", cost=100)
    assert await one.settle("r1", cost=90)
    before = await store.status(TENANT, subjects)
    await one.admit("r2", cost=100)
    assert await store.end(release_of("r2"))
    assert await store.status(TENANT, subjects) == before
    assert len(await usage(any_redis)) == 1
    assert not await store.end(release_of("r2"))
    assert await store.status(TENANT, subjects) == before


async def test_first_end_counts_and_every_settle_leaves_a_record(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    key = key_of(tokens_per_day=1000, budget_micros=1000)
    one = desk(store, key)
    await one.seed()
    await one.admit("r1", cost=100)
    assert await one.settle("r1", completion=7, cost=50)
    assert not await one.settle("r1", completion=20, cost=80)
    assert not await store.end(release_of("r1"))
    records = await usage(any_redis)
    assert [(r.request_id, r.completion_tokens, r.cost_micros) for r in records] == [
        ("r1", 7, 50),
        ("r1", 20, 80),
    ]
    (status,) = await store.status(TENANT, [key])
    assert (status.requests_today, status.tokens_today, status.cost_this_month) == (1, 17, 50)
    # Counters may have the second settle or not: the numbers must be derived again.
    assert not status.is_seeded


async def test_settle_without_a_reservation_leaves_a_record_and_unseeds_accounts(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    one = desk(store, key_of(budget_micros=1000), tenant_of(requests_per_minute=10))
    assert not await one.settle("unknown", cost=1)
    for key in await bucket_keys(any_redis) - {keys.usage(BUCKET)}:
        assert await any_redis.pttl(key) > 0, key
    await one.seed()
    assert not await one.settle("lost", cost=400)
    assert [r.request_id for r in await usage(any_redis)] == ["unknown", "lost"]
    assert await one.reserve(cost=1) == NeedsSeed((one.subjects[0],))
    statuses = await store.status(TENANT, one.subjects)
    assert [s.version for s in statuses] == [2, 2, 2]
    assert statuses[2].requests_of_minute == 0


async def test_reservation_that_comes_after_its_release_is_not_made(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    key = key_of(requests_per_minute=10, concurrent_requests=10)
    one = desk(store, key)
    assert not await store.end(release_of("r1"))
    assert await one.reserve("r1") == Withdrawn()
    (status,) = await store.status(TENANT, [key])
    assert (status.requests_of_minute, status.concurrent_requests) == (0, 0)
    # The mark expires.
    assert await bucket_keys(any_redis) == {keys.request(BUCKET, "r1")}
    assert 0 < await any_redis.pttl(keys.request(BUCKET, "r1")) <= 120_000


async def test_concurrent_requests_hold_leases(store: QuotaStore, clock: TestClock) -> None:
    one = desk(store, tenant_of(concurrent_requests=2))
    await one.admit("r1")
    await clock.advance(20_000)
    await one.admit("r2")
    refused = await one.refuse()
    assert refused.limit is LimitName.CONCURRENT_REQUESTS
    assert (refused.used, refused.retry_ms, refused.is_too_large) == (2, None, False)
    # The first is not renewed and loses its place; the second is renewed and keeps it.
    await clock.advance(9_999)
    assert await store.renew(BUCKET, ["r2", "never"], owner="g1", lease_ms=LEASE_MS) == ["never"]
    await one.refuse()
    await clock.advance(1)
    await one.admit("r3")
    await one.refuse()
    assert [e.request_id for e in await store.expired(BUCKET)] == ["r1"]
    await clock.advance(25_000)
    await one.refuse()
    assert await one.settle("r3")
    await one.admit("r4")
    await clock.advance(5_000)
    await one.admit("r5")


async def test_renewal_of_an_expired_reservation_takes_its_place_again(
    store: QuotaStore, clock: TestClock
) -> None:
    one = desk(store, key_of(concurrent_requests=1))
    await one.admit("r1")
    await clock.advance(LEASE_MS)
    assert await store.renew(BUCKET, ["r1"], owner="g1", lease_ms=LEASE_MS) == []
    assert (await one.refuse()).used == 1
    assert await store.expired(BUCKET) == []


async def test_expired_reservations_are_returned_with_their_drafts(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    one = desk(store)
    for number in range(3):
        await one.admit(f"r{number}")
        await clock.advance(1)
    await any_redis.zadd(keys.open_requests(BUCKET), {"vanished": 1})
    await clock.advance(LEASE_MS - 2)
    expired = await store.expired(BUCKET)
    assert [tuple(e) for e in expired] == [
        ("r0", NOON, b"draft of r0", NOON + LEASE_MS),
        ("r1", NOON + 1, b"draft of r1", NOON + 1 + LEASE_MS),
    ]
    assert await any_redis.zscore(keys.open_requests(BUCKET), "vanished") is None
    assert [e.request_id for e in await store.expired(BUCKET, most=1)] == ["r0"]
    assert await one.settle("r0")
    assert [e.request_id for e in await store.expired(BUCKET)] == ["r1"]


async def test_days_begin_anew_with_open_reservations(store: QuotaStore, clock: TestClock) -> None:
    key = key_of(requests_per_day=2, tokens_per_day=1000)
    one = desk(store, key)
    await one.seed()
    await one.admit("r1")
    await one.admit("r2")
    assert await one.settle("r1")
    assert (await one.refuse()).retry_ms == DAY_MS // 2
    await clock.advance(DAY_MS // 2)
    await one.admit("r3")
    assert await one.settle("r2", created_ms=NOON)
    (status,) = await store.status(TENANT, [key])
    assert (status.requests_today, status.tokens_today) == (1, 30)
    await one.admit("r4")
    assert (await one.refuse()).used == 2
    assert await one.settle("r3", completion=1)
    (status,) = await store.status(TENANT, [key])
    assert (status.requests_today, status.tokens_today) == (2, 41)


async def test_settle_in_a_later_day_and_month_resets_the_account(
    store: QuotaStore, clock: TestClock
) -> None:
    """The key lost its limit after its seed, so that the reserve did not read its account."""
    key = key_of(requests_per_day=100)
    await seed(store, key, requests=40, tokens=400, cost_micros=4000)
    one = desk(store)
    for days, expected in ((0, (41, 430, 4005)), (1, (1, 30, 4010)), (31, (1, 30, 5))):
        await clock.set(NOON + days * DAY_MS)
        await one.admit(f"day {days}")
        assert await one.settle(f"day {days}", cost=5)
        (status,) = await store.status(TENANT, [key])
        assert (status.requests_today, status.tokens_today, status.cost_this_month) == expected


async def test_numbers_are_derived_again_when_the_clock_goes_back(
    store: QuotaStore, clock: TestClock
) -> None:
    one = desk(store, key_of(requests_per_day=5, requests_per_minute=5))
    await one.seed()
    await one.admit()
    await clock.advance(-DAY_MS)
    assert isinstance(await one.reserve(), NeedsSeed)
    await one.seed(now_ms=clock.now_ms)
    answer = await one.admit()
    assert left(answer, LimitScope.KEY) == {LimitName.REQUESTS_PER_MINUTE: 4}


async def test_all_keys_are_deleted_or_expire_when_all_requests_have_ended(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    subjects = [maker(**EVERYTHING) for maker in (key_of, project_of, tenant_of)]
    one = desk(store, *subjects)
    await one.seed()
    for number in range(20):
        await one.admit(f"r{number}", cost=1)
    for number in range(20):
        assert await one.settle(f"r{number}", cost=1)
    lasting = {keys.usage(BUCKET), keys.accounts(BUCKET)}
    for key in await bucket_keys(any_redis) - lasting:
        assert await any_redis.pttl(key) > 0, key
        assert ":request:" not in key
        assert "running" not in key


async def test_ids_with_odd_characters_are_subjects_like_others(
    store: QuotaStore, clock: TestClock
) -> None:
    for odd in ("jwt:a b", "jwt:{x}:y", "jwt:\x00\n", "jwt:é\U0001f600", "jwt:"):
        key = SubjectLimits(LimitScope.KEY, odd, key_of(requests_per_day=1).limits)
        one = desk(store, key)
        await seed(store, key)
        await one.admit(f"r {odd}")
        await one.refuse()
        assert await store.end(release_of(f"r {odd}"))
        await one.admit(f"r {odd} again")


async def test_amounts_are_exact_up_to_the_largest_limit(
    store: QuotaStore, clock: TestClock
) -> None:
    limit = 10**15
    one = desk(store, tenant_of(budget_micros=limit, tokens_per_minute=limit), is_prepaid=True)
    await one.seed(cost_micros=limit - 10, credit_micros=limit)
    await one.admit("r1", prompt=limit - 7, completion=0, cost=7)
    answer: Refused = await one.refuse(prompt=8, completion=0, cost=4)
    assert (answer.value, answer.used) == (limit, limit - 3)
    answer = await one.refuse(prompt=8, completion=0, cost=1)
    assert (answer.limit, answer.used) == (LimitName.TOKENS_PER_MINUTE, limit - 7)
    final = await one.admit(prompt=7, completion=0, cost=3)
    assert left(final, LimitScope.TENANT) == {
        LimitName.TOKENS_PER_MINUTE: 0,
        LimitName.BUDGET: 0,
        None: limit - 10,
    }


async def test_reservation_is_extended_within_every_limit_or_stays_as_it_is(
    store: QuotaStore, clock: TestClock
) -> None:
    key = key_of(tokens_per_minute=100, requests_per_minute=1, tokens_per_day=150)
    one = desk(store, key, tenant_of(budget_micros=1000, concurrent_requests=1))
    await one.seed()
    await one.admit("r1", prompt=10, completion=20, cost=300)
    assert isinstance(await one.extend("r1", completion=50, cost=500), Admitted)
    # What is reserved already needs no room.
    assert isinstance(await one.extend("r1", completion=40, cost=400), Admitted)
    for amounts, limit in (
        ({"completion": 91, "cost": 600}, LimitName.TOKENS_PER_MINUTE),
        ({"completion": 60, "cost": 1001}, LimitName.BUDGET),
    ):
        refused = await one.extend("r1", **amounts)
        assert (refused.limit, refused.is_too_large) == (limit, False)
    minute, *_ = await store.status(TENANT, one.subjects)
    assert (minute.requests_of_minute, minute.completion_tokens_of_minute) == (1, 50)
    # Tokens that were added leave the window a minute after they were added.
    await clock.advance(61_000)
    assert isinstance(await one.extend("r1", completion=100, cost=700), Admitted)
    status, _, tenant = await store.status(TENANT, one.subjects)
    assert (status.completion_tokens_of_minute, status.tokens_today) == (50, 110)
    assert (tenant.cost_this_month, tenant.concurrent_requests) == (700, 1)
    assert (await one.extend("r1", completion=141, cost=700)).limit is LimitName.TOKENS_PER_DAY
    assert await one.settle("r1", completion=90, cost=650)
    status, _, tenant = await store.status(TENANT, one.subjects)
    assert (status.completion_tokens_of_minute, status.tokens_today) == (40, 100)
    assert (tenant.cost_this_month, tenant.concurrent_requests) == (650, 0)


async def test_extension_belongs_to_the_day_of_its_request(
    store: QuotaStore, clock: TestClock
) -> None:
    one = desk(store, key_of(tokens_per_day=100))
    await one.seed()
    await one.admit("r1")
    await clock.advance(DAY_MS)
    assert isinstance(await one.extend("r1", completion=500), Admitted)
    status, *_ = await store.status(TENANT, one.subjects)
    assert status.tokens_today == 0
    assert await one.settle("r1", completion=400)
    status, *_ = await store.status(TENANT, one.subjects)
    assert status.tokens_today == 0
    # There is nothing to extend after the end.
    assert isinstance(await one.extend("r1", completion=600), Withdrawn)
