"""A client's subscription to a response, and what happens to the response when it ends."""

from typing import Protocol

from typing_extensions import override

from gateway.dispatch.generation import Generation
from gateway.responses.service import Attachment, Responses
from gateway.responses.settlement import Settlement
from gateway.stream.completion import Completion


class Reading(Protocol):
    """The interface between a client's connection and the response that it reads."""

    completion: Completion
    generation: Generation

    def replied(self) -> None:
        """Record that replies have arrived."""

    async def finish(self) -> None:
        """Record that everything has been read; the client gets the last part when this returns."""

    def fail(self, error: BaseException) -> None:
        """Record that the response, or its delivery, has failed; the client gets the error."""

    def leave(self) -> None:
        """Record that the client disconnected before the end."""

    async def aclose(self) -> None:
        """Stop reading, whatever the outcome."""


class FirstReading(Reading):
    """Subscription of the client that started the request; its end settles the response."""

    def __init__(
        self,
        responses: Responses,
        settlement: Settlement,
        completion: Completion,
        generation: Generation,
    ) -> None:
        self.completion = completion
        self.generation = generation
        self._responses = responses
        self._settlement = settlement
        self._has_replied = False

    @override
    def replied(self) -> None:
        if not self._has_replied:
            self._has_replied = True
            self._settlement.replied()

    @override
    async def finish(self) -> None:
        await self._settlement.finish()

    @override
    def fail(self, error: BaseException) -> None:
        self._settlement.fail(error)

    @override
    def leave(self) -> None:
        self._responses.leave(self._settlement)

    @override
    async def aclose(self) -> None:
        pass


class LaterReading(Reading):
    """Subscription of a client that reads a kept response, whose settlement happens elsewhere."""

    def __init__(self, attachment: Attachment) -> None:
        self.completion = attachment.completion
        self.generation = attachment.generation
        self._attachment = attachment

    @override
    def replied(self) -> None:
        pass

    @override
    async def finish(self) -> None:
        pass

    @override
    def fail(self, error: BaseException) -> None:
        pass

    @override
    def leave(self) -> None:
        pass

    @override
    async def aclose(self) -> None:
        await self._attachment.aclose()
