"""Which values of vLLM's arguments a worker accepts, beside which settings and other arguments.

An argument that no rule names is passed to vLLM as it is, which checks it too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from worker.settings import WorkerSettings

REPRODUCIBLE_DTYPE: Final = "float32"
"""In which equal texts follow from equal requests on a CPU, whatever else is in the batch."""

LOAD_FAILURE_POLICY: Final = "recompute"
"""What vLLM does if a connector cannot load blocks; by default, it fails their requests."""

_OBJECTS: Final = (
    *("hf_overrides", "kv_transfer_config", "limit_mm_per_prompt"),
    *("speculative_config", "structured_outputs_config"),
)
_UNQUANTIZED: Final = ("bfloat16", "float16", "float32")


class Chosen(NamedTuple):
    """The arguments of an engine, and what they depend on."""

    arguments: Mapping[str, Any]
    settings: WorkerSettings
    is_cpu: bool

    def value(self, name: str) -> Any:
        """Return an argument, or with `ARGUMENT.FIELD` a field of one; None if it is not given."""
        argument, _, field = name.partition(".")
        value = self.arguments.get(argument)
        return (value or {}).get(field) if field else value


def _always(_: Chosen) -> bool:
    return True


def _is_reproducible(chosen: Chosen) -> bool:
    return chosen.settings.reproducible


def _is_cpu(chosen: Chosen) -> bool:
    return chosen.is_cpu


def _is_rank(chosen: Chosen) -> bool:
    """Whether this worker is one rank of data parallelism, beside the workers of the others."""
    return chosen.value("data_parallel_rank") is not None


def _has_connector(chosen: Chosen) -> bool:
    given = chosen.value("kv_transfer_config.kv_connector"), chosen.value("kv_offloading_size")
    return any(each is not None for each in given)


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that an argument may have."""

    name: str
    allowed: tuple[object, ...]
    """None is always allowed."""
    reason: str
    when: Callable[[Chosen], bool] = _always

    def check(self, chosen: Chosen) -> None:
        """Raise ValueError if the argument has another value."""
        value = chosen.value(self.name)
        if value is None or value in self.allowed or not self.when(chosen):
            return
        accepted = f"be {' or '.join(map(str, self.allowed))}" if self.allowed else "not be set"
        raise ValueError(
            f"engine_arguments: {self.name} must {accepted}, because {self.reason}. "
            f"Given: {value!r}"
        )


_BATCH: Final = "SLUICE_REPRODUCIBLE excludes results that depend on the batch"
_IN_MEMORY: Final = "a CPU has its KV cache in the machine's memory already"
_RANKS: Final = "a worker has one rank; start one for each, with its data_parallel_rank"

RULES: Final = (
    Rule(
        "dtype",
        (REPRODUCIBLE_DTYPE,),
        _BATCH,
        lambda chosen: _is_reproducible(chosen) and chosen.is_cpu,
    ),
    Rule("dtype", _UNQUANTIZED, _BATCH, _is_reproducible),
    Rule("speculative_config", (), _BATCH, _is_reproducible),
    # -- the KV cache
    Rule("kv_cache_dtype", ("auto", *_UNQUANTIZED), _BATCH, _is_reproducible),
    Rule(
        "kv_cache_dtype",
        ("auto", *_UNQUANTIZED, "fp8", "fp8_e4m3", "fp8_e5m2"),
        "resumption was not tested with other formats",
    ),
    Rule(
        "prefix_caching_hash_algo",
        ("sha256", "sha256_cbor"),
        "other hashes of two tenants' prompts may be equal",
    ),
    Rule(
        "kv_transfer_config.kv_connector",
        (),
        "kv_offloading_size chooses the connector",
        lambda chosen: chosen.value("kv_offloading_size") is not None,
    ),
    Rule(
        "kv_transfer_config.kv_connector",
        ("OffloadingConnector", "SimpleCPUOffloadConnector"),
        "others share blocks between tenants, adapters or exactness classes, or need a router",
    ),
    Rule("kv_transfer_config.kv_connector_module_path", (), "it is code that was not tested"),
    Rule(
        "kv_transfer_config.kv_role",
        ("kv_both",),
        "no worker processes prompts for others",
    ),
    Rule(
        "kv_transfer_config.kv_load_failure_policy",
        (LOAD_FAILURE_POLICY,),
        "vLLM would fail requests whose blocks cannot be loaded",
    ),
    Rule(
        "kv_offloading_backend",
        ("native",),
        "others do not separate the blocks of adapters",
    ),
    # -- speculation
    Rule(
        "speculative_config",
        (),
        "only a model that completes texts can speculate",
        lambda chosen: chosen.settings.runner != "generate",
    ),
    Rule(
        "speculative_config.method",
        (
            *("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "ngram"),
            *("ngram_gpu", "suffix"),
        ),
        "others may return tokens that the model would not",
    ),
    Rule(
        "speculative_config.rejection_sample_method",
        ("standard", "block"),
        "others return tokens that the model would not",
    ),
    # -- data parallelism
    Rule("data_parallel_hybrid_lb", (False,), _RANKS),
    Rule("data_parallel_multi_port_external_lb", (False,), _RANKS),
    Rule("data_parallel_start_rank", (), _RANKS),
    Rule("data_parallel_size_local", (1,), _RANKS, _is_rank),
    Rule("data_parallel_backend", ("mp",), "a worker starts its processes itself"),
    Rule("nnodes", (1,), "a worker starts no processes on other machines"),
    Rule("node_rank", (0,), "a worker starts no processes on other machines"),
    # -- sleep
    Rule("enable_sleep_mode", (False,), "the other ranks would wait for this one", _is_rank),
    Rule(
        "enable_sleep_mode",
        (False,),
        "a connector uses the memory that an engine frees to sleep. Set it to false for this model",
        _has_connector,
    ),
    # -- CPUs
    Rule("pipeline_parallel_size", (1,), "vLLM 0.32 ends at the first step on a CPU", _is_cpu),
    Rule("kv_offloading_size", (), _IN_MEMORY, _is_cpu),
    Rule("kv_transfer_config.kv_connector", (), _IN_MEMORY, _is_cpu),
)


def check_combinations(chosen: Chosen) -> None:
    """Raise ValueError, which names the argument, for what a worker does not accept."""
    for name in _OBJECTS:
        value = chosen.arguments.get(name)
        if not (value is None or isinstance(value, dict)):
            raise ValueError(f"engine_arguments: {name} must be an object. Given: {value!r}")
    for rule in RULES:
        rule.check(chosen)
