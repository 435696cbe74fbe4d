"""The worker process of one model of a host: started, put to sleep, woken and stopped."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys, messages
from contract.messages import WorkerCard, WorkerState
from worker.main import LOADED, SLEEP, WAKE

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
SPARE_SECONDS = 30.0
"""How much later than it has to a worker may sleep, wake or stop before it counts as hung."""


@dataclass(eq=False)
class HostedWorker:
    """A worker process, and what it announces."""

    model: str
    _patience_seconds: float
    """In which the worker falls asleep, wakes up or stops, or it is killed."""
    _key: str
    _process: asyncio.subprocess.Process
    _redis: Redis
    _late_at: float = math.inf
    """When a worker that wakes up counts as hung. How long a start may take is unknown."""

    @classmethod
    async def start(
        cls,
        model: str,
        worker: str,
        environment: Mapping[str, str],
        redis: Redis,
        *,
        longest_seconds: float,
    ) -> "HostedWorker":
        """Start the worker of a model under the id `worker`.

        `longest_seconds` is its own limit to fall asleep, wake up or stop.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker"),
            env={
                **environment,
                "SLUICE_ENDS_WITH_INPUT": "true",
                "SLUICE_SCALES_TO_ZERO": "true",
                "SLUICE_WORKER_ID": worker,
            },
            # Its input ends when this process does, however that happens.
            stdin=asyncio.subprocess.PIPE,
            # A terminal's Ctrl-C must not reach it: the host stops it.
            start_new_session=True,
        )
        patience_seconds = longest_seconds + SPARE_SECONDS
        return cls(model, patience_seconds, keys.worker_card(model, worker), process, redis)

    @property
    def exit_code(self) -> int | None:
        """The code with which the process has exited; None while it runs."""
        return self._process.returncode

    async def state(self) -> WorkerState | None:
        """Return the state that the worker announces; None if it announces none.

        Raises RedisError.
        """
        content: Any = await self._redis.get(self._key)
        card = read_card(content)
        return None if card is None else card.state

    async def is_ready(self) -> bool:
        """Return whether the worker claims jobs. One that does not wake up in time is killed.

        Raises RedisError.
        """
        if await self.state() is WorkerState.READY:
            self._late_at = math.inf
            return True
        if time.monotonic() > self._late_at:
            self.kill()
        return False

    async def sleep(self) -> bool:
        """Drain the worker and put its engine to sleep. Return False if it exits or hangs instead.

        Waits while Redis is unavailable: another engine needs the memory that this one frees.
        """
        self._send(SLEEP)
        late_at = time.monotonic() + self._patience_seconds
        while self.exit_code is None:
            try:
                if await self.state() is WorkerState.SLEEPING:
                    return True
            except (RedisError, OSError):
                late_at = time.monotonic() + self._patience_seconds
            if time.monotonic() > late_at:
                self.kill()
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return False

    def wake(self, *, units: float) -> None:
        """Let a sleeping worker claim jobs; the tenant of the first one is charged the units."""
        self._late_at = time.monotonic() + self._patience_seconds
        self._send(WAKE, units)

    def loaded(self, seconds: float) -> None:
        """Let the worker announce how long the swap to it took."""
        self._send(LOADED, seconds)

    def _send(self, command: bytes, *arguments: float) -> None:
        # A process that has exited gets nothing: the next look at it finds its exit code.
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            words = [command, *(b"%f" % each for each in arguments)]
            self._process.stdin.write(b" ".join(words) + b"\n")

    def terminate(self) -> None:
        """Send the signal to stop; a second one makes the worker give its jobs back at once."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End a worker that hangs, with the processes of its engine, which hold the device."""
        if self.exit_code is None:
            _log.error("The worker of %s hangs, and is killed", self.model)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Drain the worker and wait for its end."""
        self.terminate()
        stopped = asyncio.create_task(self._process.wait())
        try:
            done, _ = await asyncio.wait([stopped], timeout=self._patience_seconds)
            if not done:
                self.kill()
                await asyncio.shield(stopped)
        except asyncio.CancelledError:
            self.terminate()
            await stopped
            raise


@lru_cache  # The same card is read twice a second.
def read_card(content: bytes | None) -> WorkerCard | None:
    """Return the card of a worker; None if there is none that this version can decode."""
    try:
        return None if content is None else messages.decode_card(content)
    except msgspec.MsgspecError as error:
        # An incompatible worker must not end the host of other models.
        _log.warning("Cannot decode the card of a worker: %s", error)
        return None
