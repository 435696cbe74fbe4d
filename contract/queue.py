"""Queue of one model: a typed method for each script.

The Virtual Token Counter (Sheng et al., OSDI'24) makes it fair between tenants. A tenant's counter
grows by `(PROMPT_COST * prompt + COMPLETION_COST * completion) / weight`, and the tenant with the
lowest counter goes first. Tiers order the jobs of one tenant, and change its weight within bounds.

Batch jobs wait in a lane of their own, with the same order and bounds. They are claimed only when
no request waits, and a worker gives them back when requests need their room.

Affinity orders the jobs of one tenant by what a worker holds of them (see `contract.affinity`).

A worker that claims a job leases it; the pair (worker, attempt) is the fencing token. An ended job
leaves a receipt until the receipt is dropped.

The queue is bounded for the model and for each tenant. If it is full, a job of a higher tier sheds
jobs of lower tiers that never started. A rejected request receives a retry time, which depends on
the rate at which jobs are claimed.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from common import clock
from contract import keys, messages
from contract.affinity import MOST_HELD
from contract.messages import GenerationJob, WorkerCard, WorkerState
from contract.outcomes import JobReceipt, JobState
from contract.prompts import chunk_names, joined
from contract.scripts import Argument, CommandExecutor, LuaScript
from contract.scripts.batcher import ScriptBatcher
from contract.tier import TIER_BOOSTS, TIER_RANKS, Lane, ServiceTier, lane_of

_log = logging.getLogger(__name__)

PROMPT_COST = 1
"""Service units for each prompt token."""

COMPLETION_COST = 2
"""Service units for each completion token."""

ENGINE_HEADROOM_TOKENS = 256
"""Completion tokens of each sequence that must fit into the KV cache before a job is claimed.

The worst case, prompt + max_tokens, would leave most of the cache idle, since few completions are
that long. If many are, the engine preempts sequences and recomputes them.
"""

JOBS_AT_ONCE: Final = 32
"""Jobs of a request that are encoded and enqueued in one step, so that others are not delayed."""

LONG_PROMPT_TOKENS: Final = 4_096
"""After a longer prompt is encoded or decoded, in up to a few milliseconds, other tasks run."""

MOST_CLAIMED_PROMPT_TOKENS: Final = 32_768
"""Most prompt tokens of a claim with several jobs.

