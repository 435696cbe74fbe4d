"""vLLM's own metrics, `vllm:*`, updated as its output handling would update them.

The worker does not use that handling (see `worker.engine.vllm.engine`), so this module counts the
same outputs, once for each step and each request. A step in which no sequence begins or ends
updates only the metrics that count tokens and steps. This module omits what vLLM records for every
token, the time since the last one: that would cost a tenth of the worker's time per token, and
gateways record it. It also omits what depends on `n`: to vLLM each sequence is a request. These
parts of vLLM are private, so this module fits one version of it.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

_LOAD_SECONDS: Final = 0.1
"""Time for which the gauges of the load may lag behind, while no sequence begins or ends."""


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
        self._loaded_at = 0.0
        loggers = [] if logger_manager is None else logger_manager.stat_loggers
        self._prometheus = loggers[0] if len(loggers) == 1 else None
        """The only logger, if there is one; it may record an ordinary step in fewer calls."""

    def added(self, core_request: Any) -> None:
        """Track a request (`EngineCoreRequest`) that was sent to the engine."""
        if self._logger_manager is not None:
            self._followed[core_request.request_id] = _Followed(
                self._stats.RequestStateStats(arrival_time=core_request.arrival_time),
                len(core_request.prompt_token_ids),
                0 if core_request.pooling_params else core_request.sampling_params.max_tokens,
            )

    def remove(self, sequence_ids: Iterable[str]) -> None:
        """Stop tracking aborted sequences; vLLM does not count them as ended either."""
        for sequence_id in sequence_ids:
            self._followed.pop(sequence_id, None)

    def note(self, outputs: Any) -> int:
        """Count the output of a step (`EngineCoreOutputs`). Return its number of preemptions."""
        if self._logger_manager is None:
            return 0
        tokens, iteration = 0, None
        for output in outputs.outputs:
            new_tokens = len(output.new_token_ids)
            tokens += new_tokens
            followed = self._followed.get(output.request_id)
            if followed is None:
                continue
            followed.stats.num_generation_tokens += new_tokens
            if output.prefill_stats or output.events or output.finish_reason is not None:
                iteration = iteration or self._stats.IterationStats()
                self._note_event(followed, output, iteration, outputs.timestamp)
        if iteration is None and self._note_ordinary_step(outputs, tokens):
            return 0
        if iteration is None and outputs.outputs:
            iteration = self._stats.IterationStats()
        if iteration is not None:
            iteration.num_generation_tokens = tokens
        self._logger_manager.record(
            scheduler_stats=outputs.scheduler_stats,
            iteration_stats=iteration,
            engine_idx=outputs.engine_index,
        )
        return 0 if iteration is None else int(iteration.num_preempted_reqs)

    def _note_ordinary_step(self, outputs: Any, tokens: int) -> bool:
        """Count a step without events by two metrics. Return False if there is more to record.

        vLLM sets thirty metrics for each step, which takes ten times as long.
        """
        prometheus, stats, now = self._prometheus, outputs.scheduler_stats, time.monotonic()
        if (
            prometheus is None
            or not outputs.outputs
            or now - self._loaded_at >= _LOAD_SECONDS
            or (stats is not None and not _has_only_load(stats))
        ):
            self._loaded_at = now
            return False
        prometheus.counter_generation_tokens[outputs.engine_index].inc(tokens)
        prometheus.histogram_iteration_tokens[outputs.engine_index].observe(tokens)
        return True

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


def _has_only_load(stats: Any) -> bool:
    """Whether a step's `SchedulerStats` have nothing but the load, which the next ones repeat."""
    return not (
        stats.prefix_cache_stats.requests
        or stats.connector_prefix_cache_stats
        or stats.kv_cache_eviction_events
        or stats.spec_decoding_stats
        or stats.kv_connector_stats
        or stats.ec_connector_stats
        or stats.perf_stats
    )
