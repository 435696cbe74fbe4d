"""Submit a checked request: reserve its usage and enqueue its jobs."""

import asyncio
import base64
import hashlib
import hmac
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Final

import msgspec
from typing_extensions import override

from common import clock, logs
from common.tasks import wait_for_end
from common.tracing import RESERVE, traceparent_of
from contract.adapters import LOAD_TOKENS, cache_salt_of
from contract.affinity import (
    prefix_affinity,
    prefix_ends,
    resource_affinity,
    session_affinity,
)
from contract.dialect import Dialect
from contract.messages import AdapterRef, GenerationJob, Ranking, encode_job
from contract.prompts import chunk_ends, digests_at, names_of
from contract.queue import JOBS_AT_ONCE, LONG_PROMPT_TOKENS
from gateway.completions.admission.call import Call
from gateway.completions.admission.check import CheckedRequest, with_images
from gateway.completions.admission.chunks import PromptChunks
from gateway.completions.admission.diagnostics import CacheDiagnostics
from gateway.completions.admission.idempotency import IdempotentRequest
from gateway.completions.admission.model_choice import end_user_of
from gateway.completions.admission.repeats import Repeats
from gateway.completions.admission.speech import with_audio
from gateway.completions.prompt.audio.decoder import AudioDecoder
from gateway.completions.prompt.images.fetcher import ImageFetcher
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.generation import Generation
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.sealing import Seal, Sealer
from gateway.completions.settlement import Settlement, SettlementService, Slices
from gateway.completions.stored.head import ResponseHead, cost_by
from gateway.completions.stored.service import Responses
from gateway.completions.stored.store import (
    DEADLINE_GRACE_MS,
    StoredResponse,
    bytes_of_head,
    packed_head,
)
from gateway.dialects.native import native_settings
from gateway.dialects.profile import ContextLengthBehavior
from gateway.dialects.request import ResponseForm
from gateway.limits.refusal_log import PeriodCounts, Refusals
from gateway.limits.replies import Kept, RequestEnd, ReservationRequest
from gateway.limits.reservations import Admission, Reservations
from gateway.limits.stored_bytes import Holder, Storage, Use, allocated, names_of_counted
from gateway.models.price_book import PriceBook
from gateway.platform import telemetry, tracing
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.settings import Settings
from gateway.records.adapters import SEPARATOR
from gateway.records.errors import (
    ApiError,
    ErrorStyle,
    InsufficientQuotaError,
    OverloadedError,
    RateLimitError,
    TenantQueueFullError,
)
from gateway.records.limits import SubjectLimits, Subjects, model_share_of
from gateway.records.principal import Principal
from gateway.records.records import Price
from gateway.records.spending import QUARTER_SECONDS, applied
from gateway.records.times import utc_now
from gateway.records.usage_record import Counts, UsageRecord

DISCARD_SECONDS: Final = 0.25
"""How long a refused request waits until its response is deleted."""
_JOB_BYTES: Final = 1_024
"""What Redis stores of a job beside its content."""
_TOKEN_BYTES: Final = 5
"""Bytes of an encoded token id."""


class Submission(msgspec.Struct, frozen=True):
    """An admitted request."""

    checked: CheckedRequest
    completion: Completion
    generation: Generation
    settlement: Settlement
    response: StoredResponse | None
    """The stored response that clients can read again; None if it is not stored."""


