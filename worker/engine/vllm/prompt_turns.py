"""Prompt turns: the prompts of one tenant do not wait for those of another.

vLLM processes prompts in the order in which they arrive. A tenant that sends a hundred prompts, or
one of 100,000 tokens, would delay the first tokens of all others until they are processed. Here the
order is that in which the prompts would end if the waiting tenants shared the engine by weight:
fair queueing with the starting potential (Stiliadis and Varma, 1996). A long prompt that has begun
lets steps process others that would end before. vLLM's scheduler is private, so this module fits
one version of it.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from worker.engine.vllm.batch_hold import first_request, leave_out

SEQUENCE_TOKENS: Final = 16
"""What a sequence costs, in tokens, in addition to those of its prompt that are not cached."""
_MOST_ENDS: Final = 1_024


def payer(tenant: str, weight: float) -> str:
    """Return the session of vLLM that identifies a tenant and its weight in the engine core."""
    return f"{weight} {tenant}"


def tenant_of(request: Any) -> str:
    """Return the tenant of a request in the engine core. Its cache salt may be a client's."""
    return (request.session_id or "").partition(" ")[2]


@dataclass(frozen=True, slots=True)
class _Turn:
    cost: float
    """Tokens, with those of SEQUENCE_TOKENS."""
    weight: float


@dataclass(slots=True)
class _Clock:
    """The virtual time of the requests with one priority."""

    now: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    """The turns of the tenants' last requests."""
    _step: int = -1
    """The step in which the time was read."""

    def read(self, scheduler: Any, priority: int) -> None:
        """Set the time to that of the prompt which is behind all others."""
        if self._step == scheduler.current_step:
            return
        self._step = scheduler.current_step
        reached = [
            _reached(each)
            for each in scheduler.requests.values()
            if each.priority == priority and (each.is_prefill_chunk or not each.num_computed_tokens)
        ]
        self.now = max(self.now, min(reached) if reached else max(self.ends.values(), default=0.0))
        if len(self.ends) >= _MOST_ENDS:
            self.ends = {each: end for each, end in self.ends.items() if end > self.now}


class PromptTurns:
    """Orders the prompts of one scheduler of vLLM, which has the priority policy.

    In place of the arrival time, which only orders requests, a request gets its turn: the virtual
    time at which its prompt ends. Virtual time is measured in tokens of a tenant with weight 1.
    """

    def __init__(self) -> None:
        self._clocks = defaultdict[int, _Clock](_Clock)
        """By priority."""
        self._last_prompt: Any = None
        """The hash of the last prompt that arrived."""
        self._refused: Any = None
        """The request that did not begin in a step that left out prompts for it, for lack of
        memory or of its grammar."""

    def arrive(self, scheduler: Any, request: Any) -> None:
        """Give a new request its turn."""
        weight = float((request.session_id or "1").partition(" ")[0])
        request.turn = turn = _Turn(self._cost(scheduler, request), weight)
        clock, tenant = self._clocks[request.priority], tenant_of(request)
        clock.read(scheduler, request.priority)
        begin = max(clock.ends.get(tenant, 0.0), clock.now)
        clock.ends[tenant] = request.arrival_time = begin + turn.cost / weight

    @contextmanager
    def of_next_step(self, scheduler: Any) -> Iterator[None]:
        """Let prompts that have begun wait for others in the step scheduled within this block.

        vLLM would continue them first. The first of them gets what the others leave of the step.
        """
        begun = [each for each in scheduler.running if each.is_prefill_chunk and not each.priority]
        if not begun:
            yield
            return
        begun.sort(key=lambda each: each.arrival_time)
        first, refused = first_request(scheduler), self._refused
        self._refused = None
        if first is None or first is refused or first.arrival_time >= begun[0].arrival_time:
            leave_out(scheduler, begun[1:])
            yield
            return
        end = begun[0].arrival_time
        costs = [
            each.turn.cost
            for each in scheduler.waiting
            if not each.priority and each.arrival_time < end
        ]
        left = int(scheduler.max_num_scheduled_tokens - len(scheduler.running) - sum(costs))
        has_room = left >= max(costs)
        leave_out(scheduler, begun[has_room:])
        config = scheduler.scheduler_config
        threshold = config.long_prefill_token_threshold
        if has_room:
            config.long_prefill_token_threshold = min(threshold or left, left)
        try:
            yield
        finally:
            config.long_prefill_token_threshold = threshold
            self._refused = first if first is first_request(scheduler) else None

    def _cost(self, scheduler: Any, request: Any) -> float:
        """Return the tokens to process. A job's further sequences find the prompt in the cache."""
        hashes = request.block_hashes
        before, self._last_prompt = self._last_prompt, hashes[-1] if hashes else None
        if hashes and hashes[-1] == before:
            return SEQUENCE_TOKENS
        _, cached, _ = scheduler.kv_cache_manager.get_computed_blocks(request)
        return float(SEQUENCE_TOKENS + request.num_tokens - cached)


def _reached(request: Any) -> float:
    """Return the virtual time that a prompt has reached."""
    turn, left = request.turn, request.num_tokens - request.num_computed_tokens
    cost = left if request.is_prefill_chunk else turn.cost
    return float(request.arrival_time - cost / turn.weight)


def prepare_prompt_turns() -> None:
    """Patch this vLLM process, which has one scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler

    turns, schedule, add_request = PromptTurns(), Scheduler.schedule, Scheduler.add_request

    def add_in_turn(scheduler: Any, request: Any) -> None:
        turns.arrive(scheduler, request)
        add_request(scheduler, request)

    def schedule_in_turn(scheduler: Any, *args: Any, **options: Any) -> Any:
        with turns.of_next_step(scheduler):
            return schedule(scheduler, *args, **options)

    Scheduler.add_request = add_in_turn
    Scheduler.schedule = schedule_in_turn
