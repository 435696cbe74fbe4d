"""Preemption: sequences leave the engine when other jobs have a right to their room.

Batch jobs give way to requests. A request gives way to a tenant that uses less of the engine. A
preempted job returns to its gateway with its tokens, like a job of a stopping worker, and resumes
after its last token. A job with several sequences keeps its lease and gives up one after another:
these are parked, and continue here when there is room. A tenant gives up what exceeds its model
share.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from contract.messages import WHOLE_MODEL, JobPreempted, ReturnReason
from contract.queue import ENGINE_HEADROOM_TOKENS, EngineUse, NextJob, Rights, Room
from worker import telemetry
from worker.engine.base import Engine
from worker.execution.jobs import RunningJobs
from worker.execution.running_job import RunningJob
from worker.execution.sequence import SAFE_TOKENS
from worker.execution.sequence import Sequence as EngineSequence
from worker.execution.uses import Use, Uses, Victim

BATCH_PROMPT_TOKENS = 2_048
"""Prompt tokens of batch jobs that the engine processes at once.

A longer prompt is processed alone.
"""

BATCH_PROMPT_TOKENS_BESIDE_REQUESTS = 8
"""BATCH_PROMPT_TOKENS while requests run, for each sequence of the engine: first tokens of requests
wait for these prompts.

This keeps the sequences full of batch jobs whose prompts have up to eight times as many tokens as
their completions.
"""

LEAST_FREE_SHARE, MOST_FREE_SHARE = 1 / 8, 5 / 16
"""Batch jobs leave as many sequences free as requests use, so that most requests preempt none.

These are the least and the most, as shares of the engine's sequences.
"""

GATHER_SECONDS = 4.0
"""Time for which free room is left to a job that waits for more of it."""

MARGIN = 1.125
"""How many times the use of a waiting tenant another one must exceed to give up sequences.

