"""One client's way to an answer: what it reads, and what becomes of the answer when it stops."""

from typing import Protocol

from typing_extensions import override

from gateway.answers.answers import Answers, Attachment
from gateway.answers.settlement import Account
from gateway.dispatch.generation import Generation
from gateway.stream.completion import Completion


class Reading(Protocol):
    """What streamed and whole answers need of whichever client reads them."""

    completion: Completion
    generation: Generation

    def replied(self) -> None:
        """Replies have come."""

    async def finish(self) -> None:
        """Everything has been read; the client is told the last of it when this returns."""

    def fail(self, error: BaseException) -> None:
        """The client is told that the answer, or its way to it, has failed."""

    def leave(self) -> None:
        """The client has gone before the end."""

    async def aclose(self) -> None:
        """Stop reading, however it went."""


class FirstReading(Reading):
    """That of the client whose request runs: the answer is settled as it ends here."""

    def __init__(
        self, answers: Answers, account: Account, completion: Completion, generation: Generation
    ) -> None:
        self.completion = completion
        self.generation = generation
        self._answers = answers
        self._account = account
        self._has_replied = False

    @override
    def replied(self) -> None:
        if not self._has_replied:
            self._has_replied = True
            self._account.replied()

    @override
    async def finish(self) -> None:
        await self._account.finish()

    @override
    def fail(self, error: BaseException) -> None:
        self._account.fail(error)

    @override
    def leave(self) -> None:
        self._answers.leave(self._account)

    @override
    async def aclose(self) -> None:
        pass


class LaterReading(Reading):
    """That of a client that came back: whatever becomes of the answer is looked after elsewhere."""

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
