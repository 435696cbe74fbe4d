"""What tenants use of an engine: its sequences and KV cache, and what each of them can give up."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from contract.messages import WHOLE_MODEL
from worker.execution.running_job import RunningJob
from worker.execution.sequence import SAFE_TOKENS, Sequence

Victim = tuple[RunningJob, list[Sequence], int]
"""A job, its sequences that leave the engine, and the KV-cache tokens that they leave."""


@dataclass(slots=True)
class Use:
    """What jobs of a tenant use of engines, and what they can give up of this one."""

    tenant: str
    weight: float = 0.0
    sequences: int = 0
    tokens: int = 0
    jobs: list[RunningJob] = field(default_factory=list)
    """Oldest first."""

    def add(self, generation: RunningJob) -> None:
        """Count a job."""
        self.weight = max(self.weight, generation.weight)
        self.sequences += generation.seats
        self.tokens += generation.held_tokens
        self.jobs.append(generation)

    def take(self, sequences: int, tokens: int) -> None:
        """Count no longer what is given up."""
        self.sequences, self.tokens = self.sequences - sequences, self.tokens - tokens

    def plus(self, sequences: int, tokens: int) -> "Use":
        """Return a copy that counts what the tenant uses elsewhere, too."""
        own = self.sequences + sequences, self.tokens + tokens
        return Use(self.tenant, self.weight, *own, self.jobs)

    def before(self, other: "Use") -> "Use":
        """Return both uses together; jobs of the other one are the younger ones."""
        weight = max(self.weight, other.weight)
        both = self.sequences + other.sequences, self.tokens + other.tokens
        return Use(self.tenant, weight, *both, self.jobs + other.jobs)

    def victims(self, *keeping: int) -> Iterator[Victim]:
        """Return what to give up, of the youngest job first, with the KV-cache tokens.

        That is one sequence, or all that are left of a job, with which the job ends here. Each job
        keeps the first number of sequences, then the next. Sequences that were preempted not long
        ago are the last ones.
        """
        left = {each: each.seated for each in reversed(self.jobs)}
        for safe_tokens, kept in product(SAFE_TOKENS, keeping):
            for generation, seated in left.items():
                if len(seated) <= kept:
                    continue
                leaving = [each for each in seated if each.may_be_preempted(safe_tokens)]
                while leaving and len(seated) > max(kept, 1) and generation.is_parkable:
                    seated.remove(leaving[-1])
                    yield generation, leaving[-1:], leaving.pop().held_tokens
                if len(leaving) == len(seated) and not kept:
                    tokens = sum(each.held_tokens for each in seated)
                    left[generation] = []
                    yield generation, seated, generation.prompt_tokens + tokens


class Uses:
    """The uses of all tenants, as they are when this is created. Callers change copies of them."""

    def __init__(self, jobs: Iterable[RunningJob]) -> None:
        self.requests: dict[str, Use] = {}
        self.batch: dict[str, Use] = {}
        """Uses of batch jobs."""
        self.reserved_tokens = 0
        """KV-cache tokens that are reserved for jobs and not used yet."""
        self.limited: set[str] = set()
        """Tenants with model shares."""
        for each in jobs:
            uses, tenant = self.batch if each.is_preemptible else self.requests, each.job.tenant
            if tenant not in uses:
                uses[tenant] = Use(tenant)
            uses[tenant].add(each)
            self.reserved_tokens += each.reserved_tokens
            if each.job.model_share < WHOLE_MODEL:
                self.limited.add(tenant)
        self.request_sequences = sum(each.sequences for each in self.requests.values())
        self.sequences = self.request_sequences + sum(e.sequences for e in self.batch.values())
        """Sequences that are in the engine, or will soon be."""

    def of(self, tenant: str, *, has_batch: bool = False) -> Use:
        """Return what requests of a tenant use, and its batch jobs, too, or not."""
        batch = self.batch.get(tenant) if has_batch else None
        return (self.requests.get(tenant) or Use(tenant)).before(batch or Use(tenant))