@dataclass(eq=False)
class RequestSubmitter:
    """Reserves the usage of checked requests, and enqueues their jobs."""

    _settings: Settings
    _loop_turns: LoopTurns
    _images: ImageFetcher
    _audio: AudioDecoder
    _prices: PriceBook
    _reservations: Reservations
    _refusals: Refusals
    _counts: PeriodCounts
    _repeats: Repeats
    _storage: Storage
    _chunks: PromptChunks
    _diagnostics: CacheDiagnostics
    _settlements: SettlementService
    _responses: Responses
    _dispatcher: Dispatcher
    _sealer: Sealer

    async def submit(
        self,
        call: Call,
        checked: CheckedRequest,
        *,
        request_id: str,
        shows_cost: bool,
        idempotent: IdempotentRequest | None = None,
    ) -> Submission:
        """Reserve the usage of a request, read its audio and images, and enqueue its jobs.

        Responses of streams, background and idempotent requests are stored, so that clients can
        read them again. Raises an ApiError after cleaning up.
        """
        if call.prompt_log is not None:
            request = msgspec.structs.replace(checked.request, prompt_log=call.prompt_log)
            checked = msgspec.structs.replace(checked, request=request)
        submit = partial(
            self._submit, call, checked, request_id, shows_cost=shows_cost, idempotent=idempotent
        )
        # Most requests have no such limit: a context manager costs them microseconds.
        if not any(each.repeats for each in call.principal.spend_limits):
            return await submit()
        draft = partial(self.draft, call, checked, request_id)
        async with self._repeats.counting(call, checked, draft):
            return await submit()

    async def _submit(
        self,
        call: Call,
        checked: CheckedRequest,
        request_id: str,
        *,
        shows_cost: bool,
        idempotent: IdempotentRequest | None,
    ) -> Submission:
        principal = call.principal
        if checked.request.form is ResponseForm.SPEECH:
            checked = await self._with_audio(call, checked, request_id)
        # A whole response is collected while it arrives, so its unread bytes need no limit.
        most_unread = self._settings.max_unread_bytes if checked.request.stream else sys.maxsize
        turn = partial(self._loop_turns.slice_of, principal.tenant_id)
        generation = Generation(max_unread_bytes=most_unread, turn=turn)
        subjects = _subjects(call, checked)
        record = self.draft(call, checked, request_id, subjects)
        is_idempotent = idempotent is not None
        retention = _retention(self._settings, call, checked, is_idempotent=is_idempotent)
        kept = self._kept(principal, checked, retention, idempotent) if retention else None
        response = None
        reserving = self._reserving(call, checked, record, subjects, generation, kept)
        async with reserving as settlement:
            # Fetch images only now: a request without permission to run must not fetch any or delay
            # others.
            checked = await with_images(checked, self._images, tenant_id=principal.tenant_id)
            whole, names = await self._jobs(call, checked, completion_id=request_id)
            names = names if call.is_kept else []
            jobs = await self._chunks.put(whole, names, checked.card, principal.limits)
            # A response that is readable for longer would outlive its chunks.
            stored = whole if retention > self._settings.answer_retention else jobs
            shown_id = request_id if call.line is None else call.line.request_id
            if checked.request.compared_id is not None:
                salt = self._salt(principal.tenant_id)
                checked = await self._diagnostics.diagnose(
                    call, checked, whole[0], salt=salt, shown_id=shown_id
                )
            cost_of = cost_by(record) if shows_cost else None
            seal = self._sealer.seal_of(request_id, checked.request, tenant_id=principal.tenant_id)
            completion = _completion(checked, shown_id, cost_of=cost_of, seal=seal)
            size = _job_bytes(jobs)
            if kept is not None:
                head = ResponseHead.of(
                    completion,
                    request_id=request_id,
                    jobs=stored,
                    record=settlement.record,
                    subjects=subjects,
                    most=checked.most,
                    is_sliced=checked.is_sliced,
                    weight=principal.tenant_weight,
                    is_background=checked.request.is_background,
                    retention_ms=kept.retention_ms,
                    stored_bytes=size,
                )
                try:
                    response = await self._open(head, settlement, principal, jobs)
                except RateLimitError:
                    # Other streams can run without being stored, but not resume.
                    if is_idempotent or head.is_background:
                        raise
            if response is None:
                await self._take_storage(settlement, principal, jobs, size, use=Use.RUNNING)
            try:
                await self._dispatcher.enqueue(
                    checked.card.model, jobs, weight=principal.tenant_weight, generation=generation
                )
            except (OverloadedError, TenantQueueFullError):
                raise
            except BaseException as error:
                # The queue may have accepted the jobs, and a worker may have started them.
                self._responses.of(settlement).fail(error)
                if isinstance(error, ApiError):
                    error.is_recorded = True
                raise
        return Submission(checked, completion, generation, settlement, response)

    def draft(
        self,
        call: Call,
        checked: CheckedRequest,
        request_id: str,
        subjects: tuple[SubjectLimits, ...] = (),
    ) -> UsageRecord:
        """Return the usage record of a request before it runs, including its price.

        `subjects` are the holders of limits that count it.

        Raises StoreUnavailableError while prices are unknown.
        """
        principal, model = call.principal, checked.card.model
        prices, tier, adapter = self._prices, checked.service_tier, checked.adapter
        request = checked.request
        price = prices.find_first((adapter.id, model) if adapter else (model,), tier, utc_now())
        record = UsageRecord(
            request_id=request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            credential_id=principal.credential_id,
            model=model,
            adapter="" if adapter is None else adapter.name,
            endpoint=checked.endpoint.name,
            dialect=request.profile.name,
            service_tier=tier,
            is_streamed=request.stream,
            is_ranked=request.best_of > request.n or request.ranking is Ranking.SUM,
            is_prepaid=principal.is_prepaid,
            gateway=self._dispatcher.gateway,
            line="" if call.line is None else call.line.id,
            ledger_id="" if call.line is None else call.line.request_id,
            jobs=len(checked.prepared.prompts),
            job_seconds=request.speech.seconds_of_clips if request.audio else [],
            end_user=end_user_of(call.body) if principal.limits_users else "",
            spend_limits=_names_of_spend_limits(subjects),
        )
        return record if price is None else _priced(record, price)

    def most_micros(self, call: Call, record: UsageRecord, most: Counts) -> int:
        """Return what a request of so many tokens costs at most: at the dearest of its prices.

        Raises StoreUnavailableError while prices are unknown.
        """
        found = [record]
        for each in call.fallbacks:
            price = self._prices.find_first(each.choice.names, record.service_tier, utc_now())
            found += [] if price is None else [_priced(record, price)]
        uncached = most._replace(cached_tokens=0)
        return max(each.cost_of(*uncached) for each in found)

    def _kept(
        self,
        principal: Principal,
        checked: CheckedRequest,
        retention: timedelta,
        idempotent: IdempotentRequest | None,
    ) -> Kept:
        key = ("", "") if idempotent is None else (idempotent.entry, idempotent.body_digest)
        retention_ms = int(retention.total_seconds() * 1000)
        is_background = checked.request.is_background
        gateway, stored_for = self._dispatcher.gateway, names_of_counted(principal.limits)
        return Kept(gateway, 1, is_background, retention_ms, *key, stored_for)

    async def _with_audio(
        self, call: Call, checked: CheckedRequest, request_id: str
    ) -> CheckedRequest:
        """Decode the audio of a transcription, whose seconds are known only then.

        Meanwhile one second is reserved, under an id of its own: a request that no limit allows
        must not occupy the decoder.
        """
        subjects = _subjects(call, checked)
        record = self.draft(call, checked, f"{request_id}-audio", subjects)
        await self._reserve(call, checked, record, subjects, checked.most)
        try:
            request, prepared = await with_audio(
                checked.request,
                checked.prepared,
                checked.card,
                self._audio,
                tenant_id=record.tenant_id,
            )
        finally:
            await self._reservations.end(
                RequestEnd(tenant_id=record.tenant_id, request_id=record.request_id)
            )
        return msgspec.structs.replace(checked, request=request, prepared=prepared)

    @asynccontextmanager
    async def _reserving(
        self,
        call: Call,
        checked: CheckedRequest,
        record: UsageRecord,
        subjects: tuple[SubjectLimits, ...],
        generation: Generation,
        kept: Kept | None,
    ) -> AsyncIterator[Settlement]:
        """Reserve the usage of a request; withdraw it if the block fails without settling it."""
        most, slices = checked.most, None
        if checked.is_sliced:
            sequences = len(checked.prepared.prompts) * checked.request.n
            slices = Slices(subjects, most, sequences=sequences)
            most = slices.first
        admission = await self._reserve(call, checked, record, subjects, most, kept)
        telemetry.ADMITTED_REQUESTS.labels(record.model, record.service_tier.value).inc()
        if checked.alias is not None:
            telemetry.ALIAS_REQUESTS.labels(checked.alias.name, record.model).inc()
            self._counts.alias_admitted(checked.alias.name, record.model)
        settlement = self._settlements.open(record, admission, generation, kept=kept)
        settlement.leaves_replies = call.is_kept
        if slices is not None:
            self._settlements.reserve_in_slices(settlement, slices)
        try:
            yield settlement
        except BaseException:
            if not settlement.has_ended:
                discarding = self._responses.discard(record.request_id)
                await settlement.withdraw()
                if discarding is not None:
                    # If this gateway died before, another one would take the response over.
                    await wait_for_end(discarding, timeout_seconds=DISCARD_SECONDS)
            raise

    async def _reserve(
        self,
        call: Call,
        checked: CheckedRequest,
        record: UsageRecord,
        subjects: tuple[SubjectLimits, ...],
        most: Counts,
        kept: Kept | None = None,
    ) -> Admission:
        principal = call.principal
        request = ReservationRequest.of(record, subjects, most, kept=kept)
        if call.fallbacks:
            # Its fallbacks must not fail for lack of money.
            cost_micros = self.most_micros(call, record, most)
            request = msgspec.structs.replace(request, cost_micros=cost_micros)
        try:
            with tracing.span(RESERVE):
                return await self._reservations.reserve(
                    request,
                    is_openai=call.profile.name is Dialect.OPENAI,
                    is_anthropic=checked.endpoint.error_style is ErrorStyle.ANTHROPIC,
                    max_tokens_param=checked.request.max_tokens_param,
                    sees=principal.sees_use_of,
                )
        except (RateLimitError, InsufficientQuotaError) as error:
            self._refusals.by_limit(record, error)
            raise

    async def _open(
        self,
        head: ResponseHead,
        settlement: Settlement,
        principal: Principal,
        jobs: list[GenerationJob],
    ) -> StoredResponse:
        """Store a response from now on. Raises RateLimitError."""
        packed = await packed_head(head)
        retention = timedelta(milliseconds=head.retention_ms)
        counted = await self._take_storage(
            settlement,
            principal,
            jobs,
            head.stored_bytes + bytes_of_head(packed),
            retention_ms=head.retention_ms,
            # A small response to a line is deleted when the line's result is stored.
            is_brief=retention <= self._settings.answer_retention or bool(head.record.line),
        )
        return self._responses.open(head, packed, settlement, counted=counted)

    async def _take_storage(
        self,
        settlement: Settlement,
        principal: Principal,
        jobs: list[GenerationJob],
        size: int,
        *,
        use: Use = Use.STORED,
        retention_ms: int = 0,
        is_brief: bool = False,
    ) -> int:
        """Count the bytes that Redis stores for a request; return what counts.

        Raises RateLimitError.
        """
        record = settlement.record
        live_ms = jobs[0].deadline_ms - clock.now_ms() + retention_ms + DEADLINE_GRACE_MS
        holder = Holder(record.tenant_id, principal.limits, record.request_id)
        return await self._storage.take(holder, size, live_ms=live_ms, use=use, is_brief=is_brief)

    async def _jobs(
        self, call: Call, checked: CheckedRequest, *, completion_id: str
    ) -> tuple[list[GenerationJob], list[bytes]]:
        """Return the jobs of a request, and the names of the chunks of each long prompt."""
        principal, request, line = call.principal, checked.request, call.line
        deadline_ms = clock.now_ms() + int(self._settings.request_timeout.total_seconds() * 1000)
        if line is not None:
            deadline_ms = line.deadline_ms
        salt = self._salt(principal.tenant_id, request.cache_isolation_key)
        # A job that reads no cache gains nothing from a worker that holds its prefix.
        reads_cache = request.reads_prefix_cache and request.scored_alternatives is None
        block_tokens = checked.card.cache_block_tokens if reads_cache else 0
        session = call.session.key if reads_cache and request.pooling is None else ""
        adapter, ref, adapter_affinity = checked.adapter, None, b""
        if adapter is not None:
            adapter_affinity = resource_affinity(adapter.sha256, LOAD_TOKENS)
            ref = AdapterRef(adapter.sha256, adapter.rank, adapter.size)
            salt = cache_salt_of(salt, adapter.sha256)
        jobs, names = list[GenerationJob](), list[bytes]()
        for index, prompt in enumerate(checked.prepared.prompts):
            if index and not index % JOBS_AT_ONCE:
                await asyncio.sleep(0)
            token_ids = prompt.token_ids
            is_long = len(token_ids) > LONG_PROMPT_TOKENS and prompt.pooling is None
            # What follows an image is not cached under these tokens.
            has_images = prompt.plain_tokens < len(token_ids)
            plain = token_ids[: prompt.plain_tokens] if has_images else token_ids
            digests = None
            if is_long:
                ends = prefix_ends(len(plain), block_tokens)
                digests = digests_at(salt, token_ids, {*ends, *chunk_ends(len(token_ids))})
            names.append(names_of(salt, token_ids, digests) if is_long else b"")
            job = GenerationJob(
                id=f"{completion_id}-{index}",
                handle=self._dispatcher.next_handle(),
                gateway=self._dispatcher.gateway,
                tenant=principal.tenant_id,
                cache_salt=salt,
                prompt_token_ids=token_ids,
                max_tokens=prompt.max_tokens,
                sampling=checked.prepared.sampling,
                deadline_ms=deadline_ms,
                n=request.n if prompt.pooling is None else len(prompt.pooling.lengths),
                best_of=request.best_of if prompt.pooling is None else len(prompt.pooling.lengths),
                ranking=request.ranking,
                stop=request.stop,
                includes_stop=request.includes_stop,
                logprobs=request.logprobs,
                score_prompt=request.scored_alternatives is not None,
                prompt_logprobs=request.scored_alternatives,
                stream=request.stream,
                grammar=checked.grammar,
                reads_prefix_cache=request.reads_prefix_cache,
                shows_special_tokens=_shows_special_tokens(checked),
                max_predict_ms=request.max_predict_ms,
                images=request.images[index],
                image_params=request.image_params[index],
                audio=request.audio[index] if request.audio else b"",
                service_tier=checked.service_tier if line is None else line.tier,
                is_background=request.is_background,
                adapter=ref,
                may_shorten=request.context_length_behavior is ContextLengthBehavior.TRUNCATE,
                parsing=checked.parsing,
                pooling=prompt.pooling,
                model_share=model_share_of(principal.limits),
                request_id=logs.request_id.get(),
                traceparent=traceparent_of(),
                affinity=prefix_affinity(salt, plain, block_tokens, digests)
                + adapter_affinity
                + session_affinity(salt, session, token_ids),
            )
            jobs.append(job)
        return jobs, names

    def _salt(self, tenant_id: str, isolation_key: str = "") -> str:
        secret = self._settings.cache_salt_secret.get_secret_value()
        return _cache_salt(secret, tenant_id, isolation_key)


