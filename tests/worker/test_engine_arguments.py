"""The arguments of vLLM, on a CPU and on a GPU."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.cases import all_cases
from tests.worker.conftest import MODEL_FOLDER
from worker.engine.vllm.arguments import engine_arguments
from worker.engine.vllm.combinations import RULES, Chosen, Rule, check_combinations
from worker.samplers.arguments import PROCESSOR
from worker.settings import WorkerSettings


@dataclass(frozen=True)
class ModelConfig:
    """The part of vLLM's model configuration that the worker reads."""

    max_model_len: int
    quantization: str | None


@dataclass
class EngineArgs:
    """A few of vLLM's arguments, so that the test needs no vLLM."""

    model: str
    served_model_name: str
    dtype: str = "auto"
    quantization: str | None = None
    generation_config: str = "auto"
    max_logprobs: int = 20
    enable_prefix_caching: bool | None = None
    use_tqdm_on_load: bool = True
    enforce_eager: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    tensor_parallel_size: int = 1
    mm_processor_cache_gb: float = 4
    limit_mm_per_prompt: dict[str, int] = field(default_factory=dict)
    structured_outputs_config: Any = None
    logits_processors: list[str] | None = None
    speculative_config: dict[str, Any] | None = None
    scheduling_policy: str = "fcfs"
    runner: str = "auto"
    enable_sleep_mode: bool = False
    kv_cache_dtype: str = "auto"
    kv_transfer_config: dict[str, Any] | None = None
    kv_offloading_size: float | None = None

    def create_model_config(self) -> ModelConfig:
        return ModelConfig(self.max_model_len or 8192, self.quantization)


def arguments(
    *, is_cpu: bool, can_sleep: bool = True, has_bfloat16: bool = True, **changes: Any
) -> EngineArgs:
    settings = WorkerSettings(model_path=str(MODEL_FOLDER), **changes)
    platform = {"is_cpu": is_cpu, "can_sleep": can_sleep, "has_bfloat16": has_bfloat16}
    made = engine_arguments(settings, EngineArgs, **platform)
    assert isinstance(made, EngineArgs)
    return made


def test_no_prompt_is_ever_split_on_a_cpu() -> None:
    made = arguments(is_cpu=True)
    assert (made.enable_chunked_prefill, made.max_num_batched_tokens) == (False, 8192)
    assert made.enforce_eager
    assert arguments(is_cpu=True, context_window=512).max_num_batched_tokens == 4096


@all_cases(
    ("given", "has_bfloat16", "dtype"),
    [
        ({}, False, "float32"),
        ({}, True, "auto"),
        ({"dtype": "bfloat16"}, False, "bfloat16"),
        ({"quantization": "awq"}, False, "auto"),
    ],
    ids=str,
)
def test_a_cpu_computes_in_float32_if_it_lacks_shorter_numbers(
    given: dict[str, Any], dtype: str, *, has_bfloat16: bool
) -> None:
    made = arguments(is_cpu=True, has_bfloat16=has_bfloat16, engine_arguments=given)
    assert made.dtype == dtype
    assert arguments(is_cpu=False, has_bfloat16=has_bfloat16).dtype == "auto"


def test_reproducible_engine_computes_in_a_type_that_the_batch_does_not_change() -> None:
    assert arguments(is_cpu=True, reproducible=True).dtype == "float32"
    given = {"dtype": "bfloat16", "speculative_config": None, "kv_cache_dtype": "auto"}
    made = arguments(is_cpu=False, reproducible=True, engine_arguments=given)
    assert made.dtype == "bfloat16"


