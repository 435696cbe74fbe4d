"""The life of a request, explored: the scripts in a real Redis, through every interleaving.

Two gateways, a client that repeats its key and deletes, and the sweep are programs of steps, each
of which is one script. Between any two steps, a lease may expire, a gateway may die, a reply may be
lost, so that its step is repeated, or a failover may lose what the last step wrote to the server of
the record. From each state every step is taken; a state that was reached before, by its content in
Redis and in the programs, is not explored again.
"""

import copy
import hashlib
import logging
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from contract import keys
from gateway.completions.stored.store import RESPONSE_BYTES, ResponseStore, WriteResult
from gateway.limits import store as store_module
from gateway.limits import stored_bytes as storage_module
from gateway.limits.replies import Admitted, Kept, RequestEnd, RequestState, ReservationRequest
from gateway.limits.store import QuotaStore
from gateway.limits.stored_bytes import Holder, Storage, names_of_counted
from gateway.records.limits import Window
from gateway.records.usage_record import Counts, Outcome, UsageRecord, decode_usage
from tests.gateway.limits.building import (
    BUCKET,
    LEASE_MS,
    NOON,
    SCRIPTS,
    TENANT,
    TestClock,
    kept,
    key_of,
    record,
    seed,
    spend_limit,
    tenant_of,
)

logger = logging.getLogger(__name__)

ID, OTHER_ID = "r1", "r2"
SPENDING = spend_limit(window=Window.DAY, amount_micros=10**6).subject_at(NOON)
SUBJECTS = (key_of(), tenant_of(tokens_per_day=10**6, concurrent_requests=9), SPENDING)
MICRO_A_TOKEN = 10**6
"""The price of completion tokens: micro-dollars of a million."""
TOKENS = (b"1", b"2")
"""The journal of a whole response. Its last entry ends it."""
EXPIRED_MS = 1000
USAGE = keys.usage(BUCKET).encode()
LOCAL = ("receive", "leave", "cancel")
"""Steps that send nothing to Redis."""
BYTES, BYTES_AT_END, BYTES_OF_MARK = 100_000, 50_000, RESPONSE_BYTES
"""What Redis stores for the request while it runs, after its end and after its deletion."""
BYTES_BY_STATE = {
    b"claimed": (0,),
    b"released": (0,),
    b"finished": (BYTES_AT_END,),
    # Those of a running request, if the sweep has ended it.
    b"cancelled": (BYTES_AT_END, BYTES, 2 * BYTES),
    b"deleted": (0, BYTES_OF_MARK),
}
CANCELLED = f"{keys.bucket_prefix(BUCKET)}test-cancelled"
"""Exists once the sweep has cancelled the job of the first gateway."""
MADE = f"{keys.bucket_prefix(BUCKET)}test-made"
"""Tokens that the engine has made. A client has them, or the reply stream of a gateway."""
FAILOVER = "a failover loses the last step"
EVENTS = (
    *("claim", "admit", "extend", "renew", "keep", "adopt", "stop", "settle", "release"),
    *("cancel", "forget"),
)


class Programs(NamedTuple):
    """Where each program is. An empty string is one that takes no part, or has ended."""

    first: str = ""
    """The gateway that begins the request."""
    second: str = ""
    """A gateway that takes the request over or resumes it, even if the first one lives."""
    client: str = ""
    """A client that repeats the request at a third gateway, or deletes the response."""
    sweep: str = ""
    expiries: int = 0
    """How often a lease may still expire."""
    deaths: int = 0
    lost_replies: int = 0
    failovers: int = 0
    late: tuple[str, ...] = ()
    """What other tasks of the first gateway may still send, whatever has happened meanwhile."""

    def late_steps(self) -> Iterator[tuple[int, str]]:
        """Return the late steps by number. A gateway does not release a request that it runs."""
        for number, what in enumerate(self.late):
            if self.first != "new" and (what != "release" or not self.first):
                yield number, what