A worker starts all jobs of a claim before the next claim, which a short job of another tenant waits
for.
"""

AFFINITY_QUANTUM: Final = 2_048
"""Service units by which other tenants may overtake one whose jobs are kept for other workers."""

_NOT_TOGETHER: Final = -4
"""Code of `job_enqueue`."""

_LANES = {1: Lane.REQUESTS, 2: Lane.BATCH}
"""By the code of `job_claim`."""

_ABANDONED_GRACE_MS = 3_600_000
_REPORT_AGAIN_MS = 2_000
_PROMOTED_AT_ONCE = 100
_HELD_AT_ONCE = 1_000
_MOST_HOLDERS = 16 * MOST_HELD

MISSING_MS: Final = 200
"""Time for which a worker must be missing before it is gone: enough for heartbeats that waited
while Redis paused, and for a worker that connects again."""

LISTED_MS: Final = 3_600_000
"""How long a worker that is silent is known, unless it has stopped."""

_ENQUEUE = LuaScript("job_enqueue")
_CLAIM = LuaScript("job_claim")
_EXTEND = LuaScript("job_extend")
_FINISH = LuaScript("job_finish")
_CANCEL = LuaScript("job_cancel")
_RECLAIM = LuaScript("job_reclaim")
_REQUEUE = LuaScript("job_requeue")
_PROMOTE = LuaScript("job_promote")
_REVIVE = LuaScript("job_revive")
_CHARGE = LuaScript("job_charge")
_RECEIPTS = LuaScript("job_receipts")
_FORGET = LuaScript("job_forget")
_ANNOUNCE = LuaScript("worker_announce")
_BEAT = LuaScript("worker_beat")
_HOLD = LuaScript("worker_hold")
_WATCH = LuaScript("worker_watch")
_STATUS = LuaScript("model_status")


class EnqueueResult(Enum):
    """Result of enqueuing jobs."""

    ENQUEUED = 1
    DUPLICATE = 0  # The first job's id is already queued or leased, or has a receipt.
    MODEL_FULL = -1
    TENANT_FULL = -2
    TOO_LATE = -3  # It would wait longer than allowed.


class ShedJob(NamedTuple):
    """A waiting job that was removed to make room; its gateway has not been notified yet."""

    gateway: str
    handle: int


class EnqueueReport(NamedTuple):
    """Result of enqueuing jobs, and the jobs that were shed for them."""

    result: EnqueueResult
    waiting_jobs: int
    """Waiting jobs of the model."""
    retry_after_seconds: float | None
    """Time until the rejected request, or the shed jobs, would find room; None if unknown."""
    shed: list[ShedJob]


class RequeueResult(Enum):
    """Result of requeuing a lost job for another worker."""

    REQUEUED = 1
    REQUEUED_BEFORE = 2  # By an earlier call whose reply was lost; it may be claimed by now.
    HELD = 0  # Its worker has returned and holds the lease.
    ENDED = -1  # It was cancelled or has ended.
    UNKNOWN = -2  # Redis has lost it, or has only earlier attempts of it.


class JobClaim(NamedTuple):
    """One job leased to a worker."""

    job: GenerationJob
    attempt: int
    waited_seconds: float | None = None
    """Time since it was last enqueued; None if unknown."""
    is_preemptible: bool = False
    """Whether it comes from the batch lane."""
    weight: float = 1.0
    """The tenant's weight, boosted by the job's tier."""


class NextJob(NamedTuple):
    """A job that a worker has no room for."""

    tenant: str
    weight: float
    tokens: int
    """KV-cache tokens."""
    sequences: int
    model_share: int = messages.WHOLE_MODEL
    """As in `GenerationJob`."""
    lacks_slot: bool = False
    """Whether a slot must be freed for its adapter, too."""


class EngineUse(msgspec.Struct, frozen=True, array_like=True):
    """What requests use of the engine of a worker that is full."""

    sequences: int
    kv_cache_tokens: int
    """Those of the engine."""
    tenants: dict[str, tuple[int, int]]
    """Sequences and KV-cache tokens of the tenants that use most."""


_use_decoder = msgspec.msgpack.Decoder(EngineUse)


class Rights(msgspec.Struct, frozen=True):
    """What distinguishes the jobs for which nobody makes room in a full engine."""

    most: float
    """Sequences that a tenant of weight 1 may use together with its next job."""
    uses: dict[str, tuple[int, float]]
    """Sequences and weights of tenants in all full engines."""


class ClaimResult(NamedTuple):
    """Jobs leased by one call, requests first."""

    claims: list[JobClaim]
    blocked: Lane | None = None
    """The lane whose next job waits for more room, if any."""
    next_jobs: Sequence[NextJob] = ()
    """The next jobs of some tenants in fair order, if they wait for more room or for a slot."""
    others: Sequence[EngineUse] | None = None
    """The other full engines, if this one is blocked or its use was published."""
    kept_seconds: float = 0.0
    """Time until a job that is kept for another worker may be claimed; 0 if none is kept."""
    passed_jobs: int = 0
    """Jobs that a younger one of their tenant was preferred to by this call, for the first time."""
    kept_jobs: int = 0
    """Jobs that this call began to keep for other workers."""
    waits_for_slot: bool = False
    """Whether the next job of a tenant needs an adapter for which this worker has no slot."""
    capped: frozenset[Lane] = frozenset()
    """The lanes whose jobs wait only for their tenants' model shares."""
    affinity_seconds: float = 0.0
    """Time that the claimed jobs waited, all together, since each was first passed over or kept."""


class Room(NamedTuple):
    """Free capacity of an engine."""

    tokens: int
    sequences: int
    most_sequences: int
    """Most sequences counted for one job, so that a large `n` does not wait for an empty engine."""
    empty: bool
    """Whether the engine runs no job that it would keep; it then accepts any job."""
    preemptible_tokens: int = 0
    """More tokens for requests: those that running batch jobs would free."""
    preemptible_sequences: int = 0
    """More sequences for requests: those that batch jobs would free or must leave free."""
    batch_prompt_tokens: int = MOST_CLAIMED_PROMPT_TOKENS
    """Prompt tokens of batch jobs after which no more of them are claimed."""
    use: EngineUse | None = None
    """What the claim publishes."""
    cost: int = 0
    """Tokens that are processed again if a full engine makes room."""
    engine_tokens: int = 0
    """KV-cache tokens and sequences of the whole engine, of which tenants have shares."""
    engine_sequences: int = 0
    uses: Mapping[str, Sequence[int]] = MappingProxyType({})
    """Sequences and tokens of the requests of each tenant with a share, then of its batch jobs."""
    rights: "Rights | None" = None
    """For which jobs a full engine makes room; None if that is unknown."""