def _subjects(call: Call, checked: CheckedRequest) -> tuple[SubjectLimits, ...]:
    """Return the holders of limits that count a request."""
    principal, model, adapter = call.principal, checked.card.model, checked.adapter
    if not principal.spend_limits:
        return principal.limits
    name = model if adapter is None else f"{model}{SEPARATOR}{adapter.name}"
    user = end_user_of(call.body) if principal.limits_users else None
    now = _Moment(principal, clock.now_ms())
    return _subjects_at(now, now.constant_ms, name, user)


class _Moment:
    """A principal at a time, equal to the same object at any time: see `_subjects_at`."""

    __slots__ = ("principal", "unix_ms")

    def __init__(self, principal: Principal, unix_ms: int) -> None:
        self.principal = principal
        self.unix_ms = unix_ms

    @property
    def constant_ms(self) -> tuple[int, int]:
        """What is equal as long as the principal's spend limits have the same windows and amounts:
        the quarter of an hour, and the number of raises that are in force.
        """
        limits = self.principal.spend_limits
        raised = sum(each.is_raised_at(self.unix_ms) for each in limits)
        return self.unix_ms // (QUARTER_SECONDS * 1000), raised

    @override
    def __hash__(self) -> int:
        return id(self.principal)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Moment) and other.principal is self.principal


