"""Retry limits: whether a job may run again after a failed attempt."""

from typing import Final

import msgspec

from contract.outcomes import FailureCode
from gateway.telemetry import LossReason

MAX_LOSSES = 5
"""Consecutive attempts that may be lost without a token; the job fails with the last of them."""
MAX_ENGINE_DEATHS = 2
"""Engines that may die while running a job; the job fails with the last of them."""
MAX_ADAPTER_FAILURES = 3
"""Workers that may fail to get the files of a job's adapter; the job fails with the last of
them."""
MAX_REVIVALS = 5
"""Revivals without a token in between; the job fails at the next one."""
MAX_MISSED_COMPLETIONS = 2
"""Checks that may find a completed job without its final reply; the last one revives the job."""

REVIVALS: Final[frozenset[LossReason]] = frozenset({"adopted", "forgotten", "replies_lost"})
"""Reasons for which a job is enqueued again whatever Redis stores about it."""


class RetryBudget(msgspec.Struct):
    """The failed attempts of one job, counted against their limits."""

    losses: int = 0
    """Attempts whose lease expired since the last one that produced a token."""
    engine_deaths: int = 0
    """Engines that died while running the job, since the last attempt that produced a token."""
    revivals: int = 0
    """Revivals since the last token."""
    adapter_failures: int = 0
    """Workers that could not get the files of its adapter."""
    missed_completions: int = 0
    """Checks of this attempt that found the job completed without its final reply."""
    _losses_before: int = 0
    """`losses` before the last attempt was counted."""

    @property
    def is_suspect(self) -> bool:
        """Whether the job may be what kills its workers."""
        return bool(self.engine_deaths or self.losses)

    def spend(self, reason: LossReason, *, has_progressed: bool) -> FailureCode | None:
        """Count an attempt that is over. Return the code with which the job fails, if it must.

        `has_progressed` is whether the attempt produced a token.
        """
        self.missed_completions = 0
        self._losses_before = self.losses
        if has_progressed:
            self.losses = 0
        elif reason == "lease_expired":
            self.losses += 1
            if self.losses >= MAX_LOSSES:
                return FailureCode.WORKER_LOST
        if reason == "engine_died":
            self.engine_deaths += 1
            if self.engine_deaths >= MAX_ENGINE_DEATHS:
                return FailureCode.POISONOUS
        elif reason == "adapter_failed":
            self.adapter_failures += 1
            if self.adapter_failures >= MAX_ADAPTER_FAILURES:
                return FailureCode.ADAPTER_FAILED
        elif reason in REVIVALS:
            self.revivals += 1
            if self.revivals > MAX_REVIVALS:
                return FailureCode.REPLIES_LOST
        return None

    def refund_loss(self) -> None:
        """Do not count the last attempt as lost: it was not over."""
        self.losses = self._losses_before

    def miss_completion(self) -> bool:
        """Count a completion without its final reply. Return whether the reply counts as lost."""
        self.missed_completions += 1
        return self.missed_completions >= MAX_MISSED_COMPLETIONS
