"""The worker's catalogue entry in Redis: its card, the model's tokenizer and chat templates."""

import asyncio
import hashlib
import logging
import math
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from common import clock
from common.tasks import each_apart
from contract import keys, messages
from contract.adapters import encode_shapes
from contract.messages import AdapterSupport, WorkerCard, WorkerState
from contract.queue import JobQueue
from worker import telemetry
from worker.chat_format import published
from worker.engine.base import EngineInfo
from worker.model_files import context_window
from worker.queue.held import CARD_TTL_MS, HeldDigests
from worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 1.0
FILES_SECONDS = 5.0
"""Interval at which the model's files are renewed, or published again if Redis has lost them."""
_MOST_FAILURE_CHARACTERS = 500
_FILE_TTL_SECONDS = 600
_SLEEPING_FILE_TTL_SECONDS = 365 * 86_400
"""If workers are started by requests: gateways need the files of a model before its worker runs."""
_OF_ENGINE = (
    *("context_window", "vocabulary_size", "bos_token_id", "max_sequences", "kv_cache_tokens"),
    *("features", "eos_token_ids", "image_token", "max_images", "image_tokens"),
    *("cache_block_tokens", "chat", "pooling", "clip_seconds", "exactness"),
)
"""Fields of cards that are those of `EngineInfo`."""


class Registration:
    """Keeps one worker's catalogue entry alive."""

    def __init__(
        self, redis: Redis, queue: JobQueue, held: HeldDigests, settings: WorkerSettings
    ) -> None:
        self._redis = redis
        self._queue = queue
        self._held = held
        self._files: dict[str, bytes] = {}
        self._files_at = -math.inf
        """When they were published, in `time.monotonic`."""
        self._announced: WorkerState | None = None
        self._announcing = asyncio.Lock()
        self._card = WorkerCard(
            id=settings.worker_id,
            model=queue.model,
            state=WorkerState.LOADING,
            engine=settings.engine,
            created=clock.now_seconds(),
            context_window=settings.context_window or context_window(Path(settings.model_path)),
            dialect=settings.dialect or "",
            aliases=list(settings.model_aliases),
            scales_to_zero=settings.scales_to_zero,
        )

    @property
    def is_announced_ready(self) -> bool:
        """Whether the published card marks the worker as ready."""
        return self._announced is WorkerState.READY

    def engine_started(self, info: EngineInfo) -> None:
        """Mark the worker as ready from the next `announce`."""
        digest = hashlib.sha256(info.tokenizer_json).hexdigest()
        files = {keys.tokenizer(digest): info.tokenizer_json}
        if info.chat is not None:
            files[keys.chat_template(info.chat.template_digest)] = published(info.chat_templates)
        adapters = None
        if info.adapters is not None:
            shapes = encode_shapes(info.adapters.modules)
            modules_digest = hashlib.sha256(shapes).hexdigest()
            files[keys.adapter_modules(modules_digest)] = shapes
            adapters = AdapterSupport(info.adapters.max_rank, modules_digest)
        self._files = {key: zlib.compress(content) for key, content in files.items()}
        self._change(
            state=WorkerState.READY,
            engine=info.name,
            tokenizer_digest=digest,
            **{name: getattr(info, name) for name in _OF_ENGINE},
            # Not after a restart of the engine, which loads faster than a worker starts.
            load_seconds=self._card.load_seconds
            or max(clock.now_seconds() - self._card.created, 1),
            adapters=adapters,
        )

    def canary_compared(self, different: str) -> None:
        """Announce how the engine's results differ from its class from the next `announce`."""
        self._change(inexact=different[:_MOST_FAILURE_CHARACTERS])

    def adapters_changed(self, loaded: list[str]) -> None:
        """Announce the digests of the loaded adapters from the next `announce`."""
        if self._card.adapters is not None:
            adapters = msgspec.structs.replace(self._card.adapters, loaded=loaded)
            self._change(adapters=adapters)

    def engine_failed(self, failure: str) -> None:
        """Mark the worker's engine as dead or not restartable from the next `announce`."""
        has_died = self._card.state is WorkerState.READY
        self._announced = None
        self._change(
            state=WorkerState.RESTARTING,
            engine_restarts=self._card.engine_restarts + has_died,
            last_failure=failure[:_MOST_FAILURE_CHARACTERS],
        )

    def draining(self) -> None:
        """Mark the worker as draining from the next `announce`."""
        self._announced = None
        self._change(state=WorkerState.DRAINING)

    def sleeping(self) -> None:
        """Mark the worker as sleeping from the next `announce`."""
        self._change(state=WorkerState.SLEEPING)

    def loaded(self, seconds: float) -> None:
        """Announce how long it took to swap to this worker from the next `announce`."""
        self._change(load_seconds=max(round(seconds), 1))

    async def announce(self) -> None:
        """Publish the card with a lifetime of a few seconds."""
        # One after the other, so that no card replaces a later one.
        async with self._announcing:
            await self._publish()

    async def _publish(self) -> None:
        # The card may change during the awaits below. Publish the files before a ready card.
        card, is_again = self._card, self._announced is self._card.state
        if not is_again:
            await self._publish_model(card)
        known = await self._queue.announce(card, ttl_ms=CARD_TTL_MS)
        if card.state is WorkerState.READY:
            self._held.check(known)
        if self._card is card:
            self._announced = card.state
        if is_again:
            # The model's files last longer than the card, and may be on another server.
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                await self._publish_model(card, is_again=True)

    async def _publish_model(self, card: WorkerCard, *, is_again: bool = False) -> None:
        if card.state is WorkerState.READY:
            if not is_again or time.monotonic() >= self._files_at + FILES_SECONDS:
                self._files_at = time.monotonic()
                await each_apart(self._publish_file, self._files, at_once=len(self._files))
            await self._redis.hset(keys.MODELS, card.model, messages.encode(card))
        elif card.state is not WorkerState.SLEEPING:
            # Do not overwrite a card of this model: another worker's card has more information.
            # If Redis has lost it, the host wakes a sleeping worker, so that gateways get it again.
            await self._redis.hsetnx(keys.MODELS, card.model, messages.encode(card))

    def _change(self, **fields: Any) -> None:
        self._card = msgspec.structs.replace(self._card, **fields)
        telemetry.STATE.state(self._card.state)

    async def _publish_file(self, key: str) -> None:
        seconds = _SLEEPING_FILE_TTL_SECONDS if self._card.scales_to_zero else _FILE_TTL_SECONDS
        if not await self._redis.expire(key, seconds):
            await self._redis.set(key, self._files[key], ex=seconds)

    async def withdraw(self) -> None:
        """Remove the worker's card."""
        self.draining()
        await self._queue.announce(self._card, ttl_ms=1)
        await self._queue.forget_worker(self._card.id)