@lru_cache(maxsize=1_000)
def _subjects_at(
    now: _Moment, _constant: tuple[int, int], model: str, user: str | None
) -> Subjects:
    """Return the holders of limits and the spend limits that count a request."""
    principal = now.principal
    spending = applied(principal.spend_limits, now.unix_ms, model=model, user=user)
    return Subjects((*principal.limits, *spending))


@lru_cache(maxsize=10_000)
def _names_of_spend_limits(subjects: tuple[SubjectLimits, ...]) -> tuple[str, ...]:
    return tuple(each.subject for each in subjects if each.spending is not None)


def _priced(record: UsageRecord, price: Price) -> UsageRecord:
    return msgspec.structs.replace(
        record,
        prompt_price=price.prompt_micros,
        cached_price=price.cached_micros,
        completion_price=price.completion_micros,
        audio_price=price.audio_micros,
    )


def _job_bytes(jobs: list[GenerationJob]) -> int:
    """Return the bytes of jobs in the queue. Only their prompts differ, so one is encoded."""
    shared = len(encode_job(jobs[0])) - _prompt_bytes(jobs[0])
    sizes = (shared + _prompt_bytes(job) for job in jobs)
    return len(jobs) * _JOB_BYTES + allocated(sizes)


def _prompt_bytes(job: GenerationJob) -> int:
    media = sum(map(len, job.images)) + len(job.audio)
    return _TOKEN_BYTES * len(job.rest) + len(job.chunks) + len(job.affinity) + media


