"""Lua scripts of the queue: one file for each state transition, loaded once and run by digest.

Each file starts with its contract: purpose, KEYS, ARGV, output. Files whose names start with `_`
have functions that several scripts include. Times are those of the Redis server. A change that is
incompatible with older processes needs a new file, so that both can run during a rolling update.
"""

import hashlib
import re
from collections.abc import Awaitable, Iterable
from importlib import resources
from typing import Any, ClassVar, Protocol

from redis.exceptions import NoScriptError

from common.redis_cluster import ABSENT

Argument = str | bytes | int | float
_WITHOUT_ABSENT_KEY = (
    f"if string.sub(KEYS[#KEYS] or '', -{len(ABSENT)}) == '{ABSENT}' then KEYS[#KEYS] = nil end\n"
)
"""Before the first line of each script: see `common.redis_cluster.with_absent_key`."""


class CommandExecutor(Protocol):
    """Sends single commands to Redis: a client, or a connection that many tasks share."""

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[Any]:
        """Send one command and return its raw reply."""


class LuaScript:
    """A Lua file of a package, with the files that it includes.

    It names its keys and arguments in `local a, b = unpack(KEYS, 1, 2)`, and so do its callers.
    """

    names: ClassVar[dict[str, str]] = {}
    """Digest -> name, for every script of this process."""

    def __init__(self, name: str, package: str = __name__) -> None:
        self.name = name
        self.source = (_WITHOUT_ABSENT_KEY + _source(name, package, set())).encode()
        # Redis identifies scripts by SHA-1; no security depends on it.
        self.digest = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self.names[self.digest] = name
        self._keys, self._arguments = (self._named(each) for each in (b"KEYS", b"ARGV"))
        self._names = {*self._keys, *self._arguments}

    async def run(
        self,
        executor: CommandExecutor,
        *,
        keys: Iterable[str] = (),
        arguments: Iterable[Argument] = (),
        **named: Argument,
    ) -> Any:
        """Run the script; send its source only if the server has not loaded it yet.

        Args:
            executor: what sends the command.
            keys: keys after the named ones.
            arguments: arguments after the named ones.
            named: keys and arguments by the names in the script.
        """
        if named.keys() != self._names:
            raise TypeError(f"{self.name} takes {sorted(self._names)}, not {sorted(named)}")
        all_keys = [*[named[each] for each in self._keys], *keys]
        parameters = (
            len(all_keys),
            *all_keys,
            *[named[each] for each in self._arguments],
            *arguments,
        )
        try:
            return await executor.execute_command("EVALSHA", self.digest, *parameters)
        except NoScriptError:
            return await executor.execute_command("EVAL", self.source, *parameters)

    def _named(self, table: bytes) -> list[str]:
        """Return the names that the script gives to the first entries of a table."""
        found = re.search(
            rb"^local ([\w,\s]+) =\s+unpack\(\s*%s, 1, (\d+)\)" % table, self.source, re.MULTILINE
        )
        names = [each.strip() for each in found[1].decode().split(",")] if found else []
        if found and len(names) != int(found[2]):
            raise ValueError(f"{self.name} unpacks {int(found[2])} of {table!r} into {names}")
        return names


def _source(name: str, package: str, included: set[str]) -> str:
    """Return a Lua file with those in place of its `@include` lines that are not included yet.

    A file that the package lacks is one of this package.
    """

    def replace(include: re.Match[str]) -> str:
        if include[1] in included:
            return ""
        included.add(include[1])
        return _source(f"_{include[1]}", package, included)

    file = resources.files(package).joinpath(f"{name}.lua")
    if not file.is_file():
        file = resources.files(__name__).joinpath(f"{name}.lua")
    return re.sub(r"^-- @include (\w+)\n", replace, file.read_text(), flags=re.MULTILINE)
