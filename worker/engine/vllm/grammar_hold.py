"""Grammar hold: steps leave out sequences whose grammars would make them too long.

Before a step samples, vLLM fills the mask of each grammar, one after the other. A mask may take
20 ms, so the grammars of one tenant could delay the first tokens of all others by a second. vLLM's
scheduler is private, so this module fits one version of it.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from worker.engine.vllm.batch_hold import leave_out
from worker.engine.vllm.prompt_turns import tenant_of

Fill = Callable[[Any, Any, int], None]

MOST_MASK_SECONDS = 0.010
"""Time for the masks of a step; the last mask that begins in it may exceed it."""
MASKS_SHARE = 1 / 3
"""Most of a step that masks take on CPUs. On GPUs, vLLM fills them while the model runs."""
FIRST_MASK_SECONDS = 0.001
"""Estimate for a grammar that has no mask yet."""
MOST_BEGINNING = 4
"""Tenants of which a sequence begins in a step that has no time for its mask."""


class GrammarHold:
    """Shares the mask time of the steps of one scheduler of vLLM among its tenants."""

    def __init__(self, *, is_cpu: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_cpu = is_cpu
        self._clock = clock
        self._began_at = 0.0
        """When the last step began."""
        self._seconds_left = 0.0
        self._beginning = set[str]()
        self._held = set[str]()
        """Tenants whose grammars the last step left out for another tenant's first token."""

    def begin_step(self, scheduler: Any) -> None:
        """Leave sequences out of the step that is scheduled next, if they must wait.

        Requests go before batch jobs, then tenants take turns, and so do sequences of a tenant.
        On CPUs, where a prompt without a grammar begins, the grammars of tenants with more
        sequences wait for a step, but never for two in a row.
        """
        now, began_at = self._clock(), self._began_at
        self._began_at, self._beginning = now, set()
        most = MOST_MASK_SECONDS
        # Without running sequences the engine was idle.
        if self._is_cpu and scheduler.running:
            most = min(max(MASKS_SHARE * (now - began_at), FIRST_MASK_SECONDS), most)
        self._seconds_left = most
        constrained = [
            each
            for each in scheduler.running
            if each.use_structured_output and not each.is_prefill_chunk
        ]
        if not constrained:
            self._held = set()
            return
        prompts = {
            tenant_of(each)
            for each in scheduler.waiting
            if not (each.use_structured_output or each.priority)
        }
        constrained.sort(key=lambda each: getattr(_grammar(each), "filled_at", 0.0))
        turns = Counter[str]()

        def turn(request: Any) -> tuple[int, int]:
            tenant = tenant_of(request)
            turns[tenant] += 1
            return request.priority, turns[tenant]

        sequences = Counter(map(tenant_of, scheduler.running))
        least = min((sequences[each] for each in prompts), default=len(scheduler.running))
        holds = self._is_cpu and not self._held
        self._held = {each for each, number in sequences.items() if holds and number > least}
        ordered = sorted(constrained, key=turn)
        leave_out(
            scheduler,
            [each for each in ordered if tenant_of(each) in self._held or not self._takes(each)],
        )

    def may_begin(self, request: Any) -> bool:
        """Whether a sequence whose grammar is compiled may begin in the step being scheduled.

        One of each tenant may, so that the sequences that run, or wait before it, do not keep it
        from beginning.
        """
        tenant, beginning = tenant_of(request), self._beginning
        if tenant in self._held:
            return False
        is_first = tenant not in beginning and len(beginning) < MOST_BEGINNING
        may_begin = self._takes(request) or is_first
        if may_begin:
            beginning.add(tenant)
        return may_begin

    def _takes(self, request: Any) -> bool:
        if self._seconds_left <= 0:
            return False
        self._seconds_left -= getattr(_grammar(request), "mask_seconds", FIRST_MASK_SECONDS)
        return True


def _grammar(request: Any) -> Any:
    return request.structured_output_request.grammar


def prepare_grammar_hold() -> None:
    """Patch this vLLM process, which has one scheduler."""
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

    hold, schedule = GrammarHold(is_cpu=current_platform.is_cpu()), Scheduler.schedule
    unblock = Scheduler._handle_blocked_waiting_request

    def schedule_with_hold(scheduler: Any, *args: Any, **options: Any) -> Any:
        hold.begin_step(scheduler)
        return schedule(scheduler, *args, **options)

    def unblock_with_hold(scheduler: Any, request: Any) -> bool:
        waits = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_unblocked: bool = unblock(scheduler, request)
        if is_unblocked and waits and not hold.may_begin(request):
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            return False
        return is_unblocked

    GuidanceGrammar.fill_bitmask = timed(GuidanceGrammar.fill_bitmask)
    Scheduler.schedule = schedule_with_hold
    Scheduler._handle_blocked_waiting_request = unblock_with_hold


def timed(fill: Fill) -> Fill:
    """Return a function that fills a mask and notes in its grammar when, and how long it took."""

    def fill_bitmask(grammar: Any, bitmask: Any, index: int) -> None:
        began = time.monotonic()
        fill(grammar, bitmask, index)
        grammar.filled_at = time.monotonic()
        seconds, earlier = grammar.filled_at - began, getattr(grammar, "mask_seconds", 0.0)
        # The time changes from one token to the next, so a short one alone proves little.
        grammar.mask_seconds = max(seconds, (seconds + earlier) / 2)

    return fill_bitmask
