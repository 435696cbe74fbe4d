"""Engine dashboard: jobs of workers, work of each engine step, and utilization."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.frame import dashboard, row
from ops.dashboards.panels import Panel, Query, graph
from ops.dashboards.promql import (
    ENGINE,
    NAMESPACE,
    POOL,
    highest,
    mean,
    quantile,
    rate,
    ratio,
    total,
)

PROCESS = f'{POOL}, job="sluice-worker"'


def build() -> Dashboard:
    """Return the dashboard."""
    return dashboard(
        "sluice-engine",
        "Workers and engines",
        "Workers, the batches of their engines, and vLLM's own metrics.",
        row(
            "Workers",
            graph(
                "Workers by state",
                "short",
                "Workers in each state; only ready workers claim jobs.",
                Query(
                    f"sum by (sluice_worker_state) (sluice_worker_state{{{POOL}}})",
                    "{{sluice_worker_state}}",
                ),
                is_stacked=True,
            ),
            graph(
                "Jobs held",
                "short",
                "Jobs that each worker has claimed and not finished.",
                Query(total("sluice_worker_jobs_running", POOL, "instance"), "{{instance}}"),
            ),
            graph(
                "Jobs ended by outcome",
                "cps",
                "Jobs that left the workers.",
                Query(rate("sluice_worker_jobs_ended_total", POOL, "outcome"), "{{outcome}}"),
                is_stacked=True,
            ),
        ),
        row(
            "Batch",
            graph(
                "Sequences",
                "short",
                "Sequences that run in the engines, sequences that wait inside the engines, and "
                "the "
                "maximum.",
                Query(total("sluice_worker_sequences_running", POOL, "pool"), "{{pool}} running"),
                Query(total("sluice_worker_sequences_waiting", POOL, "pool"), "{{pool}} waiting"),
                Query(total("sluice_worker_max_sequences", POOL, "pool"), "{{pool}} maximum"),
            ),
            graph(
                "Utilization",
                "percentunit",
                "Running sequences as a share of the maximum.",
                Query(
                    ratio(
                        total("sluice_worker_sequences_running", POOL, "instance"),
                        total("sluice_worker_max_sequences", POOL, "instance"),
                    ),
                    "{{instance}}",
                ),
            ),
            graph(
                "Tokens per step",
                "suffix: tok",
                "Average number of tokens that an engine step samples: the batch size on the GPU.",
                Query(
                    ratio(
                        rate("sluice_worker_completion_tokens_total", POOL, "instance"),
                        rate("sluice_worker_engine_steps_total", POOL, "instance"),
                    ),
                    "{{instance}}",
                ),
            ),
        ),
        row(
            "Preemption",
            graph(
                "Batch jobs held",
                "short",
                "Batch jobs that the workers of each pool run. They use what requests leave free.",
                Query(total("sluice_worker_batch_jobs_running", POOL, "pool"), "{{pool}}"),
            ),
            graph(
                "Preempted sequences",
                "cps",
                "Sequences that left engines to make room: of batch jobs for requests, of a "
                "tenant for one that uses less, or beyond a model share. SLUICE_PREEMPTED_SHARE "
                "bounds them.",
                Query(
                    rate("sluice_worker_preempted_sequences_total", POOL, "pool", "source"),
                    "{{pool}}: {{source}}",
                ),
            ),
            graph(
                "Parked sequences",
                "short",
                "Sequences of running jobs that wait in workers for room in engines: the last ones "
                "of requests with a large n.",
                Query(total("sluice_worker_parked_sequences", POOL, "pool"), "{{pool}}"),
            ),
            graph(
                "Wait for a seat",
                "s",
                "Time for which such a sequence waited before it entered the engine.",
                *(
                    Query(
                        quantile(share, "sluice_worker_seat_wait_seconds", POOL),
                        f"p{round(100 * share)}",
                    )
                    for share in (0.5, 0.99)
                ),
            ),
            graph(
                "Tokens to process again",
                "suffix: tok/s",
                "Completion tokens of preempted sequences, which engines process again.",
                Query(
                    rate("sluice_worker_preempted_tokens_total", POOL, "pool", "source"),
                    "{{pool}}: {{source}}",
                ),
                runbooks=["SluicePreemptionThrash"],
            ),
            graph(
                "Preemptions by tenant",
                "cps",
                "How often sequences of each tenant's requests left engines, counted when the "
                "requests end. Tenants beyond SLUICE_METRICS_TENANTS are one series.",
                Query(
                    rate("sluice_gateway_tenant_preemptions_total", NAMESPACE, "tenant"),
                    "{{tenant}}",
                ),
            ),
        ),
        row(
            "Adapters",
            graph(
                "Loaded adapters",
                "short",
                "LoRA adapters that each engine has loaded.",
                Query(total("sluice_worker_adapters_loaded", POOL, "instance"), "{{instance}}"),
            ),
            graph(
                "Loads",
                "cps",
                "Loads of LoRA adapters by their outcome. Many loads mean that more adapters are "
                "used than stay loaded (SLUICE_LOADED_ADAPTERS).",
                Query(rate("sluice_worker_adapter_loads_total", POOL, "outcome"), "{{outcome}}"),
                Query(rate("sluice_worker_adapter_evictions_total", POOL), "evicted"),
                runbooks=["SluiceAdapterLoadsFail"],
            ),
            graph(
                "Mean time of a load",
                "s",
                "Mean time to download, verify and load an adapter.",
                Query(
                    ratio(
                        rate("sluice_worker_adapter_load_seconds_sum", POOL, "pool"),
                        rate("sluice_worker_adapter_load_seconds_count", POOL, "pool"),
                    ),
                    "{{pool}}",
                ),
            ),
        ),
        row(
            "Prefix affinity",
            graph(
                "Jobs passed over",
                "cps",
                "Jobs to which a younger job of their tenant was preferred, because a worker had "
                "cached more of its prompt. They wait for at most a second more.",
                Query(rate("sluice_worker_affinity_passed_jobs_total", POOL, "pool"), "{{pool}}"),
            ),
            graph(
                "Jobs kept for another worker",
                "cps",
                "Jobs that waited for the worker that had cached more of their prompts.",
                Query(rate("sluice_worker_affinity_kept_jobs_total", POOL, "pool"), "{{pool}}"),
            ),
            graph(
                "Mean wait",
                "s",
                "Mean time that a claimed job waited because it was passed over or kept. All other "
                "jobs count with 0.",
                Query(
                    ratio(
                        rate("sluice_worker_affinity_wait_seconds_total", POOL, "pool"),
                        rate("sluice_worker_jobs_claimed_total", POOL, "pool"),
                    ),
                    "{{pool}}",
                ),
            ),
            graph(
                "Digests held",
                "short",
                "Digests of cached prefixes that the workers of each pool publish, at most 16,384 "
                "each. 0 means that claims follow no cache.",
                Query(total("sluice_worker_held_digests", POOL, "pool"), "{{pool}}"),
            ),
            graph(
                "Chunks of long prompts",
                "cps",
                "Parts of 16 KiB that workers had in memory, read from Redis or found lost, and "
                "that gateways kept in Redis or wrote.",
                Query(rate("sluice_worker_prompt_chunks_total", POOL, "outcome"), "{{outcome}}"),
                Query(
                    rate("sluice_gateway_prompt_chunks_total", NAMESPACE, "outcome"), "{{outcome}}"
                ),
            ),
        ),
        row(
            "Hosts of several models",
            graph(
                "Models served",
                "short",
                "Hosts that serve each model now, or start its worker.",
                Query(total("sluice_host_serves", POOL, "model"), "{{model}}"),
                is_stacked=True,
            ),
            graph(
                "Swaps",
                "cps",
                "Swaps to each model, and workers that exited although the host did not stop "
                "them. If there are many swaps, raise SLUICE_HOST_LEAST_SECONDS.",
                Query(rate("sluice_host_swaps_total", POOL, "model"), "to {{model}}"),
                Query(rate("sluice_host_worker_exits_total", POOL, "model"), "{{model}} exited"),
                runbooks=["SluiceEngineCrashLoop"],
            ),
            graph(
                "Mean time of a start",
                "s",
                "Mean time from the decision to serve a model until its worker claims jobs, with "
                "the drain of the model before. Its weights come from disk, or its worker slept.",
                Query(
                    mean("sluice_host_start_seconds", POOL, "model", "source"),
                    "{{model}} from {{source}}",
                ),
            ),
        ),
        row(
            "Throughput",
            graph(
                "Completion tokens",
                "suffix: tok/s",
                "Tokens that the engines of each pool sample.",
                Query(rate("sluice_worker_completion_tokens_total", POOL, "pool"), "{{pool}}"),
                is_stacked=True,
            ),
            graph(
                "Prompt tokens",
                "suffix: tok/s",
                "Prompt tokens that the engines of each pool process.",
                Query(rate("sluice_worker_prompt_tokens_total", POOL, "pool"), "{{pool}}"),
                is_stacked=True,
            ),
            graph(
                "Engine steps",
                "cps",
                "Steps that sampled tokens. Fewer steps at the same batch size mean a slower "
                "engine.",
                Query(rate("sluice_worker_engine_steps_total", POOL, "instance"), "{{instance}}"),
            ),
        ),
        row(
            "Engine memory",
            graph(
                "KV cache in use",
                "percentunit",
                "At 100 %, the engine preempts sequences and computes them again later.",
                Query(
                    f"max by (instance) (sluice_worker_kv_cache_usage_ratio{{{POOL}}})",
                    "{{instance}}",
                ),
            ),
            graph(
                "Preemptions",
                "cps",
                "Sequences preempted because the KV cache was full. If there are many, lower "
                "SLUICE_MAX_SEQUENCES or give the cache more memory.",
                Query(rate("sluice_worker_preemptions_total", POOL, "instance"), "{{instance}}"),
            ),
            graph(
                "Job duration",
                "s",
                "From the claim of a job to its end.",
                *(
                    Query(quantile(share, "sluice_worker_job_seconds", POOL), f"p{share * 100:g}")
                    for share in (0.5, 0.95, 0.99)
                ),
            ),
        ),
        row(
            "Failures",
            graph(
                "Engine restarts in 15 minutes",
                "short",
                "Restarts of engines that died or hung, and of worker processes.",
                Query(
                    "sum by (instance) "
                    f"(increase(sluice_worker_engine_restarts_total{{{POOL}}}[15m]))"
                    " + sum by (instance) "
                    f"(changes(process_start_time_seconds{{{PROCESS}}}[15m]))",
                    "{{instance}}",
                ),
                alert="SluiceEngineCrashLoop",
            ),
            graph(
                "Pause before the next engine start",
                "s",
                "Time for which each worker waits before it restarts a dead engine.",
                Query(
                    f"max by (instance) (sluice_worker_engine_start_pause_seconds{{{POOL}}})",
                    "{{instance}}",
                ),
                runbooks=["SluiceEngineCrashLoop"],
            ),
            graph(
                "Replies",
                "cps",
                "Frames written to gateways, and writes that failed in Redis.",
                Query(rate("sluice_worker_frames_written_total", POOL), "written"),
                Query(rate("sluice_worker_reply_write_failures_total", POOL), "failed"),
                runbooks=["SluiceRedisErrors"],
            ),
        ),
        row(
            "vLLM",
            graph(
                "Requests in the engine",
                "short",
                "Requests that run and wait in vLLM's scheduler.",
                Query(
                    total("vllm:num_requests_running", ENGINE, "model_name"),
                    "{{model_name}} running",
                ),
                Query(
                    total("vllm:num_requests_waiting", ENGINE, "model_name"),
                    "{{model_name}} waiting",
                ),
            ),
            graph(
                "Prefix cache hits",
                "percentunit",
                "Share of prompt tokens found in the prefix cache.",
                Query(
                    ratio(
                        rate("vllm:prefix_cache_hits_total", ENGINE, "model_name"),
                        rate("vllm:prefix_cache_queries_total", ENGINE, "model_name"),
                    ),
                    "{{model_name}}",
                ),
            ),
            graph(
                "Tokens per iteration",
                "suffix: tok",
                "Average number of prompt and completion tokens that the engine computes in a "
                "step.",
                Query(mean("vllm:iteration_tokens_total", ENGINE, "model_name"), "{{model_name}}"),
            ),
            graph(
                "KV cache in use",
                "percentunit",
                "Share of the KV cache that running requests use, of the fullest engine.",
                Query(highest("vllm:kv_cache_usage_perc", ENGINE, "model_name"), "{{model_name}}"),
            ),
            graph(
                "Time of a request by phase",
                "s",
                "Mean time that finished requests waited in the engine, read their prompts and "
                "generated.",
                *(
                    Query(
                        mean(f"vllm:request_{phase}_time_seconds", ENGINE, "model_name"),
                        f"{{{{model_name}}}} {phase}",
                    )
                    for phase in ("queue", "prefill", "decode")
                ),
            ),
            graph(
                "Tokens",
                "suffix: tok/s",
                "Prompt tokens that the engine computed or found in its cache, and tokens that it "
                "generated.",
                Query(
                    rate("vllm:prompt_tokens_total", ENGINE, "model_name"), "{{model_name}} prompt"
                ),
                Query(
                    rate("vllm:generation_tokens_total", ENGINE, "model_name"),
                    "{{model_name}} completion",
                ),
            ),
        ),
        row(
            "GPUs",
            _gpu(
                "Busy",
                "percentunit",
                "Share of the time in which any kernel runs. Compare it with tensor cores and "
                "memory: a busy GPU may be far from its limits.",
                "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
            ),
            _gpu(
                "Tensor cores",
                "percentunit",
                "Share of the cycles in which tensor cores compute: high while prompts are read.",
                "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
            ),
            _gpu(
                "Memory bandwidth",
                "percentunit",
                "Share of the cycles in which memory is read or written: it bounds the generation "
                "of tokens.",
                "DCGM_FI_PROF_DRAM_ACTIVE",
            ),
            _gpu(
                "Memory in use",
                "percentunit",
                "Share of the memory that weights and the KV cache take. vLLM takes all of it at "
                "its start.",
                "DCGM_FI_DEV_FB_USED",
                of="DCGM_FI_DEV_FB_FREE",
            ),
            _gpu("Power", "watt", "Power that each GPU draws.", "DCGM_FI_DEV_POWER_USAGE"),
            _gpu(
                "Temperature",
                "celsius",
                "Temperature of each GPU. Near its limit, it lowers its clock.",
                "DCGM_FI_DEV_GPU_TEMP",
            ),
            _gpu(
                "Last XID error",
                "short",
                "Number of the last error that the driver reported, 0 for none. NVIDIA's list of "
                "XID errors has their meaning.",
                "DCGM_FI_DEV_XID_ERRORS",
            ),
            graph(
                "Tokens a joule",
                "suffix: tok/J",
                "Completion tokens of all engines, divided by the power of all GPUs.",
                Query(
                    ratio(
                        rate("sluice_worker_completion_tokens_total", NAMESPACE),
                        total("DCGM_FI_DEV_POWER_USAGE", NAMESPACE),
                    ),
                ),
            ),
        ),
        row(
            "Processes",
            graph(
                "Processor time",
                "percentunit",
                "Share of one core, by worker.",
                Query(rate("process_cpu_seconds_total", PROCESS, "instance"), "{{instance}}"),
            ),
            graph(
                "Memory",
                "bytes",
                "Resident memory of each worker process, without its engine process.",
                Query(total("process_resident_memory_bytes", PROCESS, "instance"), "{{instance}}"),
            ),
            graph(
                "Versions",
                "short",
                "Workers by version of Sluice; two versions during a rollout.",
                Query(
                    f'count by (version) (sluice_build_info{{{POOL}, component="worker"}})',
                    "{{version}}",
                ),
                is_stacked=True,
            ),
        ),
    )


def _gpu(title: str, unit: str, description: str, gauge: str, *, of: str = "") -> Panel:
    """Return a panel of a gauge of DCGM exporter for each GPU: its share of itself and `of`."""
    value = highest(gauge, NAMESPACE, "Hostname", "gpu")
    if of:
        value = ratio(value, f"({value} + {highest(of, NAMESPACE, 'Hostname', 'gpu')})")
    return graph(title, unit, description, Query(value, "{{Hostname}} {{gpu}}"))
