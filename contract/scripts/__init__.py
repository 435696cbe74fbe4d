"""Lua scripts of the queue: one file for each state transition, loaded once and run by digest.

Each file starts with its contract: purpose, KEYS, ARGV, output. Times are those of the Redis
server. A change that is incompatible with older processes needs a new file, so that both can run
during a rolling update.
"""

import hashlib
from collections.abc import Awaitable, Sequence
from importlib import resources
from typing import Any, ClassVar, Protocol

from redis.exceptions import NoScriptError

Argument = str | bytes | int | float


class CommandExecutor(Protocol):
    """Sends single commands to Redis: a client, or a connection that many tasks share."""

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[Any]:
        """Send one command and return its raw reply."""


class LuaScript:
    """A Lua file of a package, by default this one; `prelude` names a file to prepend."""

    names: ClassVar[dict[str, str]] = {}
    """Digest -> name, for every script of this process."""

    def __init__(self, name: str, package: str = __name__, *, prelude: str | None = None) -> None:
        self.name = name
        files = [f"{each}.lua" for each in (prelude, name) if each is not None]
        self.source = b"\n".join(
            resources.files(package).joinpath(file).read_bytes() for file in files
        )
        # Redis identifies scripts by SHA-1; no security depends on it.
        self.digest = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self.names[self.digest] = name

    async def run(
        self, executor: CommandExecutor, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> Any:
        """Run the script; send its source only if the server has not loaded it yet."""
        parameters = (len(keys), *keys, *arguments)
        try:
            return await executor.execute_command("EVALSHA", self.digest, *parameters)
        except NoScriptError:
            return await executor.execute_command("EVAL", self.source, *parameters)
