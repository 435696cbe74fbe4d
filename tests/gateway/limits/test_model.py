"""The scripts equal a plain model of limits and money on random histories."""

import asyncio
import math
import random
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from redis.asyncio import Redis

from common import clock
from contract import keys
from contract.scripts import LuaScript
from gateway.limits import store as store_module
from gateway.limits.replies import (
    METERED,
    NO_LIMIT,
    Admitted,
    NeedsSeed,
    Refused,
    RequestState,
    RequestStatus,
    ReservationRequest,
    ReserveReply,
)
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.records.limits import LimitName, SpendScope, SubjectLimits, Window
from gateway.records.spending import SpendLimit
from gateway.records.usage_record import Counts, UsageRecord
from tests.gateway.limits.building import (
    BUCKET,
    DAY_MS,
    LEASE_MS,
    NOON,
    TENANT,
    Desk,
    TestClock,
    kept,
    key_of,
    month_of,
    open_ids,
    project_of,
    record,
    release_of,
    settlement,
    spend_limit,
    tenant_of,
    usage,
)
from tests.gateway.limits.fake_ledger import FakeLedger, add
from tests.support.kinds import every_redis, histories
from tests.support.patience import PATIENCE_SECONDS

MINUTE = tuple(LimitName)[:4]


@dataclass
class Used:
    """One admitted request: its amounts, and the end of its lease."""

    created_ms: int
    prompt: int
    audio: int
    cost: int
    expiry_ms: int
    slices: list[tuple[int, int]]
    """When it took completion tokens, and how many."""
    is_open: bool = True

    @property
    def completion(self) -> int:
        return sum(tokens for _, tokens in self.slices)

    def keep(self, completion: int) -> None:
        """Take back the completion tokens that it has not used, the latest ones first."""
        slices, self.slices = self.slices, []
        for at_ms, tokens in slices:
            self.slices.append((at_ms, min(tokens, completion)))
            completion -= self.slices[-1][1]

    def in_minutes(self, limit: LimitName | None) -> list[tuple[int, int]]:
        """When the slots of 250 ms in which it took something ended a minute ago, and how much."""
        is_tokens = limit in (LimitName.TOKENS_PER_MINUTE, LimitName.COMPLETION_TOKENS_PER_MINUTE)
        whole = self.amount(limit) - self.completion * is_tokens
        taken = [(self.created_ms, whole), *(self.slices if is_tokens else ())]
        return [((at_ms // 250 + 1) * 250 + 60_000, amount) for at_ms, amount in taken]

    def amount(self, limit: LimitName | None) -> int:
        if limit in (LimitName.BUDGET, None):
            return self.cost
        if limit in (LimitName.TOKENS_PER_MINUTE, LimitName.TOKENS_PER_DAY):
            return self.prompt + self.completion
        if limit is LimitName.PROMPT_TOKENS_PER_MINUTE:
            return self.prompt
        if limit is LimitName.AUDIO_SECONDS_PER_DAY:
            return self.audio
        return self.completion if limit is LimitName.COMPLETION_TOKENS_PER_MINUTE else 1


@dataclass
class Model:
    """Sums over lists instead of counters. All requests have the same subjects."""

    holders: tuple[SubjectLimits, ...]
    """Key, project and tenant."""
    is_prepaid: bool
    now_ms: int = NOON
    granted: int = 0
    requests: dict[str, Used] = field(default_factory=dict)
    """Admitted requests by id; settled ones have their counts."""
    settled: dict[str, UsageRecord] = field(default_factory=dict)
    """One record of each request, with what later ones have more."""
    seeded: set[str] = field(default_factory=set)
    spend_limits: list[SpendLimit] = field(default_factory=list)

    @property
    def subjects(self) -> tuple[SubjectLimits, ...]:
        """The holders, and the spend limits in their current windows."""
        spending = (each.subject_at(self.now_ms) for each in self.spend_limits)
        return (*self.holders, *spending)

    def is_durable(self, subject: SubjectLimits) -> bool:
        pays = self.is_prepaid and subject.has_credit
        return subject.limits.is_durable or pays

    def limits_of(self, subject: SubjectLimits) -> dict[LimitName | None, int]:
        found: dict[LimitName | None, int] = {
            name: value for name in LimitName if (value := subject.limits.get(name)) is not None
        }
        if self.is_prepaid and subject.has_credit:
            found[None] = self.granted - sum(r.cost_micros for r in self.settled.values())
        return found

    def used(self, limit: LimitName | None, subject: SubjectLimits | None = None) -> int:
        going = [u for u in self.requests.values() if u.is_open]
        if subject is not None and subject.spending is not None:
            all_ = [(u.created_ms, u.cost) for u in going]
            all_ += [(r.created_ms, r.cost_micros) for r in self.settled.values()]
            start, end = window_of(subject)
            return sum(cost for created_ms, cost in all_ if start <= created_ms < end)
        if limit in MINUTE:
            return sum(amount for _, amount in self.live(limit))
        if limit is LimitName.CONCURRENT_REQUESTS:
            return sum(u.expiry_ms > self.now_ms for u in going)
        if limit is None:
            return sum(u.cost for u in going)
        if limit is LimitName.BUDGET:
            month = month_of(self.now_ms)
            return sum(u.cost for u in going if month_of(u.created_ms) == month) + sum(
                r.cost_micros for r in self.settled.values() if month_of(r.created_ms) == month
            )
        day = self.now_ms // DAY_MS
        today = [r for r in self.settled.values() if r.created_ms // DAY_MS == day]
        settled = {
            LimitName.REQUESTS_PER_DAY: len(today),
            LimitName.TOKENS_PER_DAY: sum(r.prompt_tokens + r.completion_tokens for r in today),
            LimitName.AUDIO_SECONDS_PER_DAY: sum(r.audio_seconds for r in today),
        }
        return settled[limit] + sum(u.amount(limit) for u in going if u.created_ms // DAY_MS == day)

    def live(self, limit: LimitName | None) -> list[tuple[int, int]]:
        """What counts in the last minute, and when it leaves it."""
        taken = (each for used in self.requests.values() for each in used.in_minutes(limit))
        return [(leaves_ms, amount) for leaves_ms, amount in taken if self.now_ms < leaves_ms]

    def wait(
        self, limit: LimitName | None, value: int, wanted: int, subject: SubjectLimits
    ) -> float:
        """Milliseconds until a limit allows the request; -1 if unknown."""
        if limit is None or wanted > value:
            return math.inf
        if subject.spending is not None:
            return window_of(subject)[1] - self.now_ms
        if limit is LimitName.CONCURRENT_REQUESTS:
            return -1
        if limit in MINUTE:
            live = self.live(limit)
            for leaves_ms in sorted({at_ms for at_ms, _ in live}):
                stays = sum(amount for at_ms, amount in live if at_ms > leaves_ms)
                if stays + wanted <= value:
                    return leaves_ms - self.now_ms
        at = self.now_ms + DAY_MS - self.now_ms % DAY_MS
        while limit is LimitName.BUDGET and month_of(at) == month_of(self.now_ms):
            at += DAY_MS
        return at - self.now_ms

    def reserve(
        self, request: ReservationRequest, extended: Used | None = None
    ) -> tuple[object, ...]:
        unseeded = {
            s.subject for s in self.subjects if self.is_durable(s) and s.subject not in self.seeded
        }
        if unseeded:
            return ("seed", unseeded)
        asked = Used(
            self.now_ms,
            request.prompt_tokens,
            request.audio_seconds,
            request.cost_micros,
            self.now_ms + LEASE_MS,
            [(self.now_ms, request.completion_tokens)],
        )
        if extended:
            asked.created_ms, asked.slices = extended.created_ms, extended.slices.copy()
            more = request.completion_tokens - extended.completion
            asked.slices.append((self.now_ms, more))
        worst: tuple[object, ...] | None = None
        longest = -math.inf
        for subject in self.subjects:
            for limit, value in self.limits_of(subject).items():
                wanted, used = asked.amount(limit), self.used(limit, subject)
                if extended:
                    wanted -= extended.amount(limit)
                    if not self.is_of_period(limit, asked.created_ms, subject):
                        wanted = 0
                if wanted > 0 and used + wanted > value:
                    wait = self.wait(limit, value, wanted, subject)
                    if wait > longest:
                        reported = None if wait in (math.inf, -1) else wait
                        longest, worst = (
                            wait,
                            ("refused", subject.subject, limit, value, used, reported),
                        )
        if worst is not None:
            return (*worst, self.remaining())
        self.requests[request.request_id] = asked
        return ("admitted", asked.created_ms, self.remaining())

    def is_of_period(
        self, limit: LimitName | None, created_ms: int, subject: SubjectLimits
    ) -> bool:
        """Whether more of a request that was admitted then counts in a limit now."""
        if subject.spending is not None:
            return created_ms >= window_of(subject)[0]
        if limit is LimitName.BUDGET:
            return month_of(created_ms) == month_of(self.now_ms)
        return (
            limit is not LimitName.TOKENS_PER_DAY or self.now_ms // DAY_MS == created_ms // DAY_MS
        )

    def remaining(self) -> dict[tuple[str, LimitName | None], int]:
        return {
            (s.subject, limit): max(value - self.used(limit, s), 0)
            for s in self.subjects
            for limit, value in self.limits_of(s).items()
            if limit in MINUTE or limit in (LimitName.BUDGET, None)
        }

    def settle(self, ended: UsageRecord) -> bool:
        add(self.settled, ended)
        request = self.requests.get(ended.request_id)
        if request is None or not request.is_open:
            self.seeded.clear()
            return False
        request.is_open = False
        request.prompt = ended.prompt_tokens
        request.keep(ended.completion_tokens)
        return True

    def release(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        if request is None or not request.is_open:
            return False
        del self.requests[request_id]
        return True


def window_of(subject: SubjectLimits) -> tuple[int, int]:
    """Return when the current window of a spend limit begins and ends, in milliseconds."""
    assert subject.spending is not None
    _, start, end, _ = subject.spending.bounds
    return start * 1000, end * 1000


def random_spend_limits(rng: random.Random) -> list[SpendLimit]:
    """Return up to two spend limits of the same holders."""
    return [
        spend_limit(
            f"spl_{number}",
            scope=scope,
            holder=None if scope is SpendScope.TENANT else "key_ab",
            model=rng.choice((None, "m")),
            window=rng.choice(list(Window)),
            starts_on=rng.randint(1, 7),
            amount_micros=rng.randint(300, 3_000),
            time_zone=rng.choice(("UTC", "Asia/Kathmandu", "America/New_York")),
        )
        for number, scope in enumerate((SpendScope.TENANT, SpendScope.KEY))
        if rng.random() < 0.7
    ]


def reported(answer: ReserveReply) -> tuple[object, ...]:
    """Return a reply in the model's form."""
    if isinstance(answer, NeedsSeed):
        return ("seed", {s.subject for s in answer.subjects})
    assert isinstance(answer, (Admitted, Refused))
    subjects, values = answer.remaining
    remaining = {
        # The credit of a spend limit is its amount.
        (one.subject, limit if one.spending is None else LimitName.BUDGET): value
        for (one, limit), value in zip(product(subjects, METERED), values, strict=True)
        if value != NO_LIMIT
    }
    if isinstance(answer, Admitted):
        return ("admitted", answer.created_ms, remaining)
    what = (answer.subject.subject, answer.limit, answer.value, answer.used, answer.retry_ms)
    return ("refused", *what, remaining)


def random_limits(rng: random.Random) -> dict[str, int | None]:
    """Return limits that some requests reach."""
    sizes = {
        LimitName.REQUESTS_PER_MINUTE: 12,
        LimitName.TOKENS_PER_MINUTE: 500,
        LimitName.PROMPT_TOKENS_PER_MINUTE: 300,
        LimitName.COMPLETION_TOKENS_PER_MINUTE: 300,
        LimitName.REQUESTS_PER_DAY: 40,
        LimitName.TOKENS_PER_DAY: 2_000,
        LimitName.AUDIO_SECONDS_PER_DAY: 300,
        LimitName.CONCURRENT_REQUESTS: 6,
        LimitName.BUDGET: 3_000,
    }
    return {
        name.value: rng.randint(size // 2, 2 * size)
        for name, size in sizes.items()
        if rng.random() < 0.5
    }


ACTIONS = {
    "reserve": 12,
    "extend": 6,
    "advance": 6,
    "settle": 8,
    "release": 2,
    "again": 1,
    "lost": 1,
    "renew": 2,
    "drain": 2,
    "unseed": 1,
    "grant": 1,
    "audit": 1,
    "change": 1,
}


@dataclass
class History:
    """A model and the scripts, to which the same steps apply."""

    rng: random.Random
    redis: "Redis"
    clock: TestClock
    ledger: FakeLedger
    model: Model
    desk: Desk
    number: int = 0

    async def step(self) -> str:
        action = self.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        await getattr(self, action)()
        return action

    async def reserve(self) -> None:
        """Reserve for some requests in one turn of the event loop, which share runs of a script."""
        audio = self.rng.choice(((0,), (10, 30)))
        requests = [self._request(audio) for _ in range(self.rng.choice((1, 1, 2, 4)))]
        if unseeded := await self._reserve(requests):
            await Seeder(self.desk.store, self.ledger).seed(TENANT, unseeded)
            self.model.seeded |= {s.subject for s in unseeded}
            assert not await self._reserve(requests)

    def _request(self, audio: tuple[int, ...]) -> ReservationRequest:
        self.number += 1
        self.desk.subjects = self.model.subjects
        return self.desk.request(
            f"r{self.number}",
            prompt=self.rng.randint(0, 60),
            completion=self.rng.randint(0, 60),
            audio=self.rng.choice(audio),
            cost=self.rng.randint(0, 200),
        )

    async def _reserve(self, requests: list[ReservationRequest]) -> tuple[SubjectLimits, ...]:
        """Compare the replies, and return the subjects that must be seeded first."""
        reserve = self.desk.store.reserve
        answers = await asyncio.gather(*(reserve(each, lease_ms=LEASE_MS) for each in requests))
        assert list(map(reported, answers)) == [self.model.reserve(each) for each in requests]
        return answers[0].subjects if isinstance(answers[0], NeedsSeed) else ()

    async def extend(self) -> None:
        request_id = self._known(is_open=True)
        if request_id:
            used = self.model.requests[request_id]
            self.desk.subjects = self.model.subjects
            asked = self.desk.request(
                request_id,
                prompt=used.prompt,
                completion=used.completion + self.rng.randint(1, 60),
                audio=used.audio,
                cost=used.cost + self.rng.randint(0, 100),
            )
            reply = await self.desk.store.reserve(asked, lease_ms=LEASE_MS, extends=True)
            assert reported(reply) == self.model.reserve(asked, used)

    async def change(self) -> None:
        """Change the amount of a spend limit, perhaps to less than what is spent."""
        limits = self.model.spend_limits
        if limits:
            number = self.rng.randrange(len(limits))
            limits[number] = replace(limits[number], amount_micros=self.rng.randint(0, 4_000))

    async def advance(self) -> None:
        kind = self.rng.random()
        span = (
            700
            if kind < 0.6
            else 40_000
            if kind < 0.9
            else 20 * 3_600_000
            if kind < 0.97
            else 20 * DAY_MS
        )
        await self.clock.advance(self.rng.randint(1, span))
        self.model.now_ms = self.clock.now_ms

    def _known(self, *, is_open: bool) -> str | None:
        known = self._all_known(is_open=is_open)
        return self.rng.choice(known) if known else None

    def _all_known(self, *, is_open: bool) -> list[str]:
        return [id_ for id_, used in self.model.requests.items() if used.is_open is is_open]

    async def _settle(
        self,
        request_id: str,
        *,
        created_ms: int,
        most: tuple[int, int, int, int],
    ) -> None:
        prompt, completion, audio, cost = (self.rng.randint(0, number) for number in most)
        ended = record(
            request_id,
            created_ms=created_ms,
            prompt_tokens=prompt,
            completion_tokens=completion,
            audio_seconds=audio,
            cost_micros=cost,
            is_prepaid=self.model.is_prepaid,
            spend_limits=tuple(s.subject for s in self.model.subjects if s.spending is not None),
        )
        is_open = await self.desk.store.end(settlement(ended))
        assert is_open is self.model.settle(ended)

    async def settle(self) -> None:
        """Settle some open requests in one turn, sometimes beside one that Redis does not know."""
        known = self._all_known(is_open=True)
        some = self.rng.sample(known, min(len(known), self.rng.choice((1, 1, 3))))
        beside = [self.lost()] if self.rng.random() < 0.1 else []
        await asyncio.gather(*beside, *map(self._settle_open, some))

    async def _settle_open(self, request_id: str) -> None:
        used = self.model.requests[request_id]
        most = (used.prompt, used.completion, used.audio, used.cost)
        await self._settle(request_id, created_ms=used.created_ms, most=most)

    async def again(self) -> None:
        if request_id := self._known(is_open=False):
            created_ms = self.model.requests[request_id].created_ms
            await self._settle(request_id, created_ms=created_ms, most=(99, 99, 9, 99))

    async def lost(self) -> None:
        self.number += 1
        await self._settle(
            f"lost{self.number}", created_ms=self.model.now_ms, most=(60, 60, 30, 90)
        )

    async def release(self) -> None:
        if request_id := self._known(is_open=True):
            released = await self.desk.store.end(release_of(request_id))
            assert released is self.model.release(request_id)

    async def renew(self) -> None:
        if request_id := self._known(is_open=True):
            assert (
                await self.desk.store.renew(BUCKET, [request_id], owner="g1", lease_ms=LEASE_MS)
                == []
            )
            self.model.requests[request_id].expiry_ms = self.model.now_ms + LEASE_MS

    async def drain(self) -> None:
        await self.ledger.drain(
            self.redis, most=self.rng.randint(1, 20), deletes=self.rng.random() < 0.7
        )

    async def unseed(self) -> None:
        subject = self.rng.choice(self.model.subjects).subject
        await self.desk.store.unseed(TENANT, subject)
        self.model.seeded.discard(subject)

    async def grant(self) -> None:
        amount = self.rng.randint(0, 1000)
        self.ledger.granted += amount
        self.model.granted += amount
        await self.desk.store.unseed(TENANT, tenant_of().subject)
        self.model.seeded.discard(tenant_of().subject)

    async def audit(self) -> None:
        """Check that an audit finds no difference."""
        assert (await self.desk.store.audit_open(BUCKET)) == (0, 0)

    async def check(self) -> None:
        """Compare the readable state without changes."""
        store, model = self.desk.store, self.model
        going = {id_ for id_, used in model.requests.items() if used.is_open}
        assert await open_ids(self.redis) == going
        for status, subject in zip(
            await store.status(TENANT, model.subjects), model.subjects, strict=True
        ):
            assert status.is_seeded == (subject.subject in model.seeded)
            for limit in LimitName:
                if subject.limits.get(limit) is None or not (
                    limit in MINUTE or limit is LimitName.CONCURRENT_REQUESTS or status.is_seeded
                ):
                    continue
                used = model.used(limit, subject)
                assert status.used(limit) == used, (limit, subject.subject)


@histories(8)
async def test_scripts_equal_the_model_on_a_random_history(
    any_redis: "Redis", store: QuotaStore, clock: TestClock, seed: int
) -> None:
    rng = random.Random(seed)
    subjects = (
        key_of(**random_limits(rng)),
        project_of(**random_limits(rng)),
        tenant_of(**random_limits(rng)),
    )
    is_prepaid = seed % 2 == 0
    ledger = FakeLedger()
    ledger.granted = 5_000
    model = Model(subjects, is_prepaid, granted=5_000, spend_limits=random_spend_limits(rng))
    history = History(rng, any_redis, clock, ledger, model, Desk(store, subjects, is_prepaid))
    for _ in range(400):
        action = await history.step()
        if action != "reserve":
            await history.check()
    for request_id in history._all_known(is_open=True):
        await history._settle_open(request_id)
    await history.check()
    for waiting in await usage(any_redis):
        add(ledger.records, waiting)
    assert ledger.records == model.settled
    assert len(model.settled) > 30, "the history is too short to show anything"


@every_redis
async def test_unedited_scripts_run(
    any_redis: "Redis",
) -> None:
    """Each unedited script, by the server's clock: other tests run copies with a set time."""
    run: set[str] = set()
    redis: Any = any_redis

    class Noting:
        """Records the scripts that run."""

        async def execute_command(self, *args: Any, **options: Any) -> Any:
            if args[0] == "EVALSHA":
                run.add(args[1])
            return await redis.execute_command(*args, **options)

    store = QuotaStore(Noting())
    desk = Desk(store, (key_of(concurrent_requests=2), project_of(), tenant_of(budget_micros=100)))
    tenant = desk.subjects[2]
    assert await desk.reserve("r1", cost=60) == NeedsSeed((tenant,))
    now_ms = clock.now_ms()
    await desk.seed(tenant, now_ms=now_ms)
    own = kept(key="k")
    assert (await store.claim(TENANT, "r1", own)).request_id == "r1"
    admitted = await desk.admit("r1", cost=60, kept=own)
    assert 0 <= admitted.created_ms - now_ms < DAY_MS
    assert (await desk.refuse("r2", cost=41)).limit is LimitName.BUDGET
    renewed = await store.renew(BUCKET, ["r1", "r2"], owner="g1", lease_ms=LEASE_MS)
    assert renewed == ["r2"]
    assert await store.expired(BUCKET) == []
    adopted = await store.adopt(desk.request("r1", cost=60), kept(2, owner="g2"), lease_ms=0)
    assert adopted == 20
    assert await store.audit_open(BUCKET) == (0, 0)
    assert await store.live(TENANT) == ([(admitted.created_ms, "r1")], True)
    # Its lease had no length, so it has expired by the next millisecond.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (expired := await store.expired(BUCKET)):
            pass
    assert [each.request_id for each in expired] == ["r1"]
    await store.stop(TENANT, "r1", 2, RequestState.CANCELLED)
    assert (await store.read(TENANT, "r1")) == RequestStatus(
        RequestState.CANCELLED, "g2", 2, False, Counts()
    )
    ended = record("r1", cost_micros=50, created_ms=admitted.created_ms)
    finished = settlement(ended, kept=kept(2), state=RequestState.FINISHED)
    assert await store.end(finished)
    await store.forget(TENANT, "r1")
    assert 0 < await any_redis.pttl(keys.request(BUCKET, "r1")) <= 600_000
    (status,) = await store.status(TENANT, [tenant])
    assert status.cost_this_month == 50
    assert await store.unseed(TENANT, tenant.subject)
    assert await store.repeat(TENANT, spend_limit(), b"digest") == 1
    scripts = [each for each in vars(store_module).values() if isinstance(each, LuaScript)]
    assert run == {script.digest for script in scripts}
