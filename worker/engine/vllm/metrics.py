"""vLLM's own metrics, `vllm:*`, updated as its output handling would update them.

The worker does not use that handling (see `worker.engine.vllm.engine`), so this module counts the
same outputs, once for each step and each request. It omits what vLLM records for every token, the
time since the last one: that would cost a tenth of the worker's time per token, and gateways record
it. It also omits what depends on `n`: to vLLM each sequence is a request. These parts of vLLM are
private, so this module fits one version of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Followed:
    """A sequence in the engine."""

    stats: Any
    """vLLM's `RequestStateStats`."""
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0


class EngineMetrics:
    """Tracks the sequences of one engine."""

    def __init__(self, logger_manager: Any, stats: Any) -> None:
        """`logger_manager` is vLLM's; None if engine arguments disable its statistics.

        `stats` is the module `vllm.v1.metrics.stats`.
        """
        self._logger_manager = logger_manager
        self._stats = stats
        self._adapters = stats.LoRARequestStates()
        self._followed: dict[str, _Followed] = {}

    def added(self, core_request: Any) -> None:
        """Track a request (`EngineCoreRequest`) that was sent to the engine."""
        if self._logger_manager is not None:
            self._followed[core_request.request_id] = _Followed(
                self._stats.RequestStateStats(arrival_time=core_request.arrival_time),
                len(core_request.prompt_token_ids),
                core_request.sampling_params.max_tokens,
            )

    def remove(self, sequence_ids: Iterable[str]) -> None:
        """Stop tracking aborted sequences; vLLM does not count them as ended either."""
        for sequence_id in sequence_ids:
            self._followed.pop(sequence_id, None)

    def note(self, outputs: Any) -> int:
        """Count the output of a step (`EngineCoreOutputs`). Return its number of preemptions."""
        if self._logger_manager is None:
            return 0
        iteration = self._stats.IterationStats() if outputs.outputs else None
        tokens = 0
        for output in outputs.outputs:
            new_tokens = len(output.new_token_ids)
            tokens += new_tokens
            followed = self._followed.get(output.request_id)
            if followed is None:
                continue
            followed.stats.num_generation_tokens += new_tokens
            if output.prefill_stats or output.events or output.finish_reason is not None:
                self._note_event(followed, output, iteration, outputs.timestamp)
        if iteration is not None:
            iteration.num_generation_tokens = tokens
        self._logger_manager.record(
            scheduler_stats=outputs.scheduler_stats,
            iteration_stats=iteration,
            engine_idx=outputs.engine_index,
        )
        return 0 if iteration is None else int(iteration.num_preempted_reqs)

    def _note_event(self, followed: _Followed, output: Any, iteration: Any, now: float) -> None:
        """Record an output that is not an ordinary token; `now` is the engine core's own time."""
        stats, prefill = followed.stats, output.prefill_stats
        # The engine processes a preempted sequence again; this is not a second prompt.
        is_first = prefill is not None and not stats.first_token_ts
        if is_first:
            iteration.prompt_token_stats.update_from_output(prefill)
            stats.first_token_latency = iteration.iteration_timestamp - stats.arrival_time
            iteration.time_to_first_tokens_iter.append(stats.first_token_latency)
            stats.first_token_ts = now
            followed.cached_tokens = prefill.num_cached_tokens
        if output.events is not None:
            iteration.update_from_events(
                output.request_id, output.events, is_first, stats, self._adapters, None
            )
        if output.finish_reason is not None:
            stats.last_token_ts = now
            iteration.update_from_finished_request(
                finish_reason=output.finish_reason,
                request_id=output.request_id,
                num_prompt_tokens=followed.prompt_tokens,
                max_tokens_param=followed.max_tokens,
                req_stats=stats,
                num_cached_tokens=followed.cached_tokens,
            )
            del self._followed[output.request_id]
