"""Other gateways: whether they are alive, and notices to them about responses."""

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

from common.tasks import TaskSet, tolerating_outage
from contract import keys
from contract.messages import ResponseGrown
from contract.scripts import CommandExecutor
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.notices import send_notices


@dataclass(eq=False)
class Peers:
    """Sends and receives notices that a response has grown, and sends all other notices."""

    _executor: CommandExecutor
    _dispatcher: Dispatcher
    _tasks: TaskSet

    def __post_init__(self) -> None:
        self._handles = itertools.count(1)
        self._readers: dict[int, asyncio.Event] = {}

    def add_reader(self, grown: asyncio.Event) -> int:
        """Return the handle of a reader here, whose event is set when its response has grown."""
        handle = next(self._handles)
        self._readers[handle] = grown
        return handle

    def remove_reader(self, handle: int) -> None:
        """Remove a reader that was closed."""
        self._readers.pop(handle, None)

    def notify_reader(self, gateway: str, handle: int) -> None:
        """Notify a reader of any gateway that its response has grown."""
        if gateway != self._dispatcher.gateway:
            self.send(gateway, grown=[ResponseGrown(handle)])
        elif (grown := self._readers.get(handle)) is not None:
            grown.set()

    def send(self, gateway: str, **notices: Any) -> None:
        """Send notices to another gateway. Lost notices are requested or sent again."""
        self._tasks.start(self._send(gateway, notices))

    async def is_alive(self, gateway: str) -> bool:
        """Whether another gateway is alive, or may be as far as is known. Raises RedisError."""
        dispatcher = self._dispatcher
        if gateway == dispatcher.gateway:
            return False  # This gateway would list the response in `OwnedResponses`.
        if not (dispatcher.presence.is_steady and dispatcher.presence.may_judge_others()):
            # After an outage, other gateways may not have sent a heartbeat yet.
            return True
        return bool(await self._executor.execute_command("EXISTS", keys.gateway_alive(gateway)))

    async def _send(self, gateway: str, notices: dict[str, Any]) -> None:
        with tolerating_outage(f"notify gateway {gateway}"):
            await send_notices(self._executor, gateway, sender=self._dispatcher.gateway, **notices)
