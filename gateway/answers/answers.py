"""Answers that clients may come back for: from any gateway, with any gateway dying in between.

An answer has one owner, the gateway that follows its jobs. It writes what it receives into a journal in
Redis; whoever attaches reads from there. If the owner is dead, whoever attaches takes the answer over.
"""

from dataclasses import dataclass
from enum import StrEnum

from gateway.answers.head import AnswerHead
from gateway.answers.settlement import Account
from gateway.dispatch.generation import Generation
from gateway.stream.completion import Completion


class AnswerState(StrEnum):
    """Where an answer is in its life."""

    RUNNING = "running"  # Its jobs wait or run; its owner may be dead.
    FINISHED = "finished"
    FAILED = "failed"  # It ended with an error, which reading it tells.
    CANCELLED = "cancelled"  # It was asked to end.
    LEFT = "left"  # Everybody who had read it went away; it goes on when somebody attaches.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer as it stood when it was looked up."""

    head: AnswerHead
    state: AnswerState
    has_begun: bool
    """Whether a worker has told anything of it."""
    owner: str
    """The gateway that follows its jobs, or did so last."""
    term: int
    """Number of its owner, counted from 1: each taking over is one more."""

    @property
    def id(self) -> str:
        """The request's id, which is also the completion's."""
        return self.head.request_id


class Attachment:
    """Somebody who reads an answer: everything from its beginning, then what comes."""

    completion: Completion
    generation: Generation
    """Hands the same replies over, in the same order, as the one that the answer began with.

    It does not overflow: a slow reader just reads later.
    """

    async def aclose(self) -> None:
        """Stop reading. An answer that nobody reads any more is ended, unless it is a background one."""
        raise NotImplementedError


class Answers:
    """All answers that one gateway process owns, and its way to those of others."""

    def open(self, head: AnswerHead, account: Account) -> None:
        """Keep an answer from now on, before its jobs are enqueued. Does not wait for Redis.

        Plain whole answers are never opened, and every method takes them all the same. The answer ends
        with its account: nobody has to tell.
        """
        raise NotImplementedError

    def discard(self, request_id: str) -> None:
        """Forget an answer whose jobs were not enqueued; no more than that if it is not known."""
        raise NotImplementedError

    async def find(self, request_id: str, *, tenant_id: str) -> Answer | None:
        """Return a tenant's answer; None if it is unknown, expired or another tenant's.

        Raises RedisError.
        """
        raise NotImplementedError

    async def attach(self, answer: Answer) -> Attachment:
        """Read an answer from its beginning, and keep it running as long as that lasts.

        One whose owner is dead is taken over, one that everybody left goes on. A reader of one that failed
        or was cancelled gets what there is, and then the failure. Close the attachment in the end.

        Raises RateLimitError or InsufficientQuotaError if it can only go on with a new reservation that the
        limits do not allow, StoreUnavailableError or RedisError while Redis does not answer.
        """
        raise NotImplementedError

    async def cancel(self, answer: Answer) -> Answer:
        """End an answer, whoever reads it; return it as it stands then. One that has ended stays as it is.

        Raises RedisError.
        """
        raise NotImplementedError

    def leave(self, account: Account) -> None:
        """Note that whoever began a request waits for it no longer, whatever kind of answer it has.

        If nobody else does, its work stops and it is settled as cancelled; else it goes on by itself.
        To run a background answer without a client, leave it as soon as its jobs are enqueued.
        """
        raise NotImplementedError