RANK = {"data_parallel_size": 2, "data_parallel_rank": 1}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
ACCEPTED: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2},
    {**RANK, "data_parallel_size_local": 1, "data_parallel_address": "10.0.0.1"},
    {"kv_cache_dtype": "fp8", "kv_offloading_size": 4.0},
    {"kv_transfer_config": OFFLOADING, "speculative_config": NGRAM},
]
"""Arguments that are passed to vLLM."""
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"reproducible": True}, {"dtype": "bfloat16"}, "dtype must be float32, because"),
    ({"reproducible": True}, {"speculative_config": NGRAM}, "speculative_config must not be set"),
    ({"reproducible": True}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto or bfloat16"),
    ({}, {"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype must be auto or"),
    ({}, {"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo must be sha256 or"),
    ({}, {"kv_offloading_size": 1, "kv_transfer_config": OFFLOADING}, "chooses the connector"),
    ({}, {"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "OffloadingConnector or"),
    ({}, {"kv_transfer_config": {"kv_connector_module_path": "mine"}}, "code that was not tested"),
    ({}, {"kv_transfer_config": OFFLOADING | {"kv_role": "kv_producer"}}, "kv_role must be"),
    ({}, {"kv_transfer_config": {"kv_load_failure_policy": "fail"}}, "must be recompute"),
    ({}, {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "must be native"),
    ({"runner": "pooling"}, {"speculative_config": NGRAM}, "completes texts can speculate"),
    ({}, {"speculative_config": {"method": "custom_class"}}, "speculative_config.method must be"),
    ({}, {"speculative_config": {"rejection_sample_method": "synthetic"}}, "standard or block"),
    ({}, {"data_parallel_hybrid_lb": True}, "start one for each, with its data_parallel_rank"),
    ({}, {"data_parallel_multi_port_external_lb": True}, "a worker has one rank"),
    ({}, {"data_parallel_start_rank": 0}, "data_parallel_start_rank must not be set"),
    ({}, RANK | {"data_parallel_size_local": 2}, "data_parallel_size_local must be 1"),
    ({}, {"data_parallel_backend": "ray"}, "data_parallel_backend must be mp"),
    ({}, {"nnodes": 2}, "nnodes must be 1"),
    ({}, {"node_rank": 1}, "node_rank must be 0"),
    ({}, RANK | {"enable_sleep_mode": True}, "the other ranks would wait for this one"),
    ({}, {"kv_offloading_size": 1, "enable_sleep_mode": True}, "Set it to false for this model"),
    ({}, {"pipeline_parallel_size": 2}, "vLLM 0.32 ends at the first step on a CPU"),
    ({}, {"kv_offloading_size": 1}, "kv_offloading_size must not be set, because a CPU has"),
    ({}, {"kv_transfer_config": OFFLOADING}, "kv_connector must not be set, because a CPU has"),
]


def chosen(given: dict[str, Any], *, is_cpu: bool = True, **changes: Any) -> Chosen:
    return Chosen(given, WorkerSettings(model_path=str(MODEL_FOLDER), **changes), is_cpu)


def test_combinations_are_passed_on_or_refused_with_the_reason() -> None:
    for given in ACCEPTED:
        check_combinations(chosen(given, is_cpu=False))
    used = set[Rule]()
    for changes, given, reason in REFUSED:
        with pytest.raises(ValueError, match=f"^engine_arguments: .*{re.escape(reason)}"):
            check_combinations(chosen(given, **changes))
        used |= {rule for rule in RULES if not accepts(rule, chosen(given, **changes))}
    # Only GPUs have it.
    half = chosen({"dtype": "half"}, is_cpu=False, reproducible=True)
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16 or float32"):
        check_combinations(half)
    assert [rule.name for rule in RULES if rule not in used and accepts(rule, half)] == []


def accepts(rule: Rule, given: Chosen) -> bool:
    """Whether a rule accepts arguments."""
    try:
        rule.check(given)
    except ValueError:
        return False
    return True


@all_cases("value", [["OffloadingConnector"], "OffloadingConnector", True])
def test_argument_that_must_be_an_object_is_refused_clearly(value: object) -> None:
    with pytest.raises(ValueError, match=r"kv_transfer_config must be an object\. Given: "):
        arguments(is_cpu=False, engine_arguments={"kv_transfer_config": value})


def test_blocks_that_a_connector_cannot_load_are_computed_again() -> None:
    given = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    made = arguments(is_cpu=False, engine_arguments={"kv_transfer_config": given})
    assert made.kv_transfer_config == {**given, "kv_load_failure_policy": "recompute"}
    # vLLM makes the rest of this argument itself.
    made = arguments(is_cpu=False, engine_arguments={"kv_offloading_size": 4})
    assert made.kv_transfer_config == {"kv_load_failure_policy": "recompute"}


def test_gpu_keeps_vllms_defaults() -> None:
    made = arguments(is_cpu=False, engine_arguments={"tensor_parallel_size": 2})
    assert (made.enable_chunked_prefill, made.max_num_batched_tokens) == (None, None)
    assert not made.enforce_eager
    assert made.tensor_parallel_size == 2
    assert made.generation_config == "vllm"
    assert not made.enable_sleep_mode


def test_sleep_mode_is_for_hosts_where_vllm_has_it() -> None:
    assert arguments(is_cpu=False, may_sleep=True).enable_sleep_mode
    assert not arguments(is_cpu=False, may_sleep=True, can_sleep=False).enable_sleep_mode
    never = {"enable_sleep_mode": False}
    made = arguments(is_cpu=False, may_sleep=True, engine_arguments=never)
    assert not made.enable_sleep_mode


def test_grammars_have_one_backend_and_chains_their_processor() -> None:
    given = {"structured_outputs_config": {"disable_any_whitespace": True}}
    made = arguments(is_cpu=False, engine_arguments=given)
    assert made.structured_outputs_config == {"disable_any_whitespace": True, "backend": "guidance"}
    assert made.logits_processors == [PROCESSOR]
    assert (made.mm_processor_cache_gb, made.limit_mm_per_prompt) == (0, {"image": 100})
    made = arguments(is_cpu=False, engine_arguments={"limit_mm_per_prompt": {"image": 2}})
    assert made.limit_mm_per_prompt == {"image": 2}


def test_speculative_decoding_disables_the_sampler_chain() -> None:
    made = arguments(is_cpu=False, engine_arguments={"speculative_config": {"method": "ngram"}})
    assert made.logits_processors is None


@all_cases(
    ("more", "is_cpu"),
    [
        ({"no_such_argument": 1}, False),
        ({"model": "other"}, False),
        ({"enable_chunked_prefill": True}, True),
        ({"max_num_batched_tokens": 16}, True),
        ({"logits_processors": ["mine:Mine"]}, False),
        ({"mm_processor_cache_gb": 4}, False),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, False),
    ],
    ids=str,
)
def test_fixed_argument_is_refused_by_name(more: dict[str, Any], *, is_cpu: bool) -> None:
    with pytest.raises(ValueError, match=f"engine_arguments.*{next(iter(more))}"):
        arguments(is_cpu=is_cpu, engine_arguments=more)