class Affinity(NamedTuple):
    """How far claims follow what workers hold."""

    patience_ms: int = 0
    """Time after which a job that was passed over goes first; 0 disables affinity."""
    prefill_us: float = 0.0
    """Time in which the worker processes a prompt token; 0 keeps no job for other workers."""
    longest_keep_ms: int = 0
    """Time after which a job is not kept for another worker; at least `patience_ms`."""


NO_AFFINITY: Final = Affinity()


class AdapterRoom(NamedTuple):
    """Which adapters the jobs of a claim may use."""

    used: list[str]
    """Digests of the adapters that running jobs use; any number of jobs may use them."""
    free_slots: int
    """Other adapters that jobs may use."""


class LeaseReport(NamedTuple):
    """A worker's report on a job, when it extends its leases or ends the job."""

    job_id: str
    attempt: int
    completion_tokens: int
    prompt_tokens: int = 0
    """0 until the engine has processed the prompt."""
    cached_tokens: int = 0


class LostJob(NamedTuple):
    """A job whose lease expired."""

    job_id: str
    tenant: str
    gateway: str
    handle: int
    attempt: int


class ModelStatus(NamedTuple):
    """Current workers and jobs of a model."""

    ready_workers: int
    waiting_jobs: int
    leased_jobs: int
    waiting_tenants: int = 0
    """Tenants with waiting jobs."""
    oldest_wait_seconds: float = 0.0
    """How long the oldest waiting job has waited; 0 if none waits."""
    waiting_batch_jobs: int = 0
    """The numbers above count requests, except that leased jobs include batch jobs."""


class _Bounds(NamedTuple):
    """What bounds a queue: numbers of jobs, and milliseconds."""

    most_waiting: int
    most_waiting_of_tenant: int
    longest_wait: int


