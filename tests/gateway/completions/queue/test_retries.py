"""Retry limits: a job is not retried on each worker for ever."""

from contract.outcomes import FailureCode
from gateway.completions.queue.ticket import MAX_ADAPTER_FAILURES, RetryBudget


def test_adapter_that_no_worker_can_get_ends_the_job() -> None:
    budget = RetryBudget()
    codes = [
        budget.spend("adapter_failed", has_progressed=False) for _ in range(MAX_ADAPTER_FAILURES)
    ]
    assert codes == [None] * (MAX_ADAPTER_FAILURES - 1) + [FailureCode.ADAPTER_FAILED]
    # The files may be missing on the worker only, so the job is no suspect.
    assert not budget.is_suspect
