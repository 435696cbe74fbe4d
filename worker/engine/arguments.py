"""What vLLM is started with: its engine arguments, and its environment variables."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from contract.logs import LogFormat
from contract.sampling import LOGPROBS, MAX_BAD_WORDS
from worker.samplers.arguments import PROCESSOR
from worker.settings import Settings

GRAMMAR_BACKEND = "guidance"
"""What the gateway compiles every grammar with before a job has it. vLLM would choose for itself, by the
first grammar it sees."""

MAX_BAD_WORD_TOKENS = 4096
"""Tokens of all bad words of a request together, in both of their forms, at most."""

_JSON_LOGS = Path(__file__).with_name("logging.json")
"""How vLLM's processes log where the worker logs JSON: what they would else write is no JSON."""

_DEFAULT_MAX_IMAGES = 8
_CPU_STEP_TOKENS = 4096
_FIXED = {
    "model",
    "logits_processors",
    "mm_processor_cache_gb",
    # With a parser of its own the engine would begin a grammar behind the reasoning only, which is part of it.
    "reasoning_config",
    "reasoning_parser",
}
_CPU_FIXED = {"enable_chunked_prefill", "max_num_batched_tokens"}


def engine_arguments(settings: Settings, engine_args: Any, *, is_cpu: bool) -> Any:
    """Return vLLM's engine arguments (an instance of `engine_args`) for these settings."""
    more = settings.engine_arguments
    _check_names(more, {field.name for field in fields(engine_args)}, is_cpu=is_cpu)
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "served_model_name": settings.served_name,
        # Defaults that a model brings along would change requests that leave a parameter out.
        "generation_config": "vllm",
        "max_logprobs": int(LOGPROBS.maximum),
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "enforce_eager": is_cpu if settings.enforce_eager is None else settings.enforce_eager,
        # vLLM's cache of images tells tenants apart no more than their contents do.
        "mm_processor_cache_gb": 0,
        **({} if settings.context_window is None else {"max_model_len": settings.context_window}),
        **({} if settings.max_sequences is None else {"max_num_seqs": settings.max_sequences}),
        **more,
        "limit_mm_per_prompt": {
            "image": _DEFAULT_MAX_IMAGES,
            **more.get("limit_mm_per_prompt", {}),
        },
        "structured_outputs_config": _structured_outputs(more),
        "logits_processors": [PROCESSOR] if offers_sampler_chain(settings) else None,
    }
    if is_cpu:
        # A seeded prompt that is split over steps kills the engine on a CPU, so none is split.
        arguments["enable_chunked_prefill"] = False
        longest = engine_args(**arguments).create_model_config().max_model_len
        arguments["max_num_batched_tokens"] = max(longest, _CPU_STEP_TOKENS)
    return engine_args(**arguments)


def offers_sampler_chain(settings: Settings) -> bool:
    """Whether the sampler chain is loaded; it goes with no speculative decoding."""
    return not settings.engine_arguments.get("speculative_config")


def environment_variables(settings: Settings) -> dict[str, str]:
    """Return the environment variables that vLLM's processes are to find, unless set otherwise."""
    logs = {"VLLM_LOGGING_CONFIG_PATH": str(_JSON_LOGS)}
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if settings.log_level == "DEBUG" else "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_kv_cache_gib),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "HF_HUB_OFFLINE": "1" if Path(settings.model_path).is_dir() else "0",
        # Each word is forbidden at the start of a word and inside one.
        "VLLM_MAX_NUM_BAD_WORDS": str(2 * MAX_BAD_WORDS),
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": str(MAX_BAD_WORD_TOKENS),
        **(logs if settings.log_format is LogFormat.JSON else {}),
    }


def _check_names(more: dict[str, Any], known: set[str], *, is_cpu: bool) -> None:
    if unknown := sorted(set(more) - known):
        raise ValueError(f"engine_arguments: vLLM knows no {', '.join(unknown)}")
    fixed = _FIXED | (_CPU_FIXED if is_cpu else set())
    if chosen := sorted(fixed.intersection(more)):
        raise ValueError(f"engine_arguments: {', '.join(chosen)} cannot be chosen here")


def _structured_outputs(more: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = dict(more.get("structured_outputs_config") or {})
    if given.get("backend", GRAMMAR_BACKEND) != GRAMMAR_BACKEND:
        raise ValueError(
            f"engine_arguments: structured_outputs_config must leave backend at {GRAMMAR_BACKEND!r}. "
            f"Given: {given['backend']!r}"
        )
    return {**given, "backend": GRAMMAR_BACKEND}
