"""A gateway process without its HTTP server; any of them can read any response."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import msgspec
from redis.asyncio import Redis

from common import clock
from common.not_none import not_none
from contract import keys
from contract.messages import Delta, GenerationJob, JobFailed, JobFinished, Ranking
from contract.prompts import names_of, packed
from contract.queue import LONG_PROMPT_TOKENS, JobClaim
from contract.sampling import SamplingSpec
from contract.scripts import CommandExecutor
from gateway.completions.admission.chunks import PromptChunks
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.generation import Generation, Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.sealing import Sealer
from gateway.completions.settlement import Settlement, SettlementService, Slices
from gateway.completions.stored.head import ResponseHead
from gateway.completions.stored.kept import KeptResponses
from gateway.completions.stored.prompt_log import PromptLogs
from gateway.completions.stored.reader import ResponseReader
from gateway.completions.stored.service import Responses
from gateway.completions.stored.store import StoredResponse, packed_head
from gateway.dialects.completions import CompletionRequest, to_generation_request
from gateway.dialects.profile import PROFILES, Dialect
from gateway.dialects.wire import validate
from gateway.limits.replies import Kept, RequestState, ReservationRequest
from gateway.limits.reservations import Reservations
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.limits.stored_bytes import Storage
from gateway.models.catalogue import Catalogue
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.redis_client import MeasuredConnection
from gateway.platform.settings import Settings
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from gateway.records.usage_record import Counts, Outcome, UsageRecord, decode_usage
from tests.gateway.conftest import eventually
from tests.gateway.limits.fake_ledger import FakeLedger
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS

MODEL = "m"
TENANT = "acme"
PROMPT = [1, 2, 3]
COMPLETION_PRICE = 1_000_000
JOURNAL_SECONDS = 0.05

_numbers = itertools.count(1)


@dataclass
class Submitted:
    """A request in flight at the gateway that began it."""

    id: str
    completion: Completion
    generation: Generation
    settlement: Settlement


class House:
    """One gateway process."""

    def __init__(
        self,
        redis: "Redis",
        name: str,
        *,
        journal_seconds: float,
        through: Callable[[CommandExecutor], CommandExecutor] = lambda executor: executor,
    ) -> None:
        self.executor = executor = through(MeasuredConnection(redis))
        self.redis = redis
        self.name = name
        self.catalogue = Catalogue(executor)
        self.dispatcher = Dispatcher(
            gateway=name,
            client=redis,
            catalogue=self.catalogue,
            max_waiting_jobs=1000,
            max_waiting_jobs_of_tenant=1000,
            queue_timeout_seconds=60.0,
            resume_after_seconds=0.0,
        )
        quotas = QuotaStore(executor)
        self.reservations = Reservations(quotas, Seeder(quotas, FakeLedger()), name)
        storage = Storage(executor, most_of_tenant=10**9)
        self.settlements = SettlementService(
            self.reservations, self.dispatcher, self.catalogue, storage
        )
        self.chunks = PromptChunks(Settings(), self.catalogue, self.dispatcher, storage)
        self.responses = Responses(
            executor,
            self.dispatcher,
            self.settlements,
            quotas,
            LoopTurns(),
            LargeWork(most_waiting_bytes=10**9),
            Sealer(["secret"]),
            Settings(journal_interval=timedelta(seconds=journal_seconds)),
            Mock(spec=KeptResponses),
            Mock(spec=PromptLogs),
        )
        self.has_handed_over = asyncio.Event()
        """Set while it stops, when other gateways may take its responses over."""
        self._tasks: list[asyncio.Task[None]] = []
        self._readers: WeakSet[ResponseReader] = WeakSet()

    async def open(self) -> None:
        """Start the loops as the process does."""
        await self.dispatcher.beat()
        await self.catalogue.refresh()
        loops = (
            self.dispatcher.run(),
            self.reservations.run(),
            self.settlements.run(),
            self.responses.run(),
        )
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def kill(self) -> None:
        """Stop at once, as if the process had died some seconds ago."""
        tasks = [*self._tasks, *(task for reader in self._readers for task in reader._tasks)]
        tasks += self.responses._takeovers._running.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.settlements.tasks.cancel()
        self._tasks = []
        await self.redis.delete(keys.gateway_alive(self.name))

    async def leave(self) -> None:
        """Stop as on SIGTERM."""
        await self.responses.aclose()
        self.has_handed_over.set()
        await self.settlements.aclose()
        await self.dispatcher.aclose()
        await self.kill()

    async def close(self) -> None:
        """End the loops, which must still run."""
        assert not any(task.done() for task in self._tasks)
        await self.kill()

    async def submit(
        self,
        *,
        request_id: str = "",
        prompts: int = 1,
        n: int = 1,
        best_of: int = 1,
        is_background: bool = False,
        is_kept: bool = True,
        limits: Limits | None = None,
        max_tokens: int = 16,
        image_tokens: int = 0,
        line: str = "",
        is_sliced: bool = False,
        prompt: Sequence[int] = PROMPT,
        deadline_seconds: float = 60.0,
        **parameters: Any,
    ) -> Submitted:
        """Admit a request as the API does, and put its jobs on the queue."""
        request_id = request_id or f"cmpl-{self.name}{next(_numbers)}"
        body = {"model": MODEL, "prompt": ["x"] * prompts, "n": n, "stream": True} | parameters
        request = to_generation_request(
            validate(CompletionRequest, body), PROFILES[Dialect.VLLM], max_prompts=10
        )
        subjects = (SubjectLimits(LimitScope.TENANT, TENANT, limits or Limits()),)
        draft = UsageRecord(
            request_id=request_id,
            tenant_id=TENANT,
            project_id=None,
            credential_id="key",
            model=MODEL,
            endpoint="completions",
            dialect=Dialect.VLLM,
            gateway=self.name,
            is_streamed=request.stream,
            line=line,
            jobs=prompts,
            prompt_price=COMPLETION_PRICE,
            cached_price=COMPLETION_PRICE,
            completion_price=COMPLETION_PRICE,
        )
        most = Counts(
            prompt_tokens=prompts * len(PROMPT) + image_tokens,
            completion_tokens=prompts * best_of * max_tokens,
        )
        slices = Slices(subjects, most, sequences=prompts * n)
        reserved = slices.first if is_sliced else most
        kept = Kept(self.name, 1, is_background, 60_000) if is_kept else None
        admission = await self.reservations.reserve(
            ReservationRequest.of(
                draft,
                subjects,
                most._replace(completion_tokens=reserved.completion_tokens),
                kept=kept,
            ),
            is_openai=False,
        )
        generation = Generation(max_unread_bytes=1 << 20)
        settlement = self.settlements.open(draft, admission, generation, kept=kept)
        if is_sliced:
            self.settlements.reserve_in_slices(settlement, slices)
        jobs = [
            GenerationJob(
                id=f"{request_id}-{index}",
                handle=self.dispatcher.next_handle(),
                gateway=self.name,
                tenant=TENANT,
                cache_salt="salt",
                prompt_token_ids=packed(prompt),
                max_tokens=max_tokens,
                sampling=SamplingSpec(seed=1, temperature=1.0),
                deadline_ms=clock.now_ms() + int(deadline_seconds * 1000),
                n=n,
                best_of=max(n, best_of),
                ranking=Ranking.MEAN,
                stream=True,
                is_background=is_background,
            )
            for index in range(prompts)
        ]
        card = not_none(self.catalogue.known(MODEL)).card
        is_long = len(prompt) > LONG_PROMPT_TOKENS
        names = [names_of("salt", packed(prompt)) if is_long else b""] * prompts
        jobs = await self.chunks.put(jobs, names, card, subjects)
        completion = Completion(
            id=request_id,
            model=MODEL,
            created=clock.now_seconds(),
            fingerprint="fp_1",
            request=request,
            prompt_token_ids=[packed(prompt)] * prompts,
            prompt_texts=[""] * prompts,
        )
        if is_kept:
            head = ResponseHead.of(
                completion,
                request_id=request_id,
                jobs=jobs,
                record=settlement.record,
                subjects=subjects,
                most=most,
                is_sliced=is_sliced,
                weight=1.0,
                is_background=is_background,
                retention_ms=60_000,
            )
            self.responses.open(head, await packed_head(head), settlement)
        await self.dispatcher.enqueue(MODEL, jobs, weight=1.0, generation=generation)
        return Submitted(request_id, completion, generation, settlement)

    async def find(self, request_id: str) -> StoredResponse:
        """Look up a response that must exist."""
        answer = await self.responses.find(request_id, tenant_id=TENANT)
        assert answer is not None
        return answer

    async def attach(self, request_id: str) -> ResponseReader:
        """Begin to read a response."""
        reader = await self.responses.attach(await self.find(request_id))
        self._readers.add(reader)
        return reader


class Reader:
    """Reads the replies of a generation one by one."""

    def __init__(self, generation: Generation) -> None:
        self.replies: list[Reply] = []
        self._generation = generation

    @property
    def text(self) -> str:
        """Text of the first choice of the first prompt."""
        return self.text_of(0)

    def text_of(self, prompt_index: int, choice: int = 0) -> str:
        """Text of a choice."""
        deltas = [m for i, m in self.replies if i == prompt_index and isinstance(m, Delta)]
        return "".join(delta.text for delta in deltas if delta.choice == choice)

    @property
    def failure(self) -> JobFailed | None:
        """The failure that ended the response."""
        failures = [message for _, message in self.replies if isinstance(message, JobFailed)]
        return failures[0] if failures else None

    async def until(self, condition: Callable[["Reader"], Any]) -> "Reader":
        """Read until a condition holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(self):
                self.replies += await self._generation.replies()
        return self

    async def until_text(self, text: str) -> "Reader":
        """Read until the first choice has this text, and no other."""
        await self.until(lambda reader: len(reader.text) >= len(text))
        assert self.text == text
        return self

    async def to_the_end(self, jobs: int = 1) -> "Reader":
        """Read until all jobs have finished, or one has failed."""
        return await self.until(
            lambda reader: (
                reader.failure is not None
                or sum(isinstance(message, JobFinished) for _, message in reader.replies) == jobs
            )
        )


