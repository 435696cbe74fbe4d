"""Batch hold: steps leave out batch jobs while requests would wait for them.

A first token waits for the step of its prompt, which each further sequence makes longer. In a
burst, longer steps also keep the sequences busy that the next requests wait for. vLLM's scheduler
is private, so this module fits one version of it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

MOST_HELD_STEPS = 8
"""Batch jobs take part in the step after this many that left them out, so that they progress even
if each step has a prompt of a request."""
MOST_REQUESTS_SHARE = 3 / 4
"""Steps leave out batch jobs while requests use more than this share of the sequences."""


class BatchHold:
    """Leaves batch jobs out of some steps of one scheduler of vLLM."""

    def __init__(self) -> None:
        self._held_steps = 0
        self._refused: Any = None
        """The request whose prompt did not begin in the last held step, for lack of memory or of
        time for its mask."""

    @contextmanager
    def of_next_step(self, scheduler: Any) -> Iterator[None]:
        """Leave batch jobs out of the step that is scheduled within this block, if they must wait.

        Args:
            scheduler: vLLM's scheduler with the priority policy: requests have priority 0.
        """
        if not self._must_hold(scheduler):
            self._held_steps = 0
            yield
            return
        self._held_steps += 1
        leave_out(scheduler, [each for each in scheduler.running if each.priority])
        waiting = [each for each in scheduler.waiting if each.priority]
        scheduler.waiting.remove_requests(waiting)
        try:
            yield
        finally:
            self._refused = first_request(scheduler)
            for each in waiting:
                scheduler.waiting.add_request(each)

    def _must_hold(self, scheduler: Any) -> bool:
        if self._held_steps == MOST_HELD_STEPS:
            return False
        first = first_request(scheduler)
        if first is not None and first is not self._refused:
            return True
        requests = [each for each in scheduler.running if not each.priority]
        if any(each.is_prefill_chunk for each in requests):
            return True
        # Batch jobs may use the memory that a refused request waits for.
        most_requests = MOST_REQUESTS_SHARE * scheduler.max_num_running_reqs
        return first is None and len(requests) > most_requests


def leave_out(scheduler: Any, requests: Iterable[Any]) -> None:
    """Leave requests that have begun out of the step that is scheduled next."""
    # Scheduling begins by counting the step.
    after_next = scheduler.current_step + 2
    for each in requests:
        each.next_decode_eligible_step = max(each.next_decode_eligible_step, after_next)


def first_request(scheduler: Any) -> Any:
    """Return the request whose prompt begins next, unless only batch jobs wait."""
    first = next((each for each in scheduler.waiting if not is_compiling(each)), None)
    return None if first is None or first.priority else first


def is_compiling(request: Any) -> bool:
    """Whether a request cannot begin, because its grammar is being compiled."""
    constraint = request.structured_output_request
    return constraint is not None and constraint.grammar is None


def prepare_batch_hold() -> None:
    """Patch this vLLM process, which has one scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler

    hold, schedule = BatchHold(), Scheduler.schedule

    def schedule_with_hold(scheduler: Any, *args: Any, **options: Any) -> Any:
        with hold.of_next_step(scheduler):
            return schedule(scheduler, *args, **options)

    Scheduler.schedule = schedule_with_hold