Saved = list[tuple[bytes, bytes, int]]
"""The name, content and lifetime of each key."""
# One script each, since the exploration reads and writes thousands of times.
READ_ALL = """
local function value_of(name, kind)
    if kind == 'hash' then return redis.call('HGETALL', name) end
    if kind == 'stream' then return redis.call('XRANGE', name, '-', '+') end
    if kind == 'zset' then return redis.call('ZRANGE', name, 0, -1) end
    return kind == 'string' and redis.call('GET', name)
end

local names, found = redis.call('KEYS', '*'), {}
table.sort(names)
for number, name in ipairs(names) do
    local kind = redis.call('TYPE', name).ok
    local content, ttl = redis.call('DUMP', name), redis.call('PTTL', name)
    found[number] = {name, content, ttl, kind, value_of(name, kind)}
end
return found
"""
WRITE_ALL = """
redis.call('FLUSHDB')
for at = 1, #ARGV, 3 do
    redis.call('RESTORE', ARGV[at], ARGV[at + 2], ARGV[at + 1])
end
"""


class Found(NamedTuple):
    """What Redis has."""

    saved: Saved
    values: dict[str, Any]
    """What keys of simple types have: the fields of hashes as a dictionary."""
    usage: list[UsageRecord]

    def state(self) -> Any:
        """Return what makes two states different: no time, nor the order of a hash's fields."""
        values = self.values.values()
        own = tuple(
            (name, frozenset(value.items()) if isinstance(value, dict) else content, ttl < 0)
            for (name, content, ttl), value in zip(self.saved, values, strict=True)
            if name != USAGE
        )
        return own, tuple(sorted((each.request_id, each.completion_tokens) for each in self.usage))

    def request(self) -> dict[bytes, bytes]:
        """Return the record of the request, empty if there is none."""
        fields: dict[bytes, bytes] = self.values.get(keys.request(BUCKET, ID), {})
        return fields

    def is_open(self) -> bool:
        """Whether the request has a lease."""
        return ID.encode() in self.values.get(keys.open_requests(BUCKET), ())

    def made(self) -> int:
        """Return how many tokens the engine has made."""
        return int(self.values.get(MADE, 0))

    def charged(self) -> int:
        """Return the tokens in the ledger: of several rows of one id, the largest counts."""
        rows: dict[str, int] = {}
        for each in self.usage:
            if each.admitted_id == ID:
                known = rows.get(each.request_id, 0)
                rows[each.request_id] = max(known, each.completion_tokens)
        return sum(rows.values())


Step = tuple[str, Callable[[], Awaitable[str]]]
"""The name of a program, and what it does; it returns where the program is then."""


