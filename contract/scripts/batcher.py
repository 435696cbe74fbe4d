"""Calls of one iteration of the event loop that share one run of a script."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from redis.exceptions import RedisError, ResponseError

from common.tasks import TaskSet

KeyT = TypeVar("KeyT", bound=Hashable)
ItemT = TypeVar("ItemT")
ReplyT = TypeVar("ReplyT")


class ScriptBatcher(Generic[KeyT, ItemT, ReplyT]):
    """Runs the items of equal keys together, in the order in which they were added.

    An item whose caller is cancelled before the run is left out. If the script itself or the
    encoding of an item fails, each item runs alone, so that one fails no other.
    """

    def __init__(
        self, run: Callable[[KeyT, Sequence[ItemT]], Awaitable[Sequence[ReplyT]]], *, most: int
    ) -> None:
        """Pass `run` a key and at most `most` items; it returns their replies in order."""
        self._run = run
        self._most = most
        self._waiting: dict[KeyT, list[tuple[ItemT, asyncio.Future[ReplyT]]]] = {}
        self._tasks = TaskSet()

    def add(self, key: KeyT, item: ItemT) -> "asyncio.Future[ReplyT]":
        """Return the future reply of an item. It raises what the run raises."""
        reply: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = []
            self._tasks.start(self._begin(key))
        waiting.append((item, reply))
        return reply

    async def _begin(self, key: KeyT) -> None:
        items = [each for each in self._waiting.pop(key) if not each[1].done()]
        parts = [items[start : start + self._most] for start in range(0, len(items), self._most)]
        if len(parts) == 1:
            await self._finish(key, parts[0])
        else:
            await asyncio.gather(*(self._finish(key, each) for each in parts))

    async def _finish(self, key: KeyT, items: list[tuple[ItemT, "asyncio.Future[ReplyT]"]]) -> None:
        try:
            replies = await self._run(key, [item for item, _ in items])
        except Exception as error:
            # Errors of the connection or of the server, such as no memory, are those of all items.
            is_of_all = isinstance(error, RedisError | OSError) and type(error) is not ResponseError
            if len(items) > 1 and not is_of_all:
                await asyncio.gather(*(self._finish(key, [each]) for each in items))
                return
            for _, future in items:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), reply in zip(items, replies, strict=True):
            if not future.done():
                future.set_result(reply)
