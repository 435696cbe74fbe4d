"""Lua scripts of the queue: one file for each state transition, loaded once and run by digest.

Each file opens with its contract: purpose, KEYS, ARGV, output. Time is the Redis server's. A change that
an older process could not understand becomes a new file, so that both can run during a roll-out.
"""

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any, ClassVar, Protocol

from redis.exceptions import NoScriptError

Argument = str | bytes | int | float


class CommandExecutor(Protocol):
    """Whatever sends one command to Redis: a client, or something that gathers commands into pipelines."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command and return its raw reply."""


class LuaScript:
    """One Lua file of a package, of this one unless another is named; after a prelude, if it needs one."""

    names: ClassVar[dict[str, str]] = {}
    """Digest -> name of every script of this process."""

    def __init__(self, name: str, package: str = __name__, *, prelude: str | None = None) -> None:
        self.name = name
        files = [f"{each}.lua" for each in (prelude, name) if each is not None]
        self.source = b"\n".join(
            resources.files(package).joinpath(file).read_bytes() for file in files
        )
        # Redis names scripts by SHA-1; nothing here depends on its strength.
        self.digest = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self.names[self.digest] = name

    async def run(
        self, executor: CommandExecutor, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> Any:
        """Run the script, sending its source only to a server that does not know it yet."""
        parameters = (len(keys), *keys, *arguments)
        try:
            return await executor.execute_command("EVALSHA", self.digest, *parameters)
        except NoScriptError:
            return await executor.execute_command("EVAL", self.source, *parameters)
