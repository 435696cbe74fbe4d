"""A scripted worker for tests: real queue, leases and frames, but no engine."""

import asyncio
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from common.clock import now_seconds
from contract import keys, messages
from contract.messages import (
    CallPiece,
    ChatFormat,
    Delta,
    Frame,
    JobFailed,
    JobFinished,
    JobPreempted,
    JobReturned,
    ReturnReason,
    TokenLogprob,
    WorkerCard,
    WorkerState,
    encode_logprobs,
)
from contract.outcomes import FailureCode, FinishReason
from contract.queue import JobClaim, JobQueue, LeaseReport, Room
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import CHECKPOINT

ROOM = Room(tokens=10**9, sequences=10**6, most_sequences=10**6, empty=False)
ENGINE = "fake 1.2"
CONTEXT_WINDOW = 2048
VOCABULARY_SIZE = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('I do not like it.') }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% if thinks %}<think>{% endif %}{% endif %}"
)


def chat_format(template: str = CHAT_TEMPLATE, **fields: Any) -> ChatFormat:
    """Describe a chat format with this template."""
    digest = hashlib.sha256(_published(template)).hexdigest()
    return ChatFormat(digest, **fields)


def _published(template: str) -> bytes:
    return json.dumps({"default": template}).encode()


class FakeWorker:
    """One worker of one model."""

    def __init__(
        self, redis: "Redis", model: str, *, name: str = "fake-1", lease_ms: int = 60_000
    ) -> None:
        self.name = name
        self.queue = JobQueue(redis, model)
        self._redis = redis
        self._lease_ms = lease_ms
        self._numbers: dict[str, int] = {}
        self._sent: dict[tuple[str, int, int], dict[int, int]] = {}
        self._tokenizer = (CHECKPOINT / "tokenizer.json").read_bytes()

    def card(self, state: WorkerState = WorkerState.READY, **fields: Any) -> WorkerCard:
        """The card that the worker publishes."""
        known: dict[str, Any] = {
            "engine": ENGINE,
            "created": 1,
            "context_window": CONTEXT_WINDOW,
            "vocabulary_size": VOCABULARY_SIZE,
            "bos_token_id": 0,
            "tokenizer_digest": hashlib.sha256(self._tokenizer).hexdigest(),
        }
        return WorkerCard(self.name, self.queue.model, state, **(known | fields))

    async def announce(
        self,
        state: WorkerState = WorkerState.READY,
        *,
        ttl_ms: int = 600_000,
        template: str | None = CHAT_TEMPLATE,
        **fields: Any,
    ) -> None:
        """Publish card and tokenizer as a worker does, and a template if the card has chats."""
        card = self.card(state, **fields)
        await self._redis.set(
            keys.tokenizer(card.tokenizer_digest), zlib.compress(self._tokenizer), ex=600
        )
        if card.chat is not None and template is not None:
            await self._redis.set(
                keys.chat_template(card.chat.template_digest),
                zlib.compress(_published(template)),
                ex=600,
            )
        await self._redis.hset(keys.MODELS, card.model, messages.encode(card))
        await self.queue.announce(card, ttl_ms=ttl_ms)

    async def claim(self, number: int = 1) -> list[JobClaim]:
        """Wait until `count` jobs have been claimed."""
        claims: list[JobClaim] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(claims) < number:
                result = await self.queue.claim(
                    self.name,
                    ROOM,
                    most_jobs=number - len(claims),
                    lease_ms=self._lease_ms,
                    engine=ENGINE,
                )
                claims += result.claims
                if not result.claims:
                    await asyncio.sleep(0.01)
        return claims

    async def claim_one(self) -> JobClaim:
        """Wait for one job."""
        (claim,) = await self.claim()
        return claim

    async def send(self, gateway: str, *, number: int | None = None, **lists: Any) -> None:
        """Send a frame, with the next number unless another one is given."""
        if number is None:
            number = self._numbers.get(gateway, 0) + 1
            self._numbers[gateway] = number
        frame = messages.encode(Frame(self.name, number, **lists))
        await self._redis.xadd(keys.replies(gateway), {"f": frame})

    async def skip_frame(self, gateway: str) -> None:
        """Drop the next frame."""
        self._numbers[gateway] = self._numbers.get(gateway, 0) + 1

    async def say(self, claim: JobClaim, *texts: str, finish: FinishReason | None = None) -> None:
        """Send one frame for each text of one token; the last one has the finish reason."""
        for text in texts:
            reason = finish if text is texts[-1] else None
            delta = self.next_delta(claim, text, finish_reason=reason)
            await self.send(claim.job.gateway, deltas=[delta])

    def next_delta(
        self, claim: JobClaim, text: str, *, choice: int = 0, tokens: int = 1, **fields: Any
    ) -> Delta:
        """Make the delta that continues a choice; its token ids count up from 100."""
        reported = self._sent_by(claim)
        start = reported.get(choice, 0)
        reported[choice] = start + tokens
        ids = [100 + number for number in range(start, start + tokens)]
        return delta(claim, text, choice=choice, start=start, token_ids=ids, **fields)

    def sent_tokens(self, claim: JobClaim) -> int:
        """Return the number of tokens that all attempts of a job have sent."""
        return sum(self._sent_by(claim).values())

    async def finish(
        self, claim: JobClaim, *, tokens: int | None = None, cached: int = 0, **fields: Any
    ) -> None:
        """End the job: last frame, then lease. `tokens` defaults to what was sent."""
        job, prompt_tokens = claim.job, len(claim.job.prompt_token_ids)
        counted = self.sent_tokens(claim) if tokens is None else tokens
        counts = (prompt_tokens, counted, cached)
        fields = {"engine": ENGINE, "ended_at": now_seconds(), **fields}
        finished = JobFinished(job.handle, claim.attempt, *counts, **fields)
        await self.send(job.gateway, finished=[finished])
        await self.drop(claim, tokens=counted, cached=cached)

    async def conclude(self, claim: JobClaim, *texts: str) -> None:
        """Send the last texts of a job with one choice, and end it."""
        await self.say(claim, *texts, finish=FinishReason.STOP)
        await self.finish(claim)

    async def give_back(
        self,
        claim: JobClaim,
        reason: ReturnReason,
        *,
        has_progressed: bool = False,
    ) -> None:
        """Return a job to the queue, and end its lease."""
        handle, attempt = claim.job.handle, claim.attempt
        returned = JobReturned(handle, attempt, reason, has_progressed)
        await self.send(claim.job.gateway, returned=[returned])
        await self.lose(claim, tokens=self.sent_tokens(claim))

    async def preempt(self, claim: JobClaim, sequences: int, tokens: int) -> None:
        """Report that sequences of a job left the engine, with so many tokens."""
        job = claim.job
        preempted = JobPreempted(job.handle, claim.attempt, sequences, tokens)
        await self.send(job.gateway, preempted=[preempted])

    def _sent_by(self, claim: JobClaim) -> dict[int, int]:
        job = claim.job
        sequences = job.resumption.sequences if job.resumption else []
        before = {choice: len(each.token_ids) for choice, each in enumerate(sequences)}
        if job.is_replicated and before:
            before = dict.fromkeys(range(job.n), before[0])
        return self._sent.setdefault((job.gateway, job.handle, claim.attempt), before)

    async def drop(self, claim: JobClaim, *, tokens: int = 0, cached: int = 0) -> None:
        """End the job's lease without a frame, as a worker does with a cancelled job."""
        job = claim.job
        report = LeaseReport(job.id, claim.attempt, tokens, len(job.prompt_token_ids), cached)
        await self.queue.finish(self.name, report)

    async def fail(self, claim: JobClaim, code: FailureCode, message: str = "") -> None:
        """Report the job as failed."""
        failed = JobFailed(claim.job.handle, claim.attempt, code, message)
        await self.send(claim.job.gateway, failed=[failed])
        await self.queue.finish(self.name, LeaseReport(claim.job.id, claim.attempt, 0))

    async def lose(self, claim: JobClaim, *, tokens: int = 0) -> None:
        """Expire the lease, as if the worker had died some seconds ago, after a last report."""
        prompt_tokens = len(claim.job.prompt_token_ids) if tokens else 0
        report = LeaseReport(claim.job.id, claim.attempt, tokens, prompt_tokens)
        await self.queue.extend(self.name, [report], lease_ms=0)
        await asyncio.sleep(0.005)


def delta(
    claim: JobClaim,
    text: str,
    *,
    choice: int = 0,
    start: int = 0,
    token_ids: Sequence[int] = (),
    finish_reason: FinishReason | None = None,
    logprobs: Sequence[TokenLogprob] | None = None,
    cumulative_logprob: float = 0.0,
    reasoning: str = "",
    calls: Sequence[CallPiece] = (),
    reasoning_tokens: int = 0,
) -> Delta:
    """Make a delta of a claimed job."""
    return Delta(
        claim.job.handle,
        claim.attempt,
        choice,
        start,
        text,
        list(token_ids),
        finish_reason,
        None,
        encode_logprobs(logprobs or []),
        cumulative_logprob,
        reasoning,
        list(calls),
        reasoning_tokens,
    )
