"""The exactness class of a started vLLM: what decides which tokens it generates, bit for bit.

vLLM's processes report what only they know, such as the attention backend that was chosen. This
part of vLLM is private, so this module fits one version of it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from contract.messages import Exactness
from worker.engine.exactness import digest_of, exactness_of

NONE: Final = "none"
_CPU_INFO: Final = Path("/proc/cpuinfo")
_LIMITS: Final = (
    *("block_size", "context_window", "disable_log_stats", "gpu_memory_utilization"),
    *("kv_cache_memory_bytes", "max_logprobs", "max_model_len", "max_num_batched_tokens"),
    *("max_num_partial_prefills", "max_num_seqs", "num_gpu_blocks_override", "load_format"),
    *("max_parallel_loading_workers", "otlp_traces_endpoint", "limit_mm_per_prompt"),
    *("download_dir", "tokenizer", "tokenizer_mode", "allowed_local_media_path"),
)
_STATED: Final = (
    *("dtype", "quantization", "kv_cache_dtype", "enforce_eager", "speculative_config"),
    *("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"),
    *("data_parallel_size", "data_parallel_rank", "data_parallel_external_lb"),
    *("data_parallel_address", "data_parallel_rpc_port", "data_parallel_size_local"),
    *("enable_expert_parallel", "kv_transfer_config", "kv_offloading_size"),
    *("kv_offloading_backend", "attention_backend", "distributed_executor_backend"),
)
_NEUTRAL: Final = frozenset((*_LIMITS, *_STATED))
"""Engine arguments that are limits, or that other facts state. Any other one makes a class."""


def prepare_exactness() -> None:
    """Let each vLLM process with a part of the model report its facts, by this name."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.exactness_facts = _facts_of_process


async def read_exactness(
    llm: Any, arguments: Mapping[str, Any], variables: Mapping[str, str]
) -> Exactness:
    """Return the class of an `AsyncLLM`. All weights are read, a second for each GB.

    Args:
        llm: The engine.
        arguments: The engine arguments that the operator chose.
        variables: The environment variables that the operator chose.
    """
    processes: Sequence[Mapping[str, str]] = await llm.collective_rpc("exactness_facts")
    checksums: Sequence[Mapping[str, str]] = await llm.compute_weight_checksums()
    return exactness_of(
        {
            **_configured(llm.vllm_config, arguments, variables),
            **{
                name: ", ".join(sorted({each[name] for each in processes})) for name in processes[0]
            },
            "weights": _digest_of_weights(llm.vllm_config, checksums),
        }
    )


def _configured(
    config: Any, arguments: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, str]:
    import torch
    import vllm
    from vllm import envs

    model, cache, compilation = config.model_config, config.cache_config, config.compilation_config
    dtype, lora = _name(model.dtype), config.lora_config
    others = {name: value for name, value in arguments.items() if name not in _NEUTRAL}
    # vLLM lists the variables that change what its compiler makes.
    chosen = sorted(envs.compile_factors().keys() & variables.keys())
    return {
        "engine": f"vllm {vllm.__version__}",
        "torch": str(torch.__version__),
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "dtype": dtype,
        "quantization": model.quantization or NONE,
        "kv_cache_dtype": dtype if cache.cache_dtype == "auto" else cache.cache_dtype,
        "kv_cache_block": str(cache.block_size),
        "parallel": _parallel(config.parallel_config),
        "compilation": f"{_name(compilation.mode)} {_name(compilation.cudagraph_mode)}".lower(),
        "adapters": NONE if lora is None else f"rank {lora.max_lora_rank}",
        "batch_invariant": "yes" if envs.VLLM_BATCH_INVARIANT else "no",
        "speculation": _speculation(config.speculative_config),
        "connectors": _connectors(config),
        "arguments": digest_of(_plain(others)) if others else NONE,
        "environment": " ".join(f"{name}={variables[name]}" for name in chosen) or NONE,
    }


def _facts_of_process(worker: Any) -> dict[str, str]:
    """Return what a process with a part of the model knows; vLLM passes the process's `Worker`."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.platforms import current_platform

    backends = {each.get_name() for each in get_current_attn_backends(worker.vllm_config)}
    if current_platform.is_cpu():
        # Kernels are chosen by the instructions, and attention is divided among the threads.
        kernels = torch.backends.cpu.get_cpu_capability()
        device = f"{_cpu_name()}, {kernels}, {torch.get_num_threads()} threads"
    else:
        device = current_platform.get_device_name(worker.local_rank)
    return {"attention": " ".join(sorted(backends)) or NONE, "device": device}


def _cpu_name() -> str:
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def _digest_of_weights(config: Any, checksums: Sequence[Mapping[str, str]]) -> str:
    """Digest the weights as they are in memory, and what else describes the model."""
    is_divided = config.parallel_config.enable_expert_parallel
    found = {
        # Ranks of data parallelism have equal weights, but for experts that they divide.
        name.partition(":")[2]: checksum
        for each in checksums
        for name, checksum in each.items()
        if not (is_divided and ".experts." in name)
    }
    described = config.model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        described.pop(name, None)
    return digest_of([found, _plain(described)])


def _parallel(parallel: Any) -> str:
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
    }
    # Ranks of data parallelism share nothing, unless they divide the experts.
    if not parallel.enable_expert_parallel:
        del sizes["dp"]
    named = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    return " ".join([*named, *["ep"] * parallel.enable_expert_parallel]) or NONE


def _speculation(speculative: Any) -> str:
    if speculative is None:
        return NONE
    draft = Path(speculative.model).name if speculative.model else ""
    tokens = str(speculative.num_speculative_tokens)
    return " ".join(filter(None, (speculative.method, tokens, draft)))


def _connectors(config: Any) -> str:
    transfer, cache = config.kv_transfer_config, config.cache_config
    names = [] if transfer is None else [str(transfer.kv_connector)]
    if cache.kv_offloading_size:
        names.append(f"offloading {cache.kv_offloading_backend}")
    return " ".join(names) or NONE


def _name(value: Any) -> str:
    """Return the last part of the name of a dtype or of a member of an enumeration."""
    return getattr(value, "name", str(value)).rpartition(".")[2]


def _plain(value: Any) -> Any:
    """Return a value with what JSON cannot represent as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
