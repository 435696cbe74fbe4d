"""Notices about responses, which other gateways send to this one's reply stream."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from contract import keys, messages
from contract.messages import CancelResponse, Follow, Frame, ResponseGrown
from contract.queue import LostJob
from contract.scripts import CommandExecutor


def _drop(_: object) -> None:
    pass


async def _leave_orphan(_model: str, _lost: LostJob) -> bool:
    return False


@dataclass(slots=True)
class ResponseNotices:
    """Handlers of the notices. None of them may raise. Notices are dropped until they are set."""

    on_follow: Callable[[Follow], object] = _drop
    """Another gateway follows a response of this one."""
    on_grown: Callable[[ResponseGrown], object] = _drop
    """A response of another gateway, which this one follows, has grown."""
    on_cancel: Callable[[CancelResponse], object] = _drop
    """Another gateway cancels a response of this one."""
    on_orphan: Callable[[str, LostJob], Awaitable[bool]] = _leave_orphan
    """A job of a dead gateway was lost. Gets its model; returns whether the job is taken over."""

    def publish(self, frame: Frame) -> None:
        """Handle the notices of a frame."""
        for follow in frame.follows:
            self.on_follow(follow)
        for grown in frame.grown:
            self.on_grown(grown)
        for cancel in frame.cancels:
            self.on_cancel(cancel)


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
