"""The adapters of one engine: loaded for the jobs that need them, the least recently used unloaded.

The jobs that run never use more adapters than the engine has slots. An engine may keep more of them
loaded, so that they need not be loaded again.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from contract.affinity import resource_digest
from contract.messages import AdapterRef, GenerationJob, about
from contract.queue import AdapterRoom
from worker import telemetry
from worker.adapters.files import AdapterFiles, StoreFailedError, WrongFilesError
from worker.engine.base import AdapterRejectedError, Engine, EngineAdapter
from worker.execution.jobs import RunningJobs
from worker.execution.running_job import RunningJob
from worker.queue.held import HeldDigests

_log = logging.getLogger(__name__)

_numbers = count(1)
"""Never used twice: an engine that still has something of an unloaded adapter must not take it for
another one, even after it has slept."""

RETRY_SECONDS = 5.0
"""Time after a failure of the object store in which the worker loads no other adapter."""


class AdapterLoadError(Exception):
    """An adapter could not be loaded. The message is fit for a client.

    Args:
        message: What failed.
        is_permanent: Whether it would fail in every worker.
    """

    def __init__(self, message: str, *, is_permanent: bool) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


@dataclass(eq=False)
class Adapters:
    """Loads adapters into one engine.

    Args:
        files: Their files on this machine.
        held: What the worker holds for claims to prefer.
        charge: Charges the tenant of a job for the seconds of a load.
        on_change: Called with the digests of the loaded adapters when they have changed.
    """

    _engine: Engine
    _jobs: RunningJobs
    _files: AdapterFiles | None
    _held: HeldDigests
    _charge: Callable[[RunningJob, float], Awaitable[None]]
    _on_change: Callable[[list[str]], None]

    def __post_init__(self) -> None:
        self._limits = self._engine.info.adapters
        self._loaded: OrderedDict[str, EngineAdapter] = OrderedDict()
        self._loading: dict[str, asyncio.Task[EngineAdapter]] = {}
        self._changing = asyncio.Lock()
        self._retry_at = 0.0

    def room(self) -> AdapterRoom | None:
        """Return which adapters further jobs may use; None if the engine has no adapters."""
        if self._limits is None:
            return None
        used = self._used()
        free = self._limits.slots - len(used) if time.monotonic() >= self._retry_at else 0
        return AdapterRoom(sorted(used), max(free, 0))

    def is_loaded(self, job: GenerationJob) -> bool:
        """Whether a job needs no load."""
        return job.adapter is None or job.adapter.digest in self._loaded

    async def load(self, generation: RunningJob) -> EngineAdapter | None:
        """Load the adapter of a running job. Return None if the job runs the base model.

        Jobs with the same adapter share one load, for which the first one's tenant is charged.
        Raises AdapterFailedError or EngineDeadError.
        """
        adapter = generation.job.adapter
        if adapter is None:
            return None
        loaded = self._loaded.get(adapter.digest)
        if loaded is not None:
            self._loaded.move_to_end(adapter.digest)
            return loaded
        task = self._loading.get(adapter.digest)
        if task is None:
            task = asyncio.create_task(self._load_for(generation, adapter))
            self._loading[adapter.digest] = task
            task.add_done_callback(partial(self._load_ended, adapter.digest))
        return await asyncio.shield(task)

    async def _load_for(self, generation: RunningJob, adapter: AdapterRef) -> EngineAdapter:
        began = time.monotonic()
        outcome = "failed"
        try:
            loaded = await self._load(adapter)
            outcome = "loaded"
            return loaded
        except (StoreFailedError, WrongFilesError, AdapterRejectedError) as error:
            is_permanent = not isinstance(error, StoreFailedError)
            outcome = "rejected" if is_permanent else "unavailable"
            if not is_permanent:
                self._retry_at = time.monotonic() + RETRY_SECONDS
            _log.error(
                "Cannot load the adapter %s: %s",
                adapter.digest,
                error,
                extra=about(generation.job),
            )
            raise AdapterLoadError(
                "The adapter could not be loaded.", is_permanent=is_permanent
            ) from error
        finally:
            seconds = time.monotonic() - began
            telemetry.adapter_load(outcome, seconds)
            await self._charge(generation, seconds)

    def _load_ended(self, digest: str, task: "asyncio.Task[EngineAdapter]") -> None:
        self._loading.pop(digest, None)
        if not task.cancelled():
            # If all of its jobs have ended, asyncio would log the exception as never retrieved.
            task.exception()

    async def _load(self, adapter: AdapterRef) -> EngineAdapter:
        limits, files = self._limits, self._files
        if limits is None or files is None:
            raise AdapterRejectedError("this worker serves no adapters")
        if adapter.rank > limits.max_rank:
            raise AdapterRejectedError(
                f"its rank is {adapter.rank}, more than SLUICE_MAX_ADAPTER_RANK ({limits.max_rank})"
            )
        # One at a time, so that no more are loaded than the engine keeps.
        async with files.using(adapter, kept=self._loaded) as folder, self._changing:
            await self._make_room(limits.loaded)
            loaded = EngineAdapter(next(_numbers), adapter.digest, str(folder))
            await self._engine.load_adapter(loaded)
            self._loaded[adapter.digest] = loaded
            self._held.add(resource_digest(adapter.digest))
            self._changed()
        return loaded

    async def _make_room(self, most_loaded: int) -> None:
        """Unload the adapters that were not used for longest, until there is room for one more."""
        used = self._used()
        for digest in list(self._loaded):
            if len(self._loaded) < most_loaded:
                return
            if digest not in used:
                unloaded = self._loaded.pop(digest)
                self._held.remove(resource_digest(digest))
                telemetry.ADAPTER_EVICTIONS.inc()
                self._changed()
                await self._engine.unload_adapter(unloaded)

    async def unload(self) -> None:
        """Unload all adapters, which no job uses any more. Raises EngineDeadError."""
        while self._loaded:
            _, unloaded = self._loaded.popitem()
            await self._engine.unload_adapter(unloaded)
        self._changed()

    def _used(self) -> set[str]:
        jobs = (each.job for each in self._jobs.by_id.values())
        return {job.adapter.digest for job in jobs if job.adapter is not None}

    def _changed(self) -> None:
        telemetry.ADAPTERS_LOADED.set(len(self._loaded))
        self._on_change(list(self._loaded))

    async def aclose(self) -> None:
        """Load nothing any more."""
        for task in list(self._loading.values()):
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        telemetry.ADAPTERS_LOADED.set(0)
