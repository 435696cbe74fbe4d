"""Decode audio files in processes of their own, so that no file can disturb other requests."""

import asyncio
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from common.not_none import not_none
from common.tasks import kill
from contract.messages import AUDIO_RATE, SAMPLE_BYTES
from gateway.completions.prompt.audio import Outcome
from gateway.platform.concurrency.fair_turns import FairTurns
from gateway.platform.concurrency.parent_death import tethered
from gateway.platform.settings import Settings
from gateway.records.errors import OverloadedError, invalid

PROCESSES: Final = 2
MEMORY_BYTES: Final = 256 * 1024**2
"""Address space of a process beside the file and its samples; half of it is ffmpeg's libraries."""
CPU_SECONDS: Final = 60
TASK_SECONDS: Final = 120.0
WAIT_SECONDS: Final = 30.0
_PROGRAM: Final = "gateway.completions.prompt.audio.program"
_KILLED: Final = frozenset({-signal.SIGXCPU, -signal.SIGKILL})


def command(file_bytes: int, most_seconds: int, clip_seconds: int) -> tuple[str, ...]:
    """Return the command that decodes a file of so many bytes."""
    memory_bytes = MEMORY_BYTES + 2 * file_bytes + most_seconds * AUDIO_RATE * SAMPLE_BYTES
    limits = (memory_bytes, CPU_SECONDS, most_seconds, clip_seconds)
    return sys.executable, "-P", "-m", _PROGRAM, *map(str, limits)


class Clips(NamedTuple):
    """A decoded file, cut into clips that a model reads one at a time."""

    samples: list[bytes]
    """See `contract.messages.AUDIO_RATE`."""

    @property
    def lengths(self) -> list[int]:
        """Samples of each clip."""
        return [len(each) // SAMPLE_BYTES for each in self.samples]


class AudioDecoder:
    """Decodes files, a few at a time; tenants take turns."""

    def __init__(self, settings: Settings) -> None:
        self._most_seconds = settings.max_audio_seconds
        self._turns = FairTurns(
            PROCESSES,
            most_waiting_size=settings.max_held_bytes_of_tenant,
            wait_seconds=WAIT_SECONDS,
            what="audio files to be decoded",
        )

    async def decode(self, content: bytes, *, clip_seconds: int, tenant_id: str) -> Clips:
        """Return the clips of a tenant's file.

        Raises InvalidParameterError, TenantQueueFullError and OverloadedError.
        """
        await self._turns.take(tenant_id, size=len(content))
        began = time.monotonic()
        try:
            return await self._decode(content, clip_seconds)
        finally:
            self._turns.give_back(tenant_id, seconds=time.monotonic() - began)

    async def _decode(self, content: bytes, clip_seconds: int) -> Clips:
        process = await asyncio.create_subprocess_exec(
            *tethered(*command(len(content), self._most_seconds, clip_seconds)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={},  # It needs no environment, and parts of it are secret.
        )
        try:
            async with asyncio.timeout(TASK_SECONDS):
                return await _clips(process, content)
        except TimeoutError:
            raise OverloadedError(
                "The audio could not be decoded in time.", retry_after_seconds=1.0
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await process.wait()
            is_slow = process.returncode in _KILLED
            slow = f"takes more than {CPU_SECONDS} seconds of processor time to decode"
            raise invalid("file", f"{slow if is_slow else 'is damaged'}.") from None
        finally:
            await kill(process)


async def _clips(process: Process, content: bytes) -> Clips:
    source, target = not_none(process.stdout), not_none(process.stdin)
    with suppress(ConnectionError):  # What it wrote before it ended says why.
        target.write(content)
        await target.drain()
        target.close()
    outcome = msgspec.json.decode(await source.readline(), type=Outcome)
    if outcome.refusal:
        raise invalid("file", f"{outcome.refusal}.")
    return Clips([await source.readexactly(each * SAMPLE_BYTES) for each in outcome.samples])