async def begun(
    house: House, worker: FakeWorker, *texts: str, **parameters: Any
) -> tuple[Submitted, JobClaim]:
    """Start a response whose first client has received these texts, by default `a`."""
    texts = texts or ("a",)
    request = await house.submit(**parameters)
    claim = await worker.claim_one()
    await worker.say(claim, *texts)
    await Reader(request.generation).until_text("".join(texts))
    return request, claim


async def usage_records(redis: "Redis") -> dict[str, UsageRecord]:
    """Return the usage records of the tenant by request id, which must be unique but for lost
    requests.
    """
    entries: Any = await redis.xrange(keys.usage(keys.bucket_of(TENANT)))
    records = [decode_usage(fields[b"u"]) for _, fields in entries]
    by_id = {record.request_id: record for record in records}
    others = [each for each in records if each is not by_id[each.request_id]]
    assert all(each.outcome is Outcome.LOST for each in others), records
    return by_id


async def settled_records(redis: "Redis", number: int) -> dict[str, UsageRecord]:
    """Wait until a number of requests are settled; return all records by request id."""

    async def are_settled() -> bool:
        return len(await usage_records(redis)) >= number

    await eventually(are_settled, what="the settlement")
    return await usage_records(redis)


async def settled(redis: "Redis", *request_ids: str) -> list[tuple[str, int, int]]:
    """Wait until these requests and no others have records; return outcomes and counts."""
    records = await settled_records(redis, len(request_ids))
    assert list(records) == list(request_ids), records
    assert not await redis.exists(*(keys.open_requests(b) for b in range(keys.BUCKETS)))
    return [counts_of(records[request_id]) for request_id in request_ids]


async def state_is(house: House, request_id: str, state: RequestState) -> None:
    """Wait until a response has a state."""

    async def is_so() -> bool:
        return (await house.find(request_id)).state is state

    await eventually(is_so, what=f"the response being {state}")


def counts_of(record: UsageRecord) -> tuple[str, int, int]:
    """Return how a request ended, and its prompt and completion tokens."""
    return record.outcome.value, record.prompt_tokens, record.completion_tokens


def plain(replies: list[Reply]) -> list[Reply]:
    """Return replies without what differs between owners."""
    return [
        Reply(index, msgspec.structs.replace(message, handle=0, attempt=0))
        for index, message in replies
    ]
