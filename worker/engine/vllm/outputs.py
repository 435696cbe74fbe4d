"""Conversion of vLLM's engine core outputs into the worker's types."""

import logging
from typing import Any

from worker.engine.base import EngineStats, EngineStep, SequenceEnd, SequenceOutput, TokenScores

_log = logging.getLogger(__name__)

_ENDS = {
    "stop": SequenceEnd.STOP,
    "repetition": SequenceEnd.REPETITION,
    "length": SequenceEnd.LENGTH,
    "abort": SequenceEnd.ABORTED,
    "error": SequenceEnd.ERROR,
}


def step_of(outputs: Any) -> EngineStep:
    """Convert the output of one vLLM step (`EngineCoreOutputs`)."""
    return EngineStep([_output(each) for each in outputs.outputs], _stats(outputs.scheduler_stats))


def _stats(stats: Any) -> EngineStats | None:
    if stats is None:
        return None
    waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
    return EngineStats(stats.num_running_reqs, waiting, stats.kv_cache_usage)


def _output(output: Any) -> SequenceOutput:
    try:
        return _converted(output)
    except Exception:  # One sequence's output must not end all jobs.
        _log.exception("Cannot convert an output of the engine")
        return SequenceOutput(output.request_id, [], SequenceEnd.ERROR)


def _converted(output: Any) -> SequenceOutput:
    reason, prefill = output.finish_reason, output.prefill_stats
    prompt_scores = output.new_prompt_logprobs_tensors
    if reason is prefill is prompt_scores is output.new_logprobs is None:
        return SequenceOutput(output.request_id, output.new_token_ids)
    stop = output.stop_reason
    return SequenceOutput(
        output.request_id,
        output.new_token_ids,
        None if reason is None else _ENDS[str(reason)],
        stop if isinstance(stop, int) else None,
        None if output.new_logprobs is None else _scores(output.new_logprobs),
        None if prompt_scores is None else _scores(prompt_scores),
        None if prefill is None else prefill.num_cached_tokens,
        None if prefill is None else prefill.num_prompt_tokens,
        None if prompt_scores is None else prompt_scores[2].tolist(),
    )


def _scores(logprobs: Any) -> list[TokenScores]:
    """Pair token ids with log-probabilities; column 0 is the actual token."""
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(logprobs[0].tolist(), logprobs[1].tolist(), strict=True)
    ]
