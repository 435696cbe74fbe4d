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

from worker.engine.vllm.batch_hold import first_request, is_compiling, leave_out

SEQUENCE_TOKENS: Final = 16
"""What a sequence costs, in tokens, in addition to those of its prompt that are not cached."""
SHARED_TOKENS: Final = 512
"""What a step processes of longer prompts beside shorter ones of other tenants. On a GPU, so many
tokens take little longer than the step without them."""
_MOST_ENDS: Final = 1_024


def payer(tenant: str, weight: float) -> str:
    """Return the session of vLLM that identifies a tenant and its weight in the engine core."""
    return f"{weight} {tenant}"


def tenant_of(request: Any) -> str:
    """Return the tenant of a request in the engine core. Its cache salt may be a client's."""
    return (request.session_id or "").partition(" ")[2]


@dataclass(frozen=True, slots=True)
class _Turn:
    tokens: int
    """Tokens of the prompt that are not cached."""
    weight: float

    @property
    def length(self) -> float:
        """The virtual time that it takes."""
        return (SEQUENCE_TOKENS + self.tokens) / self.weight


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
            if each.priority == priority and (each.is_prefill_chunk or _is_waiting(each))
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
        """The first request, if it did not begin in the last step, for lack of memory or of time
        for its mask, or because it has lost its cached part. The next step is vLLM's own."""

    def arrive(self, scheduler: Any, request: Any) -> None:
        """Give a new request its turn."""
        weight = float((request.session_id or "1").partition(" ")[0])
        request.turn = _Turn(self._tokens(scheduler, request), weight)
        clock, tenant = self._clocks[request.priority], tenant_of(request)
        clock.read(scheduler, request.priority)
        begin = max(clock.ends.get(tenant, 0.0), clock.now)
        clock.ends[tenant] = request.arrival_time = begin + request.turn.length

    @contextmanager
    def of_next_step(self, scheduler: Any) -> Iterator[None]:
        """Let long prompts wait for others in the step that is scheduled within this block.

        vLLM would continue those that have begun first. The first of them gets what prompts with
        earlier turns leave of the step.
        """
        begun = [each for each in scheduler.running if each.is_prefill_chunk and not each.priority]
        begun.sort(key=_turn)
        first, refused = first_request(scheduler), self._refused
        self._refused = None
        if first is None or first is refused or (begun and _turn(first) >= _turn(begun[0])):
            leave_out(scheduler, begun[1:])
            yield
            return
        most_of_step, config = scheduler.max_num_scheduled_tokens, scheduler.scheduler_config
        threshold, decoding = config.long_prefill_token_threshold, len(scheduler.running)
        decoding -= len(begun)
        waiting = [
            each for each in scheduler.requests.values() if _is_waiting(each) and not each.priority
        ]
        most = self._most_tokens(first, [*begun, *waiting], most_of_step - decoding)
        scheduler.max_num_scheduled_tokens = most + decoding
        if begun:
            earlier = [each.turn.tokens for each in waiting if _turn(each) < _turn(begun[0])]
            left = most - sum(earlier)
            has_room = left >= max(earlier, default=0)
            leave_out(scheduler, begun[has_room:])
            if has_room:
                config.long_prefill_token_threshold = min(threshold or left, left)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = most_of_step
            config.long_prefill_token_threshold = threshold
            self._refused = first if first is first_request(scheduler) else None

    def _most_tokens(self, first: Any, prompts: list[Any], most: int) -> int:
        """Return how many of the `most` tokens of prompts in a step it processes.

        If a tenant's short prompt is first, the step has little of the long prompts of others.
        """
        is_shared = first.turn.tokens <= SHARED_TOKENS and any(
            each.turn.tokens > SHARED_TOKENS and tenant_of(each) != tenant_of(first)
            for each in prompts
        )
        short = [each.turn.tokens for each in prompts if each.turn.tokens <= SHARED_TOKENS]
        return min(most, sum(short) + SHARED_TOKENS) if is_shared else most

    def _tokens(self, scheduler: Any, request: Any) -> int:
        """Return the tokens to process: one of a job's further sequences, which find the others."""
        hashes = request.block_hashes
        before, self._last_prompt = self._last_prompt, hashes[-1] if hashes else None
        if hashes and hashes[-1] == before:
            return 1
        _, cached, _ = scheduler.kv_cache_manager.get_computed_blocks(request)
        return int(request.num_tokens - cached)


def _is_waiting(request: Any) -> bool:
    return not (request.num_computed_tokens or is_compiling(request))


def _turn(request: Any) -> float:
    return float(request.arrival_time)


def _reached(request: Any) -> float:
    """Return the virtual time that a prompt has reached."""
    turn: _Turn = request.turn
    if not request.is_prefill_chunk:
        return _turn(request) - turn.length
    left: int = request.num_tokens - request.num_computed_tokens
    return _turn(request) - left / turn.weight


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