class JobQueue:
    """Operations on the queue of one model."""

    def __init__(self, executor: CommandExecutor, model: str) -> None:
        self._executor = executor
        self.model = model
        self._job_prefix = keys.job.prefix(model)
        self._sequence = keys.sequence(model)
        self._leases = keys.leases(model)
        self._lanes = {lane: _lane_keys(model, lane) for lane in Lane}
        names = ("active", "counters", "batch_active", "batch_counters")
        self._counters = dict(
            zip(names, [key for each in self._lanes.values() for key in each[:2]], strict=True)
        )
        """The active tenants and service counters of every lane, as scripts name them."""
        self._holders = keys.holders(model)
        self._keys_of_lanes = [key for each in self._lanes.values() for key in each]
        self._prefixes = {
            lane: (keys.queue.prefix(model, lane), keys.tenant_pace.prefix(model, lane))
            for lane in Lane
        }
        """Of the tenants' queues and paces in every lane."""
        self._enqueuing = ScriptBatcher(self._enqueue_single, most=JOBS_AT_ONCE)
        self._enqueue_names = lru_cache(maxsize=10_000)(self._names_to_enqueue)
        names = ("queue_prefix", "pace_prefix", "batch_queue_prefix", "batch_pace_prefix")
        self._claim_names = {
            "leases": self._leases,
            "holders": self._holders,
            "workers": keys.workers(model),
            "hinted": keys.hinted(model),
            "job_prefix": self._job_prefix,
            "held_prefix": keys.held.prefix(model),
            "use_prefix": keys.engine_use.prefix(model),
            "doorbell_prefix": keys.worker_doorbell.prefix(model),
            "session_prefix": keys.sessions.prefix(model),
            **dict(zip(names, chain.from_iterable(self._prefixes.values()), strict=True)),
        }
        """What `job_claim` names and what never changes."""

    async def enqueue(
        self,
        jobs: Sequence[GenerationJob],
        *,
        weight: float,
        most_waiting: int,
        most_waiting_of_tenant: int,
        longest_wait_seconds: float,
    ) -> EnqueueReport:
        """Enqueue all jobs of one request, or none. They must have the same tenant and tier.

        `weight` is the tenant's; this method applies the tier's boost. The caller must notify the
        gateways of shed jobs.
        """
        bounds = _Bounds(most_waiting, most_waiting_of_tenant, int(longest_wait_seconds * 1000))
        if len(jobs) == 1 and len(jobs[0].prompt_token_ids) <= LONG_PROMPT_TOKENS:
            job = jobs[0]
            return await self._enqueuing.add((job.tenant, job.service_tier, weight, bounds), job)
        first, *others = [
            jobs[start : start + JOBS_AT_ONCE] for start in range(0, len(jobs), JOBS_AT_ONCE)
        ]
        report = await self._enqueue(first, weight, bounds, admitted=len(jobs))
        for part in others:
            if report.result not in (EnqueueResult.ENQUEUED, EnqueueResult.DUPLICATE):
                break
            later = await self._enqueue(part, weight, bounds, admitted=0)
            report = report._replace(waiting_jobs=later.waiting_jobs)
        return report

    async def _enqueue_single(
        self, kind: tuple[str, ServiceTier, float, "_Bounds"], jobs: Sequence[GenerationJob]
    ) -> list[EnqueueReport]:
        """Enqueue the only jobs of requests, together if all of them have room without a wait."""
        _, _, weight, bounds = kind
        if len(jobs) > 1:
            reply = await self._send(jobs, weight, bounds, admitted=len(jobs), is_shared=True)
            if reply[0] != _NOT_TOGETHER:
                return [_enqueue_report(reply)] * len(jobs)
        alone = (self._enqueue([job], weight, bounds, admitted=1) for job in jobs)
        return list(await asyncio.gather(*alone))

    async def _enqueue(
        self, jobs: Sequence[GenerationJob], weight: float, bounds: "_Bounds", *, admitted: int
    ) -> EnqueueReport:
        return _enqueue_report(await self._send(jobs, weight, bounds, admitted=admitted))

    async def _send(
        self,
        jobs: Sequence[GenerationJob],
        weight: float,
        bounds: "_Bounds",
        *,
        admitted: int,
        is_shared: bool = False,
    ) -> list[Any]:
        tenant, tier = jobs[0].tenant, jobs[0].service_tier
        lane = lane_of(tier)
        deadline_ms = max(job.deadline_ms for job in jobs)
        arguments: list[Argument] = []
        for job in jobs:
            arguments += [
                job.id,
                len(job.prompt_token_ids),
                job.sequences,
                needed_tokens(job),
                job.gateway,
                job.handle,
                messages.encode_job(job),
                job.affinity,
                adapter_of(job),
                job.model_share,
            ]
            await let_others_run(job)
        names, tenant_keys = self._enqueue_names(tenant, lane)
        reply: list[Any] = await _ENQUEUE.run(
            self._executor,
            **names,
            keys=[*tenant_keys, *self._jobs([job.id for job in jobs])],
            weight=weight * TIER_BOOSTS[tier],
            rank=TIER_RANKS[tier],
            **bounds._asdict(),
            expires_ms=_expires_ms(deadline_ms),
            admitted=admitted,
            is_shared=int(is_shared),
            arguments=arguments,
        )
        return reply

    async def claim(
        self,
        worker: str,
        room: Room,
        *,
        most_jobs: int,
        lease_ms: int,
        affinity: Affinity = NO_AFFINITY,
        adapters: AdapterRoom | None = None,
        engine: str = "",
        only: str = "",
    ) -> ClaimResult:
        """Lease waiting jobs in fair order, as long as they fit into `room`.

        `only` names the one tenant whose jobs are leased.

        Without `adapters`, jobs with an adapter are left to other workers. Receipts name the
        `engine`.
        """
        reply = await _CLAIM.run(
            self._executor,
            **self._claim_names,
            keys=self._keys_of_lanes,
            worker=worker,
            engine=engine,
            most_jobs=most_jobs,
            lease_ms=lease_ms,
            prompt_cost=PROMPT_COST,
            tokens=room.tokens,
            sequences=room.sequences,
            most_sequences=room.most_sequences,
            is_empty=int(room.empty),
            most_prompt_tokens=MOST_CLAIMED_PROMPT_TOKENS,
            preemptible_tokens=room.preemptible_tokens,
            preemptible_sequences=room.preemptible_sequences,
            batch_prompt_tokens=room.batch_prompt_tokens,
            patience=affinity.patience_ms,
            longest_keep=max(affinity.longest_keep_ms, affinity.patience_ms),
            prefill_us=affinity.prefill_us,
            quantum=AFFINITY_QUANTUM,
            only=only,
            use=b"" if room.use is None else messages.encode(room.use),
            cost=room.cost,
            free_slots=-1 if adapters is None else adapters.free_slots,
            engine_tokens=room.engine_tokens,
            engine_sequences=room.engine_sequences,
            uses=msgspec.json.encode(dict(room.uses)) if room.uses else "",
            rights=b"" if room.rights is None else msgspec.json.encode(room.rights),
            arguments=() if adapters is None else adapters.used,
        )
        blocked, requests, kept_ms, passed_jobs, kept_jobs, waits_for_slot, affinity_ms = reply[:7]
        next_jobs, others, capped, *rows = reply[7:]
        claims = []
        for number, (_, attempt, waited_ms, payload, boosted) in enumerate(_grouped(rows, 5)):
            try:
                job = messages.decode_job(payload)
            except msgspec.MsgspecError:
                # The lease expires and the gateway decides what happens; all other jobs run.
                _log.exception("Claimed a job that this version cannot decode")
                continue
            waited_seconds = None if waited_ms < 0 else waited_ms / 1000
            is_batch = number >= requests
            claims.append(JobClaim(job, int(attempt), waited_seconds, is_batch, float(boosted)))
            await let_others_run(job)
        return ClaimResult(
            claims,
            _LANES.get(blocked),
            [
                NextJob(
                    tenant.decode(),
                    float(weight),
                    int(tokens),
                    int(sequences),
                    int(share),
                    lacks == 1,
                )
                for tenant, weight, tokens, sequences, share, lacks in _grouped(next_jobs, 6)
            ],
            None
            if room.use is None and _LANES.get(blocked) is not Lane.REQUESTS
            else [use for each in others if each and (use := _decoded_use(each))],
            kept_ms / 1000,
            passed_jobs,
            kept_jobs,
            bool(waits_for_slot),
            frozenset(lane for code, lane in _LANES.items() if capped & code),
            affinity_ms / 1000,
        )

    async def extend(
        self, worker: str, reports: Iterable[LeaseReport], *, lease_ms: int
    ) -> list[str]:
        """Renew leases and store and charge progress. Return the ids of jobs the worker must drop.

        The first report of prompt and cached tokens corrects the charge of the claim.

        A lease of 0 ms returns the jobs: they count as lost immediately.
        """
        lost = await _EXTEND.run(
            self._executor,
            leases=self._leases,
            **self._counters,
            job_prefix=self._job_prefix,
            worker=worker,
            lease_ms=lease_ms,
            completion_cost=COMPLETION_COST,
            prompt_cost=PROMPT_COST,
            arguments=chain.from_iterable(reports),
        )
        return [job_id.decode() for job_id in lost]

    async def finish(self, worker: str, *reports: LeaseReport) -> bool:
        """End leased jobs and store their receipts.

        Return False if another worker holds the lease of one of them or it has ended. That job is
        unchanged.
        """
        finished = await _FINISH.run(
            self._executor,
            leases=self._leases,
            **self._counters,
            keys=self._jobs([report.job_id for report in reports]),
            worker=worker,
            completion_cost=COMPLETION_COST,
            prompt_cost=PROMPT_COST,
            arguments=chain.from_iterable(reports),
        )
        return bool(finished == len(reports))

    async def charge(self, worker: str, job_id: str, attempt: int, units: float) -> bool:
        """Charge the tenant of a leased job for service units besides its tokens.

        Return False and change nothing if another worker holds the lease or the job has ended.
        """
        charged = await _CHARGE.run(
            self._executor,
            key=self._job_prefix + job_id,
            **self._counters,
            worker=worker,
            attempt=attempt,
            units=units,
        )
        return bool(charged)

    async def cancel(self, job_id: str, tenant: str) -> bool:
        """Cancel a job. Return False if it has ended or is unknown.

        A waiting job is deleted immediately; what was received of it leaves a receipt. A leased
        job's worker is notified. The job is RUNNING until that worker ends it with its counts, or
        the lease expires.
        """
        cancelled = await _CANCEL.run(
            self._executor,
            **self._names_of(job_id, tenant),
            keys=self._keys_of_tenant(tenant),
            control_prefix=keys.control.prefix(self.model),
        )
        return bool(cancelled)

    async def reclaim(self, *, most: int = 100) -> list[LostJob]:
        """Return jobs whose lease expired, each again every two seconds until it is resolved.

        Cancelled jobs are not returned: they end here, with the counts of their workers' last
        reports.
        """
        rows = await _RECLAIM.run(
            self._executor,
            leases=self._leases,
            job_prefix=self._job_prefix,
            most=most,
            again_ms=_REPORT_AGAIN_MS,
        )
        return [
            LostJob(job_id.decode(), tenant.decode(), gateway.decode(), int(handle), int(attempt))
            for job_id, tenant, gateway, handle, attempt in _grouped(rows, 5)
        ]

    async def requeue(
        self, job: GenerationJob, attempt: int, *, is_returned: bool = False
    ) -> RequeueResult:
        """Put the updated job back at the head of its tier in its tenant's queue.

        Attempt `attempt` must be lost, or returned by its worker (`is_returned`).
        """
        code = await _REQUEUE.run(
            self._executor,
            **self._names_of(job.id, job.tenant),
            keys=self._keys_of_tenant(job.tenant),
            lost_attempt=attempt,
            is_returned=int(is_returned),
            need_tokens=needed_tokens(job),
            payload=messages.encode_job(job),
            **received_counts(job)._asdict(),
            affinity=job.affinity,
        )
        return RequeueResult(code)

    async def revive(self, job: GenerationJob, *, weight: float, attempt: int) -> int:
        """Enqueue a job again, whatever its state. Return the last attempt that is over.

        This is for a job that Redis has lost or that another gateway takes over. The next claim
        gets a higher attempt number than `attempt` and than any attempt in Redis. Bounds on waiting
        jobs do not apply, since the job was admitted before.
        """
        tier = job.service_tier
        over: int = await _REVIVE.run(
            self._executor,
            **self._names_of(job.id, job.tenant),
            sequence=self._sequence,
            keys=self._keys_of_tenant(job.tenant),
            over_attempt=attempt,
            need_tokens=needed_tokens(job),
            payload=messages.encode_job(job),
            weight=weight * TIER_BOOSTS[tier],
            rank=TIER_RANKS[tier],
            prompt_tokens=len(job.prompt_token_ids),
            sequences=job.sequences,
            gateway=job.gateway,
            handle=job.handle,
            expires_ms=_expires_ms(job.deadline_ms),
            **received_counts(job)._asdict(),
            affinity=job.affinity,
            adapter=adapter_of(job),
            share=job.model_share,
        )
        return over

    async def promote(self, job_ids: Sequence[str], tenant: str, tier: ServiceTier) -> int:
        """Raise jobs of a tenant that are in lower tiers to this one. Return how many were raised.

        A job that has ended, is unknown or is not in a lower tier stays unchanged. The price of a
        request does not change.
        """
        boosts = [TIER_BOOSTS[each] for each in sorted(TIER_RANKS, key=TIER_RANKS.__getitem__)]
        lanes = self._keys_of_tenant(tenant)
        raised = 0
        for start in range(0, len(job_ids), _PROMOTED_AT_ONCE):
            some = job_ids[start : start + _PROMOTED_AT_ONCE]
            raised += await _PROMOTE.run(
                self._executor,
                keys=[*lanes, *self._jobs(some)],
                tenant=tenant,
                new_rank=TIER_RANKS[tier],
                arguments=[*boosts, *some],
            )
        return raised

    async def receipts(self, job_ids: Sequence[str]) -> list[JobReceipt]:
        """Return the states and token counts of jobs, in the order of `job_ids`."""
        rows = await _RECEIPTS.run(self._executor, keys=self._jobs(job_ids))
        return [
            JobReceipt(JobState(state), completion, prompt, cached, engine.decode())
            for state, completion, prompt, cached, engine in rows
        ]

    async def holders_of(self, job_ids: Sequence[str]) -> set[str]:
        """Return the workers that have leases of these jobs."""
        workers: list[bytes | None] = await asyncio.gather(
            *(self._executor.execute_command("HGET", key, "worker") for key in self._jobs(job_ids))
        )
        return {worker.decode() for worker in workers if worker}

    async def forget(self, job_ids: Sequence[str]) -> None:
        """Drop the receipts of settled jobs; jobs that have not ended will leave none."""
        await _FORGET.run(self._executor, keys=self._jobs(job_ids))

    async def with_prompt(
        self, job: GenerationJob, held: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> tuple[GenerationJob | None, dict[bytes, bytes]]:
        """Return a job with its whole prompt, and the chunks of it by name.

        The job is None if Redis lacks chunks that are not among `held`, or if some are wrong. These
        are deleted.
        """
        if not job.chunks:
            return job, {}
        execute = self._executor.execute_command
        names = chunk_names(job.chunks, job.rest)
        lacked = [name for name in names if name not in held]
        found = await execute("MGET", *map(self._chunk, lacked)) if lacked else []
        every: Mapping[bytes, bytes | None] = {**held, **dict(zip(lacked, found, strict=True))}
        content = {name: each for name in names if (each := every[name]) is not None}
        token_ids = joined(job.cache_salt, job.chunks, content.values(), job.rest)
        if token_ids is not None:
            job = msgspec.structs.replace(job, prompt_token_ids=token_ids, chunks=b"")
            return job, content
        if len(content) == len(names):
            await execute("UNLINK", *map(self._chunk, names))
        return None, {}

    async def keep_chunks(self, names: Sequence[bytes], *, ttl_ms: int) -> list[bool]:
        """Keep chunks for `ttl_ms` milliseconds from now. Return which of them Redis has."""
        execute = self._executor.execute_command
        kept = await asyncio.gather(
            *(execute("PEXPIRE", self._chunk(name), ttl_ms) for name in names)
        )
        return [bool(each) for each in kept]

    async def write_chunks(self, chunks: Mapping[bytes, bytes], *, ttl_ms: int) -> None:
        """Store chunks by their names for `ttl_ms` milliseconds."""
        execute = self._executor.execute_command
        await asyncio.gather(
            *(execute("SET", self._chunk(each), chunks[each], "PX", ttl_ms) for each in chunks)
        )

    async def announce(self, card: WorkerCard, *, ttl_ms: int) -> int:
        """Announce a worker; the announcement and what it holds expire after `ttl_ms`.

        Return how many digests Redis has of what it holds.
        """
        held: int = await _ANNOUNCE.run(
            self._executor,
            workers=keys.workers(self.model),
            card_key=keys.worker_card(self.model, card.id),
            held=keys.held(self.model, card.id),
            doorbell=keys.doorbell(self.model),
            last_seen=keys.last_seen(self.model),
            worker=card.id,
            card=messages.encode(card),
            ttl_ms=ttl_ms,
            is_claiming=int(card.state is WorkerState.READY),
            listed_ms=LISTED_MS,
        )
        return held

    async def forget_worker(self, worker: str) -> None:
        """Remove a worker that stops from the workers that were last seen."""
        await self._executor.execute_command("HDEL", keys.last_seen(self.model), worker)

    async def hold(
        self,
        worker: str,
        *,
        removed: Sequence[bytes] = (),
        added: Sequence[bytes] = (),
        starts_over: bool = False,
        ttl_ms: int,
    ) -> int:
        """Publish changes of what a worker holds. Return how many digests Redis then has of it.

        If it `starts_over`, it holds nothing but `added`. Announcements extend the lifetime.
        """
        held = 0
        changes = [*((digest, False) for digest in removed), *((digest, True) for digest in added)]
        for start in range(0, max(len(changes), 1), _HELD_AT_ONCE):
            some = changes[start : start + _HELD_AT_ONCE]
            held = await _HOLD.run(
                self._executor,
                held=keys.held(self.model, worker),
                holders=self._holders,
                worker=worker,
                ttl_ms=ttl_ms,
                starts_over=int(starts_over and not start),
                most_holders=_MOST_HOLDERS,
                removed=sum(not is_added for _, is_added in some),
                arguments=(digest for digest, _ in some),
            )
        return held

    async def beat(self, worker: str, *, lease_ms: int) -> bool:
        """Renew a worker's lease; 0 ms end it. Return whether the worker is watched.

        It is if Redis has its subscription to `keys.worker_channel`.
        """
        watched = await _BEAT.run(
            self._executor,
            watched=keys.watched_workers(self.model),
            seen_on=keys.seen_on(self.model),
            worker=worker,
            channel=keys.worker_channel(self.model, worker),
            lease_ms=lease_ms,
        )
        return bool(watched)

    async def gone_workers(self) -> list[str]:
        """Find workers whose process, machine or connection is gone. Expire their jobs' leases.

        Each worker is returned once, by the second call that finds it missing.
        """
        gone = await _WATCH.run(
            self._executor,
            watched=keys.watched_workers(self.model),
            workers=keys.workers(self.model),
            leases=self._leases,
            doorbell=keys.doorbell(self.model),
            seen_on=keys.seen_on(self.model),
            channel_prefix=keys.worker_channel.prefix(self.model),
            card_prefix=keys.worker_card.prefix(self.model),
            job_prefix=self._job_prefix,
            held_prefix=keys.held.prefix(self.model),
            grace_ms=MISSING_MS,
        )
        return [worker.decode() for worker in gone]

    async def status(self) -> ModelStatus:
        """Count ready workers and jobs, and measure the oldest wait."""
        workers, waiting, leased, tenants, oldest_ms, batch_jobs = await _STATUS.run(
            self._executor,
            workers=keys.workers(self.model),
            waiting=keys.waiting(self.model),
            leases=self._leases,
            active=keys.active_tenants(self.model),
            arrivals=keys.arrivals(self.model),
            batch_waiting=keys.waiting(self.model, Lane.BATCH),
            job_prefix=self._job_prefix,
        )
        return ModelStatus(workers, waiting, leased, tenants, oldest_ms / 1000, batch_jobs)

    def _names_to_enqueue(self, tenant: str, lane: Lane) -> tuple[dict[str, str], list[str]]:
        """Return what `job_enqueue` names and what never changes for a tenant, and further keys."""
        queue_prefix, pace_prefix = self._prefixes[lane]
        names = {
            "sequence": self._sequence,
            "promises": keys.promises(self.model, lane),
            "tenant_promises": keys.tenant_promises(self.model, tenant, lane),
            "tenant": tenant,
            "job_prefix": self._job_prefix,
            "queue_prefix": queue_prefix,
            "pace_prefix": pace_prefix,
        }
        return names, self._keys_of(tenant, lane)

    def _names_of(self, job_id: str, tenant: str) -> dict[str, str]:
        """Return what scripts for one job name."""
        key = self._job_prefix + job_id
        return {"leases": self._leases, "key": key, "id": job_id, "tenant": tenant}

    def _keys_of_tenant(self, tenant: str) -> list[str]:
        """Return the keys that change when a job of a tenant enters or leaves any lane."""
        return [key for lane in Lane for key in self._keys_of(tenant, lane)]

    def _keys_of(self, tenant: str, lane: Lane) -> list[str]:
        """Return the keys of a lane, then the keys of a tenant in it."""
        return [*self._lanes[lane], *(prefix + tenant for prefix in self._prefixes[lane])]

    def _chunk(self, name: bytes) -> str:
        return keys.chunk(self.model, name.hex())

    def _jobs(self, job_ids: Sequence[str]) -> list[str]:
        return [self._job_prefix + job_id for job_id in job_ids]


def _enqueue_report(reply: Sequence[Any]) -> EnqueueReport:
    code, waiting_jobs, retry_ms, *rows = reply
    shed = [ShedJob(gateway.decode(), int(handle)) for gateway, handle in _grouped(rows, 2)]
    return EnqueueReport(
        EnqueueResult(code), waiting_jobs, retry_ms / 1000 if retry_ms else None, shed
    )


def _lane_keys(model: str, lane: Lane) -> list[str]:
    names = (
        *(keys.active_tenants, keys.service_counters, keys.last_active, keys.waiting),
        *(keys.doorbell, keys.sheddable, keys.pace, keys.arrivals, keys.full_workers),
    )
    return [name(model, lane) for name in names]


async def let_others_run(job: GenerationJob) -> None:
    """Let other tasks run after a step whose time grows with the job's prompt, if it is long."""
    if len(job.prompt_token_ids) > LONG_PROMPT_TOKENS:
        await asyncio.sleep(0)


def headroom_tokens(job: GenerationJob) -> int:
    """Return the KV-cache tokens that are kept for new tokens of each sequence."""
    return min(job.max_tokens, ENGINE_HEADROOM_TOKENS)


def needed_tokens(job: GenerationJob) -> int:
    """Return the KV-cache tokens that must be free before the job is claimed."""
    headroom = headroom_tokens(job)
    prompt_tokens = len(job.prompt_token_ids)
    if job.resumption is None:
        return prompt_tokens + job.sequences * headroom
    done = [len(each.token_ids) for each in job.resumption.sequences if each.finish_reason is None]
    return prompt_tokens + sum(done) + len(done) * headroom


def adapter_of(job: GenerationJob) -> str:
    """Return the digest of the adapter with which a job runs; empty for the base model."""
    return "" if job.adapter is None else job.adapter.digest


class ReceivedCounts(NamedTuple):
    """Tokens that earlier attempts of a job delivered."""

    completion: int = 0
    prompt: int = 0
    cached: int = 0


def received_counts(job: GenerationJob) -> ReceivedCounts:
    """Return the tokens that earlier attempts of a job delivered."""
    if (resumed := job.resumption) is None:
        return ReceivedCounts()
    tokens = sum(len(each.token_ids) for each in resumed.sequences)
    copies = job.n if job.is_replicated else 1
    return ReceivedCounts(tokens * copies, resumed.prompt_tokens, resumed.cached_tokens)


def _expires_ms(deadline_ms: int) -> int:
    """Return after how many milliseconds a job disappears if every process abandons it."""
    return max(deadline_ms - clock.now_ms(), 0) + _ABANDONED_GRACE_MS


def _decoded_use(content: bytes) -> EngineUse | None:
    try:
        return _use_decoder.decode(content)
    except msgspec.MsgspecError:  # Of another version.
        return None


def _grouped(values: list[Any], size: int) -> Iterable[list[Any]]:
    return (values[i : i + size] for i in range(0, len(values), size))
