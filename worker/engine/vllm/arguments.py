"""vLLM's engine arguments and environment variables."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from common.logs import LogFormat
from contract.sampling import LOGPROBS, MAX_BAD_WORDS
from worker.engine.adapters import adapter_limits
from worker.engine.vllm.combinations import (
    LOAD_FAILURE_POLICY,
    REPRODUCIBLE_DTYPE,
    Chosen,
    check_combinations,
)
from worker.samplers.arguments import PROCESSOR
from worker.settings import WorkerSettings

GRAMMAR_BACKEND = "guidance"
"""The backend with which the gateway has already compiled every grammar. By default vLLM chooses
one
according to the first grammar that it receives."""

MAX_BAD_WORD_TOKENS = 4096
"""Maximum tokens of all bad words of a request together, in both of their forms."""

_JSON_LOGS = Path(__file__).with_name("logging.json")
"""Logging configuration for vLLM's processes when the worker logs JSON; their default is not
JSON."""

_DEFAULT_MAX_IMAGES = 100
"""As many as the gateway accepts; the window and the pixels of a request limit them, too."""
_CPU_STEP_TOKENS = 4096
_FIXED = {
    "model",
    "kv_events_config",
    "logits_processors",
    "mm_processor_cache_gb",
    # With its own parser the engine would apply a grammar only
    # after the reasoning, but the grammar includes the reasoning.
    "reasoning_config",
    "reasoning_parser",
    "runner",
    # Settings of their own.
    "enable_lora",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "lora_target_modules",
}
_CPU_FIXED = {"enable_chunked_prefill", "max_num_batched_tokens"}


def engine_arguments(
    settings: WorkerSettings,
    engine_args: Any,
    *,
    is_cpu: bool,
    can_sleep: bool,
    has_bfloat16: bool = True,
) -> Any:
    """Return vLLM's engine arguments (an instance of `engine_args`) for these settings.

    `can_sleep` is whether vLLM has its sleep mode on this platform, and `has_bfloat16` whether the
    CPU has instructions for 16-bit numbers.
    """
    more = settings.engine_arguments
    _check_names(more, {field.name for field in fields(engine_args)}, is_cpu=is_cpu)
    sleep = {"enable_sleep_mode": True} if settings.may_sleep and can_sleep else {}
    check_combinations(Chosen({**sleep, **more}, settings, is_cpu))
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "served_model_name": settings.served_name,
        # A model's own defaults would change requests that omit a parameter.
        "generation_config": "vllm",
        "max_logprobs": int(LOGPROBS.maximum),
        "runner": "pooling" if settings.runner == "pooling" else "generate",
        # Texts that are pooled have few prefixes in common; audio has none.
        "enable_prefix_caching": settings.runner == "generate",
        # If the KV cache is full, the engine preempts batch jobs first.
        "scheduling_policy": "priority",
        "use_tqdm_on_load": False,
        "enforce_eager": is_cpu if settings.enforce_eager is None else settings.enforce_eager,
        # vLLM's image cache is keyed by content only and does not separate tenants.
        "mm_processor_cache_gb": 0,
        **({} if settings.context_window is None else {"max_model_len": settings.context_window}),
        **({} if settings.max_sequences is None else {"max_num_seqs": settings.max_sequences}),
        **sleep,
        **_adapters(settings),
        **more,
        "limit_mm_per_prompt": {
            **(
                {"audio": 1}
                if settings.runner == "transcription"
                else {"image": _DEFAULT_MAX_IMAGES}
            ),
            **more.get("limit_mm_per_prompt", {}),
        },
        "structured_outputs_config": _structured_outputs(more),
        **_kv_transfer(more),
        "logits_processors": [PROCESSOR] if offers_sampler_chain(settings) else None,
    }
    if settings.reproducible and is_cpu:
        arguments["dtype"] = REPRODUCIBLE_DTYPE
    if is_cpu:
        # A seeded prompt that is split over steps crashes
        # the engine on a CPU, so disable splitting.
        arguments["enable_chunked_prefill"] = False
        model = engine_args(**arguments).create_model_config()
        arguments["max_num_batched_tokens"] = max(model.max_model_len, _CPU_STEP_TOKENS)
        if not has_bfloat16 and model.quantization is None:
            arguments.setdefault("dtype", "float32")
    return engine_args(**arguments)


def offers_sampler_chain(settings: WorkerSettings) -> bool:
    """Whether the sampler chain is loaded; it is incompatible with speculative decoding."""
    is_speculative = bool(settings.engine_arguments.get("speculative_config"))
    return settings.runner == "generate" and not is_speculative


def publishes_cache(settings: WorkerSettings, arguments: Any) -> bool:
    """Whether the engine reports what is in its prefix cache.

    Several engines behind one worker have caches of their own, so a prefix may be in another one.
    """
    is_single = arguments.data_parallel_size == 1
    return bool(settings.affinity_seconds and arguments.enable_prefix_caching and is_single)


def environment_variables(settings: WorkerSettings) -> dict[str, str]:
    """Return environment variables for vLLM's processes; existing values take precedence."""
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


def _adapters(settings: WorkerSettings) -> dict[str, Any]:
    limits = adapter_limits(settings)
    if limits is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": limits.slots,
        "max_cpu_loras": limits.loaded,
        "max_lora_rank": limits.max_rank,
        # Not the output layer, which adapters may not change: there vLLM needs memory for each
        # slot, and on a CPU log-probabilities of a prompt would end the engine.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in limits.modules}),
    }


def _check_names(more: dict[str, Any], known: set[str], *, is_cpu: bool) -> None:
    if unknown := sorted(set(more) - known):
        raise ValueError(f"engine_arguments: vLLM has no {', '.join(unknown)}")
    fixed = _FIXED | (_CPU_FIXED if is_cpu else set())
    if chosen := sorted(fixed.intersection(more)):
        raise ValueError(f"engine_arguments: {', '.join(chosen)} must not be set")


def _kv_transfer(more: dict[str, Any]) -> dict[str, Any]:
    """Return the argument of a KV connector, if there is one."""
    given: dict[str, Any] | None = more.get("kv_transfer_config")
    if given is None and more.get("kv_offloading_size") is None:
        return {}
    return {"kv_transfer_config": {"kv_load_failure_policy": LOAD_FAILURE_POLICY, **(given or {})}}


def _structured_outputs(more: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = dict(more.get("structured_outputs_config") or {})
    if given.get("backend", GRAMMAR_BACKEND) != GRAMMAR_BACKEND:
        raise ValueError(
            "engine_arguments: structured_outputs_config must leave backend at "
            f"{GRAMMAR_BACKEND!r}. Given: {given['backend']!r}"
        )
    return {**given, "backend": GRAMMAR_BACKEND}
