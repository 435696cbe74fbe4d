"""A client's subscription to a response, and what happens to the response when it ends."""

import asyncio
from dataclasses import dataclass

from typing_extensions import override

from gateway.completions.queue.generation import Generation
from gateway.completions.rendering.completion import Completion
from gateway.completions.settlement import Settlement
from gateway.completions.stored.reader import ResponseReader
from gateway.completions.stored.service import Responses
from gateway.records.usage_record import Outcome


@dataclass(eq=False)
class Subscription:
    """Subscription of a client whose end has no effect on the response."""

    completion: Completion
    generation: Generation

    def replied(self) -> None:
        """Record that replies have arrived."""

    async def finish(self, whole: bytes) -> None:
        """Record that everything has been read. The client gets the last part afterwards.

        `whole` is the whole response, which streams of some forms do not have.
        """

    def fail(self, error: BaseException) -> None:
        """Record that the response, or its delivery, has failed; the client gets the error."""

    def leave(self) -> None:
        """Record that the client disconnected before the end."""

    async def aclose(self) -> None:
        """Stop reading, whatever the outcome, even if the caller is cancelled."""


@dataclass(eq=False)
class InitialSubscription(Subscription):
    """Subscription of the client that started the request; its end settles the response."""

    _responses: Responses
    _settlement: Settlement

    @override
    def replied(self) -> None:
        self._settlement.replied()

    @override
    async def finish(self, whole: bytes) -> None:
        # Settling does not wait for the file store.
        keeping = self._responses.kept.finish(self.completion, whole)
        settlement, ended = self._settlement, self._responses.of(self._settlement)
        if ended is settlement:
            # Stored responses are logged by whoever ends them.
            logs, record = self._responses.logs, settlement.record
            logs.end(record, self.completion, Outcome.FINISHED, response=whole)
        ending = ended.finish()
        await (ending if keeping is None else asyncio.gather(ending, keeping))

    @override
    def fail(self, error: BaseException) -> None:
        self._responses.of(self._settlement).fail(error)

    @override
    def leave(self) -> None:
        self._responses.of(self._settlement).leave()


class StoredSubscription(Subscription):
    """Subscription of a client that reads a stored response, which is settled elsewhere."""

    def __init__(self, reader: ResponseReader) -> None:
        super().__init__(reader.completion, reader.generation)
        self._reader = reader

    @override
    async def aclose(self) -> None:
        await asyncio.shield(self._reader.aclose())
