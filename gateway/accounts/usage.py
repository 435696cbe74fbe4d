"""What is known of one admitted request when it has ended: one record each, whatever happened."""

from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from contract.tier import ServiceTier
from gateway.accounts.limits import LimitScope

MICRO: Final = 1_000_000
"""Tokens that a price is for, and micro-dollars in a dollar."""


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"  # Its client went away, or did not read.
    TIMED_OUT = "timed_out"  # It took longer than it may.
    FAILED = "failed"  # It ended with an error.
    LOST = "lost"  # Its gateway died.


class Counts(NamedTuple):
    """Tokens of a request, over all of its jobs."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens."""
    completion_tokens: int = 0


class UsageRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request's usage, with the engine's counts and the price that applied when it was admitted.

    It travels as msgpack through Redis; fields may only be added, with defaults.
    """

    request_id: str
    """That of a request which went on after it was settled ends with a point and a number."""
    tenant_id: str
    project_id: str | None
    credential_id: str
    """Id of the API key, or `jwt:` and the token's subject."""
    model: str
    endpoint: str
    dialect: str
    service_tier: ServiceTier = ServiceTier.DEFAULT
    is_streamed: bool = False
    is_prepaid: bool = False
    """Whether the cost is taken from the tenant's credits."""
    gateway: str = ""
    jobs: int = 1
    """Prompts of the request: see `job_ids`."""
    prompt_price: int = 0
    """Micro-dollars per million tokens, as are the other prices."""
    cached_price: int = 0
    completion_price: int = 0
    created_ms: int = 0
    """Unix time of the admission, by Redis' clock."""
    ended_ms: int = 0
    outcome: Outcome = Outcome.LOST
    code: str = ""
    """Code of the error that ended the request; empty without one."""
    prompt_tokens: int = 0
    """In the draft of a request that goes on, like the next two, what it was settled with before."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    free_prompt_tokens: int = 0
    """Of the tokens above, those that the tenant does not pay for, because the operator's fault ended their job."""
    free_cached_tokens: int = 0
    free_completion_tokens: int = 0
    cost_micros: int = 0
    first_token_ms: int = 0
    """Milliseconds from the admission to the first reply of a worker; 0 if there was none."""

    @property
    def job_ids(self) -> list[str]:
        """Ids of the request's jobs, one for each prompt."""
        first_id = self.request_id.partition(".")[0]
        return [f"{first_id}-{index}" for index in range(self.jobs)]

    def used(
        self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int
    ) -> "UsageRecord":
        """Return the record of a draft whose jobs came to these tokens in all."""
        return msgspec.structs.replace(
            self,
            prompt_tokens=max(prompt_tokens - self.prompt_tokens, 0),
            cached_tokens=max(cached_tokens - self.cached_tokens, 0),
            completion_tokens=max(completion_tokens - self.completion_tokens, 0),
        )

    def id_of(self, scope: LimitScope) -> str | None:
        """Return whose limits the request met: its key's (or token's), project's or tenant's id."""
        match scope:
            case LimitScope.TENANT:
                return self.tenant_id
            case LimitScope.PROJECT:
                return self.project_id
            case LimitScope.KEY:
                return self.credential_id

    def cost_of(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Return what so many tokens cost in micro-dollars, rounded up once."""
        cost = (
            (prompt_tokens - cached_tokens) * self.prompt_price
            + cached_tokens * self.cached_price
            + completion_tokens * self.completion_price
        )
        return -(-cost // MICRO)

    def priced(self, *, free: Counts) -> "UsageRecord":
        """Return the record with the cost of its tokens, but for so many of them."""
        own = Counts(self.prompt_tokens, self.cached_tokens, self.completion_tokens)
        # Of a request that was continued after a settlement, free ones may be among those settled before.
        free = Counts(*map(min, own, free))
        paid = Counts(*(tokens - less for tokens, less in zip(own, free, strict=True)))
        return msgspec.structs.replace(
            self,
            free_prompt_tokens=free.prompt_tokens,
            free_cached_tokens=free.cached_tokens,
            free_completion_tokens=free.completion_tokens,
            cost_micros=self.cost_of(**paid._asdict()),
        )


encode_usage = msgspec.msgpack.Encoder().encode
decode_usage = msgspec.msgpack.Decoder(UsageRecord).decode


def readable_usage(content: bytes | None) -> UsageRecord | None:
    """Return the record that was written; None if it cannot be read."""
    try:
        return None if content is None else decode_usage(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
