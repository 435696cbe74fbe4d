"""Pool of sandbox processes: started on demand and replaced when they die."""

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from common.not_none import not_none
from common.tasks import TaskSet, kill
from gateway.completions.structure.sandbox import messages
from gateway.completions.structure.sandbox.messages import (
    CompileTask,
    Order,
    Template,
    Tokenizer,
    Verdict,
)
from gateway.platform.concurrency.fair_turns import FairTurns
from gateway.platform.concurrency.parent_death import tethered

_PROGRAM: Final = "gateway.completions.structure.sandbox.program"
_START_SECONDS: Final = 20.0
_LOAD_SECONDS: Final = 30.0
_LONG_WORK: Final = 5
"""Divisor of its CPU time limit; ordinary structures need less than the resulting share."""
_OURSELVES: Final = ""
"""Pseudo-tenant for trials of chat templates; it takes turns like a tenant."""
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Number of sandboxes and the limits of each."""

    processes: int = 2
    most_waiting: int = 32
    """Maximum waiting structures of one tenant; further ones get a 429 response at once."""
    wait_seconds: float = 2.0
    """Maximum wait for a sandbox."""
    task_seconds: float = 2.0
    """Wall-clock limit for a structure, from the start of its work."""
    cpu_seconds: float = 1.0
    """CPU time limit for a structure."""
    compile_seconds: float = 0.25
    """Share of that CPU time for compilation, because the engine compiles again."""
    memory_bytes: int = 2 * 1024**3
    """Address space limit of a sandbox."""
    niceness: int = 5


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Provides the tokenizer for a sandbox that does not have it yet."""

    digest: str
    """SHA-256 of the file."""
    fetch: Callable[[], Awaitable[bytes]]
    """Returns the model's tokenizer.json."""
    eos_token_ids: list[int]
    vocabulary_size: int


class SandboxDiedError(Exception):
    """The child process exited, or was killed, before it returned a verdict."""

    def __init__(self, *, is_tasks_fault: bool) -> None:
        super().__init__("The sandbox died.")
        self.is_tasks_fault = is_tasks_fault
        """Whether the task used up its limits; if not, the machine was too busy."""


class SandboxPool:
    """Assigns tasks to free sandboxes, and gives tenants their turns."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._all = [_Sandbox(settings) for _ in range(settings.processes)]
        self._free = list(self._all)
        self._turns = FairTurns(
            settings.processes,
            most_waiting_size=settings.most_waiting,
            wait_seconds=settings.wait_seconds,
            what="grammars to be compiled",
        )
        self._revivals = TaskSet()

    async def run(
        self, task: CompileTask, tokenizer: TokenizerSource, *, tenant_id: str
    ) -> Verdict:
        """Return the verdict on a tenant's task.

        Raises SandboxDiedError and the errors of `FairTurns.take`.
        """
        async with self._sandbox(tenant_id) as sandbox:
            verdict = await sandbox.run(task, seconds=self._settings.task_seconds)
            if verdict.lacks_tokenizer:
                await sandbox.run(await _loaded(tokenizer), seconds=_LOAD_SECONDS)
                verdict = await sandbox.run(task, seconds=self._settings.task_seconds)
            if not verdict.grammar and not verdict.refusal:
                # An empty grammar would constrain nothing.
                raise SandboxDiedError(is_tasks_fault=False)
            return verdict

    async def try_out(self, template: Template) -> Verdict:
        """Return the verdict on a chat template. Raise SandboxDiedError or OverloadedError."""
        async with self._sandbox(_OURSELVES) as sandbox:
            return await sandbox.run(template, seconds=self._settings.task_seconds)

    async def aclose(self) -> None:
        """Stop all sandboxes."""
        await self._revivals.cancel()
        for sandbox in self._all:
            await sandbox.stop()

    @contextlib.asynccontextmanager
    async def _sandbox(self, tenant_id: str) -> AsyncIterator["_Sandbox"]:
        await self._turns.take(tenant_id)
        sandbox = self._free.pop()
        began = time.monotonic()
        try:
            yield sandbox
        finally:
            free = partial(self._free_again, sandbox, tenant_id, time.monotonic() - began)
            if sandbox.is_running:
                free()
            else:
                self._revivals.start(self._revive(sandbox, free))

    def _free_again(self, sandbox: "_Sandbox", tenant_id: str, seconds: float) -> None:
        self._free.append(sandbox)
        self._turns.give_back(tenant_id, seconds=seconds)

    @staticmethod
    async def _revive(sandbox: "_Sandbox", free: Callable[[], None]) -> None:
        """Restart a sandbox so that the next structure does not wait for the start."""
        try:
            # The next task retries the start and gets the error.
            with contextlib.suppress(SandboxDiedError, OSError):
                await sandbox.start()
        finally:
            free()


class _Sandbox:
    """One child process. It carries out one order at a time, so only one caller may use it."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._process: Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    async def start(self) -> Process:
        if self._process is None:
            self._process = await self._started()
        return self._process

    async def run(self, order: Order, *, seconds: float) -> Verdict:
        process = await self.start()
        used_before = _cpu_seconds(process.pid)
        try:
            async with asyncio.timeout(seconds):
                await _send(process, messages.encode(order))
                return await _receive(process)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            # A process that exited by itself had reached a limit. So had one that used this much
            # CPU time. Any other process did not get enough CPU time.
            used = _cpu_seconds(process.pid) - used_before
            is_over = (
                not isinstance(error, TimeoutError)
                or used > self._settings.cpu_seconds / _LONG_WORK
            )
            await self.stop()
            raise SandboxDiedError(is_tasks_fault=is_over) from None
        except BaseException:
            # Otherwise its late verdict would be read as the verdict on the next order.
            await self.stop()
            raise

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await kill(process)

    async def _started(self) -> Process:
        settings = self._settings
        bounds = (
            settings.memory_bytes,
            settings.niceness,
            settings.cpu_seconds,
            settings.compile_seconds,
        )
        process = await asyncio.create_subprocess_exec(
            *tethered(sys.executable, "-P", "-m", _PROGRAM, *map(str, bounds)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={},  # A sandbox needs no environment, and parts of it are secret.
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _receive(process)
        except BaseException as error:
            await kill(process)
            if isinstance(error, TimeoutError | asyncio.IncompleteReadError):
                raise SandboxDiedError(is_tasks_fault=False) from None
            raise
        return process


async def _send(process: Process, message: bytes) -> None:
    pipe = not_none(process.stdin)
    pipe.write(messages.LENGTH.pack(len(message)) + message)
    await pipe.drain()


async def _receive(process: Process) -> Verdict:
    pipe = not_none(process.stdout)
    header = await pipe.readexactly(messages.LENGTH.size)
    return messages.decode_verdict(await pipe.readexactly(*messages.LENGTH.unpack(header)))


async def _loaded(source: TokenizerSource) -> Tokenizer:
    return Tokenizer(
        source.digest, await source.fetch(), source.eos_token_ids, source.vocabulary_size
    )


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used; 0 if the process has exited."""
    try:
        # The second field is the program name in parentheses, which may contain blanks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