def _retention(
    settings: Settings, call: Call, checked: CheckedRequest, *, is_idempotent: bool
) -> timedelta:
    """Return how long the response stays readable after its end; zero if it is not stored."""
    if not call.is_kept:
        return timedelta(0)
    if is_idempotent or checked.request.is_background:
        return settings.idempotency_retention
    return settings.answer_retention if checked.request.stream else timedelta(0)


def _completion(
    checked: CheckedRequest,
    request_id: str,
    *,
    cost_of: Callable[[Usage], int] | None,
    seal: Seal | None,
) -> Completion:
    card, prompts = checked.card, checked.prepared.prompts
    return Completion(
        id=request_id,
        model=checked.model,
        created=clock.now_seconds(),
        fingerprint=_fingerprint(
            card.engine,
            card.model,
            card.tokenizer_digest,
            "" if checked.adapter is None else checked.adapter.sha256,
        ),
        request=checked.request,
        prompt_token_ids=[prompt.token_ids for prompt in prompts],
        prompt_texts=[prompt.shown for prompt in prompts],
        generation_settings=_generation_settings(checked),
        cost_of=cost_of,
        seal=seal,
    )


def _generation_settings(checked: CheckedRequest) -> dict[str, Any]:
    if not checked.request.is_native:
        return {}
    sampling, window = checked.prepared.sampling, checked.card.context_window
    return native_settings(checked.request, sampling, context_window=window)


def _shows_special_tokens(checked: CheckedRequest) -> bool:
    # Tool calls and reasoning are often marked by special tokens.
    request, form = checked.request, checked.card.chat
    if request.chat is None:
        return request.shows_special_tokens or request.tool_use is not None
    parser_needs_them = form is not None and form.shows_special_tokens
    has_hermes_calls = checked.parsing is not None and checked.parsing.has_hermes_calls
    return request.shows_special_tokens or parser_needs_them or has_hermes_calls


@lru_cache(maxsize=1_000)
def _fingerprint(engine: str, model: str, tokenizer_digest: str, adapter_digest: str) -> str:
    identity = f"{engine} {model} {tokenizer_digest}{adapter_digest and ' ' + adapter_digest}"
    return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12]


@lru_cache(maxsize=10_000)
def _cache_salt(secret: str, tenant_id: str, isolation_key: str) -> str:
    # The length prefix keeps a tenant's id plus key from equalling another tenant's id.
    identity = f"{len(tenant_id)} {tenant_id}{isolation_key}" if isolation_key else tenant_id
    digest = hmac.digest(secret.encode(), identity.encode(), "sha256")
    return base64.urlsafe_b64encode(digest[:18]).decode()
