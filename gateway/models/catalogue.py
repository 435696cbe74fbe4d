"""Model catalogue: the models and their workers, read from worker announcements in Redis."""

import asyncio
import logging
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import msgspec
from redis.exceptions import RedisError

from common import clock
from common.tasks import repeat
from contract import keys, messages
from contract.messages import WorkerCard, WorkerState
from contract.queue import LISTED_MS, JobQueue, ModelStatus
from contract.scripts import CommandExecutor
from gateway.records.errors import ModelLoadingError, ModelNotFoundError, NoWorkerError

REFRESH_SECONDS = 1.0
RENEWAL_SECONDS = 0.1
"""Minimum time between two refreshes for requests whose model is unknown or has no worker."""
SILENT_MS = 6_000
"""Workers announce themselves each second; one is silent after this long without."""
RETRY_AFTER_SECONDS = 5.0
"""Retry-After for a model without a worker: about the time that a worker needs to return."""

_NOT_SERVED = ModelStatus(ready_workers=0, waiting_jobs=0, leased_jobs=0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that was announced at some time, and its current status."""

    card: WorkerCard
    status: ModelStatus

    @property
    def is_ready(self) -> bool:
        """Whether a worker serves the model."""
        return self.status.ready_workers > 0

    @property
    def is_asleep(self) -> bool:
        """Whether no worker serves the model, but one is started for waiting jobs."""
        card = self.card
        # The card of a worker that was never ready lacks what gateways need to accept a request.
        return not self.is_ready and card.scales_to_zero and card.state is WorkerState.READY

    @property
    def state(self) -> str:
        """`ready`, `sleeping`, or the code of the error that describes the model best."""
        if self.is_ready:
            return "ready"
        waiting_jobs = self.status.waiting_jobs + self.status.waiting_batch_jobs
        if self.is_asleep and not waiting_jobs:
            return "sleeping"
        is_loading = self.is_asleep or self.card.state is WorkerState.LOADING
        return ModelLoadingError.code if is_loading else NoWorkerError.code


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker, and when it last announced itself."""

    card: WorkerCard
    at_ms: int
    """Unix time in milliseconds."""

    @property
    def silent_ms(self) -> int:
        """How long it is silent; 0 for a worker that announces itself."""
        age_ms = clock.now_ms() - self.at_ms
        return age_ms if age_ms > SILENT_MS else 0


class Catalogue:
    """A copy of the worker announcements, refreshed every second."""

    def __init__(self, executor: CommandExecutor) -> None:
        self.executor = executor
        self._queues: dict[str, JobQueue] = {}
        self._models: dict[str, ServedModel] = {}
        self.largest_window = 0
        """Tokens of the largest context window of a known model."""
        self._aliases: dict[str, str] = {}
        self._refreshed_at = float("-inf")
        """When the refresh that produced the current copy began, by `time.monotonic`."""
        self._served_at: dict[str, float] = {}
        """When each model last had a worker, or was first announced."""
        self._renewal: asyncio.Task[None] | None = None

    @property
    def models(self) -> list[ServedModel]:
        """Every known model, by name."""
        return [self._models[name] for name in sorted(self._models)]

    @property
    def names(self) -> AbstractSet[str]:
        """The names of every known model."""
        return self._models.keys()

    def known(self, name: str) -> ServedModel | None:
        """Return a model by its name or an alias, as of the last refresh."""
        return self._models.get(name) or self._models.get(self._aliases.get(name, ""))

    def queue(self, model: str) -> JobQueue:
        """Return the queue of a model."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = JobQueue(self.executor, model)
        return queue

    async def run(self) -> None:
        """Refresh the copy until cancelled."""
        await repeat("refresh the model catalogue", self.refresh, seconds=REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Read all announcements. Raises RedisError."""
        began = time.monotonic()
        announced: dict[bytes, bytes]
        removed: set[bytes]
        announced, removed = await asyncio.gather(
            self.executor.execute_command("HGETALL", keys.MODELS),
            self.executor.execute_command("SMEMBERS", keys.REMOVED_MODELS),
        )
        cards = [card for name, value in announced.items() if (card := _read_card(name, value))]
        statuses = await asyncio.gather(*(self._status(card.model) for card in cards))
        if began < self._refreshed_at:
            return  # A refresh that began later finished first; its announcements are newer.
        # After Redis restarts empty, workers announce their models again within a second. Until
        # then these models count as having no worker, so clients retry instead of getting 404.
        models = {
            name: ServedModel(model.card, _NOT_SERVED)
            for name, model in self._models.items()
            if name.encode() not in removed
        }
        for card, status in zip(cards, statuses, strict=True):
            # The worker became ready after its card was read, so the card lacks details.
            is_known = card.state is WorkerState.READY
            models[card.model] = ServedModel(card, status if is_known else _NOT_SERVED)
        self._models = models
        windows = (each.card.context_window for each in models.values())
        self.largest_window = max(windows, default=0)
        self._served_at = {
            name: began if model.status.ready_workers else self._served_at.get(name, began)
            for name, model in models.items()
        }
        self._aliases = {
            alias: model.card.model for model in models.values() for alias in model.card.aliases
        }
        self._refreshed_at = began

    async def _status(self, model: str) -> ModelStatus:
        """Return the status of a model, or its last one while its server does not respond."""
        try:
            return await self.queue(model).status()
        except RedisError as error:
            logger.warning("cannot read the status of model %s: %s", model, type(error).__name__)
        known = self._models.get(model)
        return _NOT_SERVED if known is None else known.status

    async def workers(self, name: str) -> list[SeenWorker]:
        """Return the workers of a model by their ids: also those that are silent for a while.

        Raises RedisError.
        """
        seen: dict[bytes, bytes] = await self.executor.execute_command(
            "HGETALL", keys.last_seen(name)
        )
        found = []
        for worker in sorted(seen):
            at_ms, _, encoded = seen[worker].partition(b" ")
            if clock.now_ms() - int(at_ms) > LISTED_MS:
                await self.executor.execute_command("HDEL", keys.last_seen(name), worker)
            elif (card := _read_card(name.encode(), encoded)) is not None:
                found.append(SeenWorker(card, int(at_ms)))
        return found

    async def remove(self, name: str) -> None:
        """Remove a model from every gateway within a second, until a worker announces it again.

        Raises RedisError.
        """
        await self.executor.execute_command("SADD", keys.REMOVED_MODELS, name)
        await self.executor.execute_command("HDEL", keys.MODELS, name)

    @property
    def age_seconds(self) -> float:
        """Time since the last refresh that succeeded; infinite before the first one."""
        return time.monotonic() - self._refreshed_at

    def unserved_seconds(self, name: str) -> float:
        """Return how long the model had no worker at the last refresh; 0 for an unknown model."""
        served_at = self._served_at.get(name)
        return 0.0 if served_at is None else self._refreshed_at - served_at

    async def look_up(self, name: str) -> ServedModel | None:
        """Return a model by its name or an alias, even if it was announced a moment ago.

        Raises RedisError.
        """
        requested_at = time.monotonic()
        model = self.known(name)
        while (
            model is None or model.status.ready_workers == 0
        ) and self._refreshed_at < requested_at:
            # All callers share a refresh: unknown names cause at most ten a second.
            if self._renewal is None or self._renewal.done():
                self._renewal = asyncio.create_task(self._renew())
                # If every waiter was cancelled, asyncio would log the error as never retrieved.
                self._renewal.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(self._renewal)
            model = self.known(name)
        return model

    async def _renew(self) -> None:
        await asyncio.sleep(max(self._refreshed_at + RENEWAL_SECONDS - time.monotonic(), 0))
        await self.refresh()

    async def find(self, name: str) -> ServedModel:
        """Return a model that is ready or asleep, by its name or an alias.

        Raises ModelNotFoundError, ModelLoadingError or NoWorkerError, and RedisError if the model
        cannot be looked up.
        """
        model = await self.look_up(name)
        if model is None:
            raise ModelNotFoundError(name)
        if not (model.is_ready or model.is_asleep):
            own_name = model.card.model
            if model.card.state is WorkerState.LOADING:
                raise ModelLoadingError(
                    f"The model '{name}' is being loaded.",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                    model=own_name,
                )
            raise NoWorkerError(
                f"No worker serves the model '{name}' at the moment.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                model=own_name,
            )
        return model

    async def file(self, key: str) -> bytes | None:
        """Return the compressed file that a worker published under a key."""
        file: bytes | None = await self.executor.execute_command("GET", key)
        return file


def _read_card(name: bytes, value: bytes) -> WorkerCard | None:
    try:
        return messages.decode_card(value)
    except msgspec.MsgspecError:
        # An incompatible worker must not hide all other models.
        logger.exception("cannot decode the announcement of the model %r", name)
        return None