The counters of the queue decide which of two busy tenants begins a job, and may differ from their
uses by a few sequences. Without a margin, the other one would take each of these jobs back.
"""

MOST_PUBLISHED = 64
"""Tenants whose use of a full engine is published. The others use less than a 64th of it each."""

NO_VICTIM = 10**9
"""The cost of making room if that is not possible now."""


class Preemption:
    """The room of an engine, and the jobs that make room.

    Args:
        share: Share of the engine's sequences that are preempted in a second, at most.
    """

    def __init__(self, engine: Engine, jobs: RunningJobs, *, share: float) -> None:
        self._info = engine.info
        self._jobs = jobs
        self._rate = share * engine.info.max_sequences
        self._most_allowance = max(self._rate, 1.0)
        self._allowance = self._most_allowance if share else 0.0
        """Sequences that may be preempted now; negative after a job with more sequences."""
        self._renewed_at = time.monotonic()
        self._cost = NO_VICTIM
        """Tokens that are processed again if a job of a new tenant gets room."""
        self.waiting: AbstractSet[str] = frozenset()
        """The tenants of the next jobs of the queue."""
        self._elsewhere: dict[str, tuple[int, int]] = {}
        """Sequences and tokens that tenants use of other full engines."""
        self._levels: tuple[Uses | None, dict[str, float]]
        """The uses of which the levels of tenants were computed, and these levels."""
        self._max_sequences = self._kv_cache_tokens = 0
        self.note_others(())

    @property
    def pause_seconds(self) -> float:
        """Time until the next batch job may be preempted; 0 if one may be or none runs."""
        if not self._jobs.batch or not self._rate:
            return 0.0
        return max(1.0 - self._allowance, 0.0) / self._rate

    def note_others(self, others: Sequence[EngineUse]) -> None:
        """Note the other full engines of the model, over which the uses of tenants are added."""
        info, elsewhere = self._info, dict[str, tuple[int, int]]()
        for tenant, (sequences, tokens) in chain.from_iterable(e.tenants.items() for e in others):
            before = elsewhere.get(tenant, (0, 0))
            elsewhere[tenant] = before[0] + sequences, before[1] + tokens
        self._elsewhere = elsewhere
        self._levels = None, {}
        self._max_sequences = info.max_sequences + sum(each.sequences for each in others)
        self._kv_cache_tokens = info.kv_cache_tokens + sum(each.kv_cache_tokens for each in others)

    def published(self, room: Room) -> Room:
        """Return the room of a full engine, with what tenants use and the cost of making room."""
        info, uses = self._info, self._jobs.uses.requests
        victims = self._victims(NextJob("", 1.0, ENGINE_HEADROOM_TOKENS, 1))
        self._cost = NO_VICTIM
        if victims and self._renewed_allowance() >= 1.0:
            self._cost = 1 + sum(_repeated_tokens(*each[:2]) for each in victims)
        most = sorted(uses.values(), key=self._level)[-MOST_PUBLISHED:]
        tenants = {each.tenant: (each.sequences, each.tokens) for each in most}
        use = EngineUse(info.max_sequences, info.kv_cache_tokens, tenants)
        return room._replace(use=use, cost=self._cost)

    def rights(self) -> Rights | None:
        """Return which jobs no tenant makes room for; None if the next job of any may get room."""
        uses = self._uses()
        if self._jobs.batch or not uses:
            return None
        most = max(map(self._level, uses.values())) * self._max_sequences / MARGIN
        uses |= {each: self._use(each) for each in self._elsewhere.keys() - uses.keys()}
        most_sequences = self._most_sequences
        # Large jobs make room for small ones of their tenants.
        known = {
            each.tenant: (each.sequences, each.weight)
            for each in uses.values()
            if all(e.seats <= most_sequences for e in each.jobs)
        }
        return Rights(most, known)

    def has_right(self, job: NextJob) -> bool:
        """Whether other tenants must give up sequences for a job."""
        return bool(self._rate and self._victims(job))

    def room(self) -> Room:
        """Return the free room, and the room of batch jobs that may be preempted now."""
        jobs, uses, most_sequences = self._jobs, self._jobs.uses, self._info.max_sequences
        candidates = self._batch_candidates()
        unprocessed = sum(
            len(each.job.prompt_token_ids)
            for each in jobs.batch.values()
            if each.first_token_at is None
        )
        least, most = (int(e * most_sequences) for e in (LEAST_FREE_SHARE, MOST_FREE_SHARE))
        kept_free = min(max(uses.request_sequences, least), most)
        preemptible = sum(each.seats for each in candidates)
        return Room(
            tokens=self._free_tokens(),
            sequences=most_sequences - uses.sequences - kept_free,
            most_sequences=self._most_sequences,
            empty=len(candidates) == len(jobs.by_id),
            preemptible_tokens=sum(each.held_tokens for each in candidates),
            preemptible_sequences=preemptible + kept_free,
            batch_prompt_tokens=self._batch_prompt_tokens - unprocessed,
            cost=self._cost,
            engine_tokens=self._info.kv_cache_tokens,
            engine_sequences=most_sequences,
            uses={tenant: self._limited_use(tenant) for tenant in uses.limited},
        )

    def make_room(self, started: Sequence[RunningJob]) -> None:
        """Give started jobs room: return batch jobs, youngest first, for the requests among them.

        Sequences for which there is no room are parked, except one of each job. No job takes the
        seats of those that were claimed with it: a claim does not count all sequences of large
        jobs.
        """
        requests = [each.seats for each in started if not each.is_preemptible]
        if requests and self._jobs.batch:
            excess = sum(requests) - sum(min(each, self._most_sequences) for each in requests)
            self._return_batch(-self._free_sequences() - excess, -self._free_tokens())
        free = self._free_sequences() + sum(each.seats for each in started)
        least = {each: 1 if each.is_divisible else each.seats for each in started}
        free -= sum(least.values())
        for generation in started:
            free += least[generation]
            if generation.is_divisible:
                generation.park(generation.seated[max(free, 1) :])
                self._jobs.note_change()
                if (share := generation.job.model_share) < WHOLE_MODEL:
                    use = self._jobs.uses.of(generation.job.tenant)
                    while generation.seats > 1 and self._exceeds(use, share):
                        *_, last = generation.seated
                        generation.park([last])
                        use.take(1, last.held_tokens)
                    self._jobs.note_change()
            free -= generation.seats
        self.keep_shares(started)

    @property
    def has_shares(self) -> bool:
        """Whether a job of a tenant with a model share runs."""
        return bool(self._jobs.uses.limited)

    def keep_shares(self, started: Sequence[RunningJob] = ()) -> bool:
        """Preempt sequences of tenants that exceed their model shares, except of `started` jobs.

        Batch jobs go first, and one job or sequence stays. Return whether any were preempted.
        """
        is_changed = False
        for tenant in self._jobs.uses.limited:
            use = self._jobs.uses.of(tenant, has_batch=True)
            share = max(each.job.model_share for each in use.jobs)
            victims = (each for each in use.victims(0) if each[0] not in started)
            while self._exceeds(use, share) and self._renewed_allowance() >= 1.0:
                generation, leaving, tokens = next(victims, (None, [], 0))
                if generation is None:
                    break
                if len(leaving) < use.sequences:
                    use.take(len(leaving), tokens)
                    self._preempt(generation, leaving, "share")
                    is_changed = True
        return is_changed

    def make_room_for(self, job: NextJob, *, is_parked: bool = False) -> int | None:
        """Preempt sequences of tenants that use more of the engine, if that makes room for a job.

        A tenant's use is its share of the sequences or of the KV cache of the model's full engines,
        whichever is larger, divided by its weight. Tenants give up sequences only while they use
        MARGIN times what the job's tenant would, so that no two tenants preempt each other in
        turns. Batch jobs go before. Unless the job `is_parked`, large jobs of its own tenant give
        up what claims do not count of them. Slots for adapters are given up in the same way, if all
        that use one may leave at once. Return how many sequences were preempted now, or None
        if the job has no right to room. If they do not suffice, others follow as the preempted
        share allows, unless that takes longer than GATHER_SECONDS.
        """
        victims = self._victims(job, is_parked=is_parked)
        if victims is None:
            return None
        missing = sum(len(leaving) for _, leaving, _ in victims) - self._renewed_allowance()
        most_missing = GATHER_SECONDS * self._rate
        own = [each for each, _, _ in victims if each.job.tenant == job.tenant]
        if not all(each.is_preemptible for each in own):
            # A tenant must neither use up what is preempted for others, nor hold room for itself.
            most_missing = -min(self._most_allowance / 2, self._most_allowance - 1.0)
        if missing > (0.0 if job.lacks_slot else most_missing):
            return None
        preempted = 0
        for generation, leaving, _ in victims:
            if self._allowance < 1.0:
                break
            self._preempt(generation, leaving, "batch" if generation.is_preemptible else "tenant")
            preempted += len(leaving)
        return preempted

    def _victims(self, job: NextJob, *, is_parked: bool = False) -> list[Victim] | None:
        """Return what makes room or leaves a slot for a job; None if it has no right."""
        if not self._allows(job):
            return None
        if job.lacks_slot:
            return self._holders_of_a_slot(job)
        counted = min(job.sequences, self._most_sequences)
        sequences = counted - self._free_sequences()
        tokens = job.tokens - self._free_tokens()
        givers, chosen = self._givers(job, counted, is_parked=is_parked), list[Victim]()
        while sequences > 0 or tokens > 0:
            if (victim := next(givers, None)) is None:
                return None
            chosen.append(victim)
            sequences, tokens = sequences - len(victim[1]), tokens - victim[2]
        return chosen

    def _holders_of_a_slot(self, job: NextJob) -> list[Victim] | None:
        """Return the jobs of one adapter that leave a slot, which repeat fewest tokens.

        Their tenants use MARGIN times as many slots, divided by weight, as the job's tenant would.
        """
        holders, uses = defaultdict[str, list[RunningJob]](list), self._uses()
        for each in self._jobs.by_id.values():
            if each.job.adapter is not None:
                holders[each.job.adapter.digest].append(each)

        def slots(tenant: str) -> set[str]:
            jobs = uses[tenant].jobs if tenant in uses else []
            return {each.job.adapter.digest for each in jobs if each.job.adapter is not None}

        limit = MARGIN * (len(slots(job.tenant)) + 1) / job.weight
        exceeds = {tenant: len(slots(tenant)) / use.weight > limit for tenant, use in uses.items()}
        for safe_tokens in SAFE_TOKENS:
            leaving = [
                [(each, each.seated, each.held_tokens) for each in jobs]
                for jobs in holders.values()
                if all(each.is_preemptible or exceeds[each.job.tenant] for each in jobs)
                and not any(one.is_safe(safe_tokens) for each in jobs for one in each.seated)
            ]
            if leaving:
                return min(leaving, key=lambda some: sum(_repeated_tokens(*e[:2]) for e in some))
        return None

    def _givers(self, job: NextJob, counted: int, *, is_parked: bool) -> Iterator[Victim]:
        """Return all that may leave the engine for a job, which counts for so many sequences."""
        for each in reversed(self._jobs.batch.values()):
            yield each, each.seated, each.held_tokens
        mine = self._use(job.tenant)
        own = mine.victims(self._most_sequences)
        mine.weight = max(mine.weight, job.weight)
        mine.take(-counted, -job.tokens)
        limit = MARGIN * self._level(mine)
        uses = {name: self._use(name) for name in self._above(limit) if name != job.tenant}
        sources = {each.tenant: each.victims(self._most_sequences, 0) for each in uses.values()}
        while uses:
            use = max(uses.values(), key=self._level)
            if self._level(use) <= limit:
                break
            if (victim := next(sources[use.tenant], None)) is None:
                del uses[use.tenant]
            else:
                use.take(len(victim[1]), victim[2])
                yield victim
        if self._is_small(job) and not is_parked:
            yield from own

    def seat(self, next_jobs: Sequence[NextJob]) -> list[RunningJob]:
        """Give parked sequences the free room, and return their jobs, to be submitted.

        Tenants that use least go first, also those whose `next_jobs` wait in the queue. Batch jobs
        have what they may use when no request has parked sequences.
        """
        jobs = self._jobs.parked
        waiting = [each for each in next_jobs if not each.lacks_slot and self._allows(each)]
        telemetry.PARKED_SEQUENCES.set(sum(len(each.parked) for each in jobs))
        lines = [each for each in jobs if each.is_parkable and self._may_return(each, waiting)]
        parked = [each for each in lines if not each.is_preemptible]
        if not lines:
            return []
        if parked:
            self._return_batch(1 - self._free_sequences(), 0)
        uses, free = self._uses(is_batch=not parked), self._free_sequences()
        seated = dict[str, RunningJob]()
        if not parked:
            parked, free = lines, self.room().sequences
        elif free <= 0:
            wanting = min((uses[each.job.tenant] for each in parked), key=self._level)
            one = NextJob(wanting.tenant, wanting.weight, ENGINE_HEADROOM_TOKENS, 1)
            if not self.make_room_for(one, is_parked=True):
                return []
            parked = [each for each in parked if each.job.tenant == one.tenant]
            waiting, uses, free = [one], self._uses(), self._free_sequences()
        others = [uses.get(each.tenant) or self._use(each.tenant) for each in waiting]
        limit = min(map(self._level, others), default=float("inf"))
        tokens = self._free_tokens()
        while free > 0 and tokens > 0 and parked:
            generation = min(parked, key=lambda each: self._level(uses[each.job.tenant]))
            use = uses[generation.job.tenant]
            if self._level(use) > limit:
                break
            generation.unpark()
            self._jobs.note_change()
            use.sequences += 1
            free, tokens = free - 1, tokens - generation.seated[-1].held_tokens
            seated[generation.job.id] = generation
            parked = [each for each in parked if each.parked and self._may_return(each, waiting)]
        return list(seated.values())

    def _return_batch(self, sequences: int, tokens: int) -> None:
        for generation in self._batch_candidates():
            if sequences <= 0 and tokens <= 0:
                return
            sequences -= generation.seats
            tokens -= generation.held_tokens
            self._preempt(generation, generation.seated, "batch")

    def _preempt(self, generation: RunningJob, leaving: list[EngineSequence], source: str) -> None:
        number, tokens = len(leaving), sum(each.tokens for each in leaving)
        self._allowance -= number
        noted = JobPreempted(generation.job.handle, generation.attempt, number, tokens)
        generation.outbox.preempted.append(noted)
        telemetry.PREEMPTED_SEQUENCES.labels(source).inc(number)
        telemetry.PREEMPTED_TOKENS.labels(source).inc(tokens)
        # The engine reports what is free with its next step. Until then, nobody shall give up more.
        if generation.first_token_at is not None:
            freed = _repeated_tokens(generation, leaving) / self._info.kv_cache_tokens
            self._jobs.kv_usage = max(self._jobs.kv_usage - freed, 0.0)
        if number < generation.seats:
            self._jobs.park(generation, leaving)
        else:
            self._jobs.return_job(generation, ReturnReason.PREEMPTED)

    def _uses(self, *, is_batch: bool = False) -> dict[str, Use]:
        """Return what each tenant's requests, or batch jobs, use of this engine and of others."""
        own = self._jobs.uses.batch if is_batch else self._jobs.uses.requests
        return {name: self._use(name, own) for name in own}

    def _use(self, tenant: str, own: Mapping[str, Use] | None = None) -> Use:
        """Return a copy of what a tenant's requests use of this engine and of others."""
        use = (self._jobs.uses.requests if own is None else own).get(tenant) or Use(tenant)
        return use.plus(*self._elsewhere.get(tenant, (0, 0)))

    def _above(self, level: float) -> list[str]:
        """Return the tenants with requests here that use more."""
        uses = self._jobs.uses
        if self._levels[0] is not uses:
            self._levels = uses, {each: self._level(self._use(each)) for each in uses.requests}
        return [tenant for tenant, own in self._levels[1].items() if own > level]

    def _limited_use(self, tenant: str) -> list[int]:
        """Return the sequences and tokens of a tenant's requests, and those of its batch jobs."""
        uses = self._jobs.uses
        both = uses.requests.get(tenant, Use(tenant)), uses.batch.get(tenant, Use(tenant))
        return [number for each in both for number in (each.sequences, each.tokens)]

    def _exceeds(self, use: Use, share: int, sequences: int = 0, tokens: int = 0) -> bool:
        """Return whether a tenant would exceed its model share with more sequences and tokens.

        One job or sequence may always run. A share of the whole model is no limit.
        """
        most = max(self._info.max_sequences * share // WHOLE_MODEL, 1)
        most_tokens = self._info.kv_cache_tokens * share // WHOLE_MODEL
        has_more = use.sequences + min(sequences, most) > most
        is_limited = share < WHOLE_MODEL and use.sequences > 0
        return is_limited and (has_more or use.tokens + tokens > most_tokens)

    def _allows(self, job: NextJob) -> bool:
        """Return whether `job_claim` would claim a job, by the model share of its tenant."""
        use = self._jobs.uses.of(job.tenant)
        return not self._exceeds(use, job.model_share, job.sequences, job.tokens)

    def _may_return(self, generation: RunningJob, waiting: Sequence[NextJob]) -> bool:
        """Return whether the next parked sequence would keep its tenant within its model share.

        That includes room for its next tokens, so that it does not have to leave again at once. If
        a small job of the tenant waits, the job may use no more than claims count.
        """
        sequence, tenant = generation.parked[0], generation.job.tenant
        is_large = generation.seats >= self._most_sequences
        if is_large and any(each.tenant == tenant and self._is_small(each) for each in waiting):
            return False
        tokens = sequence.tokens + sequence.headroom
        return self._allows(NextJob(tenant, 1.0, tokens, 1, generation.job.model_share))

    def _level(self, use: Use) -> float:
        sequences = use.sequences / self._max_sequences
        return max(sequences, use.tokens / self._kv_cache_tokens) / (use.weight or 1.0)

    def _renewed_allowance(self) -> float:
        now = time.monotonic()
        renewed = self._allowance + (now - self._renewed_at) * self._rate
        self._allowance = min(renewed, self._most_allowance)
        self._renewed_at = now
        return self._allowance

    def _batch_candidates(self) -> list[RunningJob]:
        """Return the batch jobs that may be preempted now, youngest first."""
        candidates, allowance = [], self._renewed_allowance()
        for generation in reversed(self._jobs.batch.values()):
            if allowance < 1.0:
                break
            allowance -= generation.seats
            candidates.append(generation)
        return candidates

    @property
    def _batch_prompt_tokens(self) -> int:
        if len(self._jobs.batch) == len(self._jobs.by_id):
            return BATCH_PROMPT_TOKENS
        beside = BATCH_PROMPT_TOKENS_BESIDE_REQUESTS * self._info.max_sequences
        return min(beside, BATCH_PROMPT_TOKENS)

    @property
    def _most_sequences(self) -> int:
        """What a job is counted for at most: a quarter of the engine, or an equal share of it.

        A group that was counted for more would have no right to room where tenants have less.
        """
        tenants = self._jobs.uses.requests.keys() | self.waiting
        return max(1, self._info.max_sequences // max(4, len(tenants)))

    def _is_small(self, job: NextJob) -> bool:
        """Return whether larger jobs of its tenant make room for a job: large ones take turns."""
        return job.sequences <= max(1, self._info.max_sequences // 16)

    def _free_sequences(self) -> int:
        return self._info.max_sequences - self._jobs.uses.sequences

    def _free_tokens(self) -> int:
        jobs, tokens = self._jobs, self._info.kv_cache_tokens
        # The engine's last report is stale once the engine has nothing left to step.
        used = jobs.kv_usage * tokens if jobs.by_id else 0.0
        return int(tokens - used - jobs.uses.reserved_tokens)


def _repeated_tokens(generation: RunningJob, leaving: list[EngineSequence]) -> int:
    """Return the tokens that are processed again if a job gives up sequences."""
    prompt_tokens = generation.prompt_tokens if len(leaving) == generation.seats else 0
    return prompt_tokens + sum(each.tokens for each in leaving)