@dataclass
class World:
    """Everything outside the programs, and what they may do."""

    redis: Any
    store: QuotaStore
    storage: Storage
    responses: ResponseStore
    seen: set[Any] = field(default_factory=set)
    steps: int = 0
    violations: list[str] = field(default_factory=list)

    # -- programs --------------------------------------------------------------------------------

    def steps_of(self, at: Programs) -> Iterator[Step]:
        """Return the steps that the programs may take now."""
        for name in ("first", "second", "client", "sweep"):
            place, _, rest = getattr(at, name).partition(" ")
            for method in getattr(self, f"_{name}_{place}", lambda _: ())(rest) if place else ():
                yield name, method

    def _first_new(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def claim() -> str:
            claim = await self.store.claim(TENANT, ID, _kept(1, key="k"))
            return "claimed" if claim.request_id == ID else ""

        yield claim

    def _first_claimed(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def admit() -> str:
            request = _request(ID, _kept(1, key="k"))
            reply = await self.store.reserve(request, lease_ms=LEASE_MS)
            return "admitted" if isinstance(reply, Admitted) else ""

        async def refuse() -> str:
            await self.store.end(_end(ID, _kept(1)))
            return ""

        yield admit
        yield refuse

    def _first_admitted(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def keep() -> str:
            await self._keep(BYTES)
            return "kept"

        yield keep

    def _first_kept(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def open_() -> str:
            opened = await self.responses.open(
                ID, b"head", term=1, gateway="g1", handles=(1,), ttl_ms=60_000
            )
            return "streaming 0 0" if opened is WriteResult.DONE else ""

        yield open_

    def _first_streaming(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        written, received = map(int, rest.split(" "))

        async def receive() -> str:
            # The sweep has cancelled its job, and counted what the engine has made.
            if await self.redis.exists(CANCELLED):
                return f"streaming {written} {received}"
            await self.redis.set(MADE, max(received + 1, await self._made()))
            return f"streaming {written} {received + 1}"

        async def append() -> str:
            done = await self._append(1, "g1", written, TOKENS[written:received])
            return f"streaming {received} {received}" if done else ""

        async def leave() -> str:
            return f"pausing {received}"

        async def cancel() -> str:
            return f"cancelling {received}"

        async def finish() -> str:
            await self._settle(1, received, RequestState.FINISHED)
            return ""

        if written < received:
            yield append
        elif received < len(TOKENS):
            yield from (receive, leave, cancel)
        else:
            yield finish

    def _first_pausing(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def pause() -> str:
            await self._settle(1, int(rest), RequestState.PAUSED)
            return ""

        yield pause

    def _first_cancelling(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def stop() -> str:
            await self.store.stop(TENANT, ID, 1, RequestState.CANCELLED)
            return f"stopping {rest}"

        yield stop

    def _first_stopping(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def settle() -> str:
            await self._settle(1, int(rest), RequestState.CANCELLED)
            return ""

        yield settle

    def _second_idle(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def look() -> str:
            status = await self.store.read(TENANT, ID)
            if status is None or status.state not in (RequestState.RUNNING, RequestState.PAUSED):
                return ""
            return f"found {status.state} {status.term} {status.settled.completion_tokens}"

        yield look

    def _second_found(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        state, term, settled = rest.split(" ")
        next_term = _kept(int(term) + 1, owner="g2")

        async def adopt() -> str:
            adopted = await self.store.adopt(_request(ID, next_term), next_term, lease_ms=LEASE_MS)
            return "" if adopted is None else f"owner {next_term.term} {settled} 0"

        async def resume() -> str:
            request = _request(f"{ID}.{next_term.term}", next_term, settled=int(settled))
            reply = await self.store.reserve(request, lease_ms=LEASE_MS)
            resumes = isinstance(reply, Admitted)
            return f"owner {next_term.term} {settled} 1" if resumes else ""

        yield adopt if state == RequestState.RUNNING else resume

    def _second_owner(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def raise_term() -> str:
            term = int(rest.partition(" ")[0])
            await self.responses.adopt(ID, b"", term=term, ttl_ms=60_000)
            return f"raised {rest}"

        yield raise_term

    def _second_raised(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def read() -> str:
            return f"read {rest} {len(await self._journal())}"

        yield read

    def _second_read(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        term, settled, resumed, written = map(int, rest.split())

        async def append() -> str:
            done = await self._append(term, "g2", written, TOKENS[written:])
            if done:
                await self.redis.set(MADE, len(TOKENS))
            return f"read {term} {settled} {resumed} {len(TOKENS)}" if done else ""

        async def finish() -> str:
            await self._settle(
                term,
                written - settled,
                RequestState.FINISHED,
                request_id=f"{ID}.{term}" if resumed else ID,
            )
            return ""

        # A response that Redis does not have is not finished.
        yield append if written < len(TOKENS) else finish

    def _client_idle(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def repeat() -> str:
            own = _kept(1, owner="g3", key="k")
            claim = await self.store.claim(TENANT, OTHER_ID, own)
            return "runs" if claim.request_id == OTHER_ID else ""

        async def look() -> str:
            status = await self.store.read(TENANT, ID)
            if status is None or status.state is RequestState.RELEASED:
                return ""
            return "deletes" if status.state.is_end else ""

        yield repeat
        yield look

    def _client_runs(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def run() -> str:
            own = _kept(1, owner="g3", key="k")
            reply = await self.store.reserve(_request(OTHER_ID, own), lease_ms=LEASE_MS)
            if isinstance(reply, Admitted):
                used = _used(OTHER_ID, 1)
                await self.store.end(_end(OTHER_ID, own, used, RequestState.FINISHED))
            return ""

        yield run

    def _client_deletes(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def forget() -> str:
            await self.store.forget(TENANT, ID)
            return "discards"

        yield forget

    def _client_discards(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def discard() -> str:
            await self.responses.discard(ID)
            return ""

        yield discard

    def _sweep_idle(self, _: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def look() -> str:
            expired = await self.store.expired(BUCKET)
            return f"found {expired[0].expired_ms}" if expired else "idle"

        yield look

    def _sweep_found(self, rest: str) -> Iterator[Callable[[], Awaitable[str]]]:
        async def settle() -> str:
            draft = await self.store.draft(TENANT, ID)
            if draft is not None:
                content = await self.redis.hget(keys.request(BUCKET, ID), "record")
                draft = decode_usage(content)
                used = max(await self._made() - draft.completion_tokens, 0)
                ended = _used(draft.request_id, used, outcome=Outcome.LOST)
                settled = Counts(completion_tokens=used + draft.completion_tokens)
                end = _end(ID, None, ended, RequestState.PAUSED, settled)
                await self.store.end(_with_expiry(end, int(rest)))
                await self.redis.set(CANCELLED, 1)
            return "idle"

        yield settle

    async def _late_claim(self) -> None:
        await self.store.claim(TENANT, ID, _kept(1, key="k"))

    async def _late_keep(self) -> None:
        await self._keep(2 * BYTES)

    async def _late_release(self) -> None:
        await self.store.end(_end(ID, _kept(1)))

    async def _late_cancel(self) -> None:
        await self.store.cancel(TENANT, ID, _kept(1))

    async def _late_forget(self) -> None:
        await self.store.forget(TENANT, ID)

    async def _late_renew(self) -> None:
        await self.store.renew(BUCKET, [ID], owner="g1", lease_ms=LEASE_MS)

    async def _late_extend(self) -> None:
        request = _request(ID, _kept(1), completion=40)
        await self.store.reserve(request, lease_ms=LEASE_MS, extends=True)

    async def _late_stop(self) -> None:
        await self.store.stop(TENANT, ID, 1, RequestState.CANCELLED)

    async def _keep(self, size: int) -> None:
        holder = Holder(TENANT, SUBJECTS, ID)
        await self.storage.take(holder, size, live_ms=60_000)

    async def _append(self, term: int, gateway: str, index: int, entries: Any) -> bool:
        done = await self.responses.append(
            ID,
            term=term,
            index=index,
            entries=entries,
            gateway=gateway,
            handles=(term,),
            ttl_ms=60_000,
        )
        return done is WriteResult.DONE

    async def _settle(
        self, term: int, tokens: int, state: RequestState, *, request_id: str = ID
    ) -> None:
        used = _used(request_id, tokens)
        settled = Counts(completion_tokens=tokens)
        await self.store.end(_end(ID, _kept(term), used, state, settled))

    async def _made(self) -> int:
        return int(await self.redis.get(MADE) or 0)

    async def _journal(self) -> list[bytes]:
        page = await self.responses.read_page(ID, index=0)
        return [] if page is None else page.entries

    # -- exploration -----------------------------------------------------------------------------

    async def explore(
        self, at: Programs, path: tuple[str, ...] = (), before: tuple[Any, Saved] | None = None
    ) -> None:
        """Take every step from here. `before` is what Redis had before the last step."""
        found = await self._read()
        content, saved = found.state(), found.saved
        before = before if at.failovers and at.first else None
        state = (at, content, before and before[0])
        if state in self.seen or self.violations:
            return
        self.seen.add(state)
        await self._check(path, found)
        for name, step in [*self.steps_of(at)]:
            may_be_lost = at.lost_replies > 0 and name != "sweep" and step.__name__ not in LOCAL
            for is_lost in (False, True)[: 1 + may_be_lost]:
                await self._restore(saved)
                place = await step()
                self.steps += 1
                now = at._replace(**{name: place})  # type: ignore[arg-type]
                label = f"{name} {step.__name__}"
                if is_lost:
                    # The program does not know that it has happened.
                    now, label = at._replace(lost_replies=at.lost_replies - 1), f"{label} (lost)"
                await self.explore(now, (*path, label), (content, saved))
        if before is not None:
            kept_keys = [each for each in saved if not _is_of_record(each)]
            await self._restore([*kept_keys, *filter(_is_of_record, before[1])])
            self.steps += 1
            now = at._replace(failovers=at.failovers - 1)
            await self.explore(now, (*path, FAILOVER))
        for label, now, happen in self._chances(at, is_open=found.is_open()):
            await self._restore(saved)
            await happen()
            self.steps += 1
            await self.explore(now, (*path, label), (content, saved))
        if not (at.first or at.second or at.client):
            await self._restore(saved)
            await self._check_end(path)

    def _chances(
        self, at: Programs, *, is_open: bool
    ) -> Iterator[tuple[str, Programs, Callable[[], Awaitable[Any]]]]:
        """Return what may happen beside the programs, and where they are then."""
        if at.expiries and is_open:
            yield "the lease expires", at._replace(expiries=at.expiries - 1), self._expire
        for number, what in at.late_steps():
            late = at._replace(late=at.late[:number] + at.late[number + 1 :])
            yield f"a late {what}", late, getattr(self, f"_late_{what}")
        if at.deaths and at.first:
            dead = at._replace(first="", deaths=at.deaths - 1)
            yield "the first gateway dies", dead, self.redis.ping

    async def _expire(self) -> None:
        await self.redis.zadd(keys.open_requests(BUCKET), {ID: EXPIRED_MS})

    async def _read(self) -> Found:
        saved: Saved = []
        values: dict[str, Any] = {}
        for name, content, ttl, kind, value in await self.redis.eval(READ_ALL, 0):
            saved.append((name, content, ttl))
            values[name.decode()] = (
                dict(zip(value[::2], value[1::2], strict=True)) if kind == b"hash" else value
            )
        entries = values.get(USAGE.decode(), ())
        return Found(saved, values, [decode_usage(fields[1]) for _, fields in entries])

    async def _restore(self, saved: Saved) -> None:
        arguments = [part for name, content, ttl in saved for part in (name, content, max(ttl, 0))]
        await self.redis.eval(WRITE_ALL, 0, *arguments)

    # -- invariants ------------------------------------------------------------------------------

    async def _check(self, path: tuple[str, ...], found: Found) -> None:
        fields, is_open = found.request(), found.is_open()
        state = fields.get(b"state")
        has_ended = state is not None and state != b"claimed"
        holds = b"amounts" in fields
        _, status, spent = await self.store.status(TENANT, SUBJECTS)
        held = struct.unpack(">7d", fields[b"amounts"][:56])[5] if holds else 0
        costs = dict[str, int]()
        for each in found.usage:
            costs[each.request_id] = max(costs.get(each.request_id, 0), each.cost_micros)
        is_unseeded = not status.is_seeded
        journal = await self._journal()
        charged, made = found.charged(), found.made()
        entry = found.values.get(_kept(1, key="k").entry, {}).get(b"request")
        kept_key = fields.get(b"key")
        stored = int(fields.get(b"bytes", b":0").rpartition(b":")[2])
        allowed = BYTES_BY_STATE.get(state or b"", (0, BYTES, 2 * BYTES, BYTES_AT_END))
        if FAILOVER in path:
            allowed = (*allowed, 0)  # They count again from the next change on.
        _, counted, _ = await self.storage.used(TENANT, SUBJECTS)
        for is_wrong, what in (
            (holds is not is_open, "what holds has a lease, and the reverse"),
            (has_ended and holds, "nothing is held after the end"),
            (counted != stored, "bytes count that a record has"),
            (
                spent.is_seeded and spent.cost_this_month != held + sum(costs.values()),
                "a spend limit counts what is held and what is charged",
            ),
            (stored not in allowed, "no bytes count after the end but what is left"),
            ("first refuse" in path and holds, "a refused request holds nothing"),
            (b"ends_as" in fields and not holds, "only what runs is shown as ended"),
            (bool(status.concurrent_requests) is not holds, "concurrent requests are those open"),
            (journal != [*TOKENS[: len(journal)]], "at most one owner writes"),
            (charged > made, "no more is charged than delivered"),
            (
                kept_key is not None and entry not in (ID.encode(), OTHER_ID.encode()),
                "a record with a key has it",
            ),
            (
                entry == ID.encode() and not fields,
                "a key stands for no request that does not exist",
            ),
        ):
            if is_wrong:
                self.violations.append(f"{what}: {' > '.join(path)} ({fields}, {is_unseeded})")

    async def _check_end(self, path: tuple[str, ...]) -> None:
        """Once all programs have ended, time alone ends the request, and all of it is charged."""
        if await self.redis.zscore(keys.open_requests(BUCKET), ID):
            await self._expire()
            [settle] = self._sweep_found(str(EXPIRED_MS))
            await settle()
        found = await self._read()
        fields, journal, made = found.request(), await self._journal(), found.made()
        state, charged = fields.get(b"state"), found.charged()
        rows = [each.request_id for each in found.usage]
        for is_wrong, what in (
            (b"amounts" in fields, "every admitted request reaches an end"),
            (
                state == b"claimed" and "the first gateway dies" not in path,
                "no claim stays without a gateway",
            ),
            (state == b"released" and charged > 0, "what is released is not charged"),
            (
                state in (b"finished", b"paused", b"cancelled", b"deleted") and charged != made,
                "charged is delivered",
            ),
            (state == b"finished" and journal != [*TOKENS], "what is finished is whole"),
            (
                state == b"deleted"
                and bool(await self.redis.exists(keys.content(ID)))
                and path[-1] == "client discard",
                "no bytes after forgetting",
            ),
            (
                OTHER_ID in rows and charged > 0 and state not in (b"released", None),
                "a key runs once",
            ),
        ):
            if is_wrong:
                self.violations.append(f"{what}: {' > '.join(path)} ({fields}, {rows}, {journal})")


def _is_of_record(key: tuple[bytes, bytes, int]) -> bool:
    """Whether a key is on the server of the record, and not one of the test."""
    name = key[0].decode()
    return name.startswith(keys.bucket_prefix(BUCKET)) and "test-" not in name


def _kept(term: int, *, owner: str = "g1", key: str = "") -> Kept:
    return kept(term, owner=owner, key=key, stored_for=names_of_counted(SUBJECTS))


def _request(
    request_id: str, own: Kept, *, completion: int = 20, settled: int = 0
) -> ReservationRequest:
    draft = record(
        request_id,
        created_ms=NOON,
        completion_tokens=settled,
        completion_price=MICRO_A_TOKEN,
        spend_limits=(SPENDING.subject,),
    )
    most = Counts(prompt_tokens=10, completion_tokens=completion)
    return ReservationRequest.of(draft, SUBJECTS, most, kept=own)


def _used(request_id: str, tokens: int, **fields: Any) -> UsageRecord:
    spending = (SPENDING.subject,)
    return record(
        request_id, completion_tokens=tokens, cost_micros=tokens, spend_limits=spending, **fields
    )


def _end(
    request_id: str,
    own: Kept | None,
    used: UsageRecord | None = None,
    state: RequestState | None = None,
    settled: Counts = Counts(),  # noqa: B008 - immutable
) -> RequestEnd:
    return RequestEnd(
        tenant_id=TENANT,
        request_id=request_id,
        record=used,
        kept=own,
        state=state,
        settled=settled if state is RequestState.PAUSED else Counts(),
        stored_bytes=None if state is None or own is None else BYTES_AT_END * (request_id == ID),
    )


def _with_expiry(end: RequestEnd, expired_ms: int) -> RequestEnd:
    return msgspec.structs.replace(end, expired_ms=expired_ms)


SCENARIOS = {
    "two gateways": Programs("new", second="idle", late=("extend", "renew")),
    "sweep": Programs("new", second="idle", sweep="idle", expiries=1, deaths=1),
    "client": Programs("new", client="idle", lost_replies=1, late=("stop",)),
    "failover": Programs("new", sweep="idle", expiries=1, failovers=1),
    "late": Programs("new", late=("claim", "keep", "release", "cancel", "forget")),
}
PLANTED = ("late", "failover", "client", "two gateways", "sweep")
"""The smallest one first."""
HOURS = [pytest.mark.long, pytest.mark.timeout(7_200)]
LONG = {
    "everything": Programs(
        "new",
        second="idle",
        client="idle",
        sweep="idle",
        expiries=2,
        deaths=1,
        lost_replies=1,
        late=("extend", "keep", "stop"),
    )
}


async def explored(redis: "Redis", clock: TestClock, start: Programs) -> World:
    """Explore one scenario from an empty Redis, until no step leads to a new state."""
    store = QuotaStore(redis)
    await redis.flushdb()
    await clock.set(clock.now_ms)
    for one in SUBJECTS:
        month = {} if one.spending is None else {"month": one.spending.bounds.start}
        await seed(store, one, **month)
    storage = Storage(redis, most_of_tenant=10**9)
    world = World(redis, store, storage, ResponseStore(redis, store))
    await world.explore(start)
    return world


@pytest.mark.parametrize(
    "scenario", [*SCENARIOS, *(pytest.param(name, marks=HOURS) for name in LONG)]
)
async def test_every_interleaving_keeps_the_invariants(
    any_redis: "Redis", clock: TestClock, scenario: str
) -> None:
    world = await explored(any_redis, clock, (SCENARIOS | LONG)[scenario])
    assert not world.violations, world.violations[0]
    logger.info("%s: %d states, %d steps", scenario, len(world.seen), world.steps)


PLANTS = {
    **{event: f"if event == '{event}' then return true end" for event in EVENTS},
    "term": "known_term = nil",
    "lost admission": "if event == 'settle' and state == CLAIMED then return false end",
}
"""What removes the guard of one kind of event, or of terms, or a transition, as `may` begins."""


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
async def test_missing_guard_is_found(
    any_redis: "Redis", clock: TestClock, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    head = b"local function may(event, state, known_term, term)\n"
    for module, name in [*((store_module, each) for each in SCRIPTS), (storage_module, "_KEEP")]:
        script = copy.copy(getattr(module, name))
        script.source = script.source.replace(head, head + PLANTS[plant].encode() + b"\n")
        script.digest = hashlib.sha1(script.source).hexdigest()
        monkeypatch.setattr(module, name, script)
    for start in (SCENARIOS[name] for name in PLANTED):
        try:
            world = await explored(any_redis, clock, start)
        except ResponseError:
            return
        if world.violations:
            return
    pytest.fail(f"no interleaving shows that {plant} has no guard")
