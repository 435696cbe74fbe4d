"""Notices about responses, which other gateways send to this one's reply stream."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from contract import keys, messages
from contract.messages import CancelResponse, Follow, Frame, ResponseGrown
from contract.queue import LostJob
from contract.scripts import CommandExecutor


@dataclass(frozen=True, slots=True)
class ResponseCallbacks:
    """Handlers of the notices. None of them may raise."""

    on_follow: Callable[[Follow], None]
    """Another gateway follows a response of this one."""
    on_grown: Callable[[ResponseGrown], None]
    """A response of another gateway, which this one follows, has grown."""
    on_cancel: Callable[[CancelResponse], None]
    """Another gateway cancels a response of this one."""
    on_orphan: Callable[[str, LostJob], Awaitable[bool]]
    """A job of a dead gateway was lost. Gets its model; returns whether the job is taken over."""


class ResponseNotices:
    """Passes notices to the handlers, once there are any. Earlier notices are dropped."""

    def __init__(self) -> None:
        self._callbacks: ResponseCallbacks | None = None

    def subscribe(self, callbacks: ResponseCallbacks) -> None:
        """Set the handlers."""
        self._callbacks = callbacks

    def publish(self, frame: Frame) -> None:
        """Handle the notices of a frame."""
        if (callbacks := self._callbacks) is None:
            return
        for follow in frame.follows:
            callbacks.on_follow(follow)
        for grown in frame.grown:
            callbacks.on_grown(grown)
        for cancel in frame.cancels:
            callbacks.on_cancel(cancel)

    async def offer_orphan(self, model: str, lost: LostJob) -> bool:
        """Offer a lost job of a dead gateway. Return whether it is taken over."""
        return self._callbacks is not None and await self._callbacks.on_orphan(model, lost)


async def send_notices(
    executor: CommandExecutor, gateway: str, *, sender: str, **notices: Any
) -> None:
    """Send notices, the fields of a `Frame`, to a gateway. Raises RedisError."""
    frame = messages.encode(Frame(sender, 0, **notices))
    stream, execute = keys.replies(gateway), executor.execute_command
    await asyncio.gather(
        execute("XADD", stream, "*", "f", frame),
        # A dead gateway would never remove the notice.
        execute("EXPIRE", stream, keys.REPLIES_SECONDS),
    )
