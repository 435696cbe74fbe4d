"""vLLM's engine core, read once per step. The only module that imports vllm.

`AsyncLLM` starts the engine and checks requests; its own output handling, which wakes a task for every
token, is left out: requests go straight to the engine core, and its outputs are read here, one batch for
each step. These parts of vLLM are private, so this module fits one version of it.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import Any

from contract.sampling import LOGPROBS, SamplingSpec
from worker.engine.base import (
    EngineDeadError,
    EngineInfo,
    EngineRequest,
    EngineStats,
    EngineStep,
    InvalidRequestError,
    SequenceEnd,
    SequenceOutput,
    TokenScores,
)
from worker.settings import Settings

_log = logging.getLogger(__name__)

_SMALLEST_TOP_P = 1e-6
_CPU_STEP_TOKENS = 4096
_FIXED_ARGUMENTS = {"model"}
_CPU_FIXED_ARGUMENTS = {"enable_chunked_prefill", "max_num_batched_tokens"}
_ENDS = {
    "stop": SequenceEnd.STOP,
    "repetition": SequenceEnd.STOP,
    "length": SequenceEnd.LENGTH,
    "abort": SequenceEnd.ABORTED,
    "error": SequenceEnd.ERROR,
}
_START_STOP_SECONDS = 3.0


class VllmEngine:
    """vLLM in processes of its own, on whatever device this machine has."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._llm: Any = None
        self._closing = False
        self._starting: asyncio.Future[None] | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine can take; known once it has started."""
        return self._info

    async def start(self) -> None:
        """Load the model in a thread: this takes half a minute and more."""
        loop = asyncio.get_running_loop()
        starting = self._starting = loop.create_future()

        def start() -> None:
            # The engine's processes inherit this: a Ctrl-C is for the worker, which drains first.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._start()
            except BaseException as error:  # noqa: BLE001  (handed to whoever awaits)
                outcome: BaseException | None = error
            else:
                outcome = None
            loop.call_soon_threadsafe(_settle, starting, outcome)

        Thread(target=start, name="start-engine", daemon=True).start()
        await asyncio.shield(starting)
        self._tasks = await self._llm.get_supported_tasks()
        await self._warm_up()

    async def aclose(self) -> None:
        """Stop the engine's processes."""
        self._closing = True
        if self._starting is not None and not self._starting.done():
            for child in multiprocessing.active_children():
                child.kill()
            await asyncio.wait([self._starting], timeout=_START_STOP_SECONDS)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)
            llm.engine_core.ctx.destroy(linger=0)

    async def submit(self, request: EngineRequest) -> None:
        """Add a sequence. Raises InvalidRequestError or EngineDeadError."""
        core_request = self._check(request)
        try:
            await self._llm.engine_core.add_request_async(core_request)
        except self._dead_errors as error:
            raise EngineDeadError(str(error)) from None
        except (OverflowError, TypeError, ValueError):
            # Raised while the request is put into bytes, so nothing of it has been sent.
            raise InvalidRequestError("A number of the request is too large.") from None

    async def abort(self, sequence_ids: Sequence[str]) -> None:
        """End sequences at once, without a further output. Unknown ids are ignored."""
        try:
            await self._llm.engine_core.abort_requests_async(list(sequence_ids))
        except self._dead_errors as error:
            raise EngineDeadError(str(error)) from None

    async def step(self) -> EngineStep:
        """Wait for the next step's outputs. Raises EngineDeadError."""
        try:
            outputs = await self._llm.engine_core.get_output_async()
        except Exception as error:  # noqa: BLE001  (whatever ends the stream of outputs)
            raise EngineDeadError(str(error)) from None
        stats = outputs.scheduler_stats
        if stats is not None:
            self._llm.logger_manager.record(
                scheduler_stats=stats, iteration_stats=None, engine_idx=outputs.engine_index
            )
        return EngineStep([_output(each) for each in outputs.outputs], _stats(stats))

    # --- starting ------------------------------------------------------------------------------

    def _start(self) -> None:
        _set_environment(self._settings)
        import vllm
        import zmq
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.inputs import tokens_input
        from vllm.platforms import current_platform
        from vllm.v1.engine import exceptions
        from vllm.v1.engine.async_llm import AsyncLLM

        self._is_cpu = current_platform.is_cpu()
        arguments = engine_arguments(self._settings, AsyncEngineArgs, is_cpu=self._is_cpu)
        if self._closing:
            raise EngineDeadError("closed while starting")
        # Made outside of an event loop, AsyncLLM does not start its own output handling.
        self._llm = AsyncLLM.from_engine_args(arguments)
        self._tokens_input = tokens_input
        self._params_type = vllm.SamplingParams
        self._client_errors = (vllm.exceptions.VLLMClientError, ValueError, TypeError)
        self._dead_errors = (exceptions.EngineDeadError, zmq.ZMQError)
        self._info = self._describe(vllm.__version__)

    def _describe(self, version: str) -> EngineInfo:
        config = self._llm.vllm_config
        cache = config.cache_config
        tokenizer = self._llm.tokenizer
        return EngineInfo(
            name=f"vllm {version}",
            context_window=config.model_config.max_model_len,
            vocabulary_size=config.model_config.get_vocab_size(),
            max_sequences=config.scheduler_config.max_num_seqs,
            kv_cache_tokens=cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size,
            tokenizer_json=_tokenizer_json(self._settings.model_path, tokenizer),
            bos_token_id=tokenizer.bos_token_id,
        )

    async def _warm_up(self) -> None:
        """Run one request of every kind, since what is done for the first time takes seconds.

        A short one: where `worker.engine.plugin` is not installed, it fails now and not for a client.
        """
        request = EngineRequest(
            id="warm-up",
            prompt_token_ids=[0, 0],
            max_tokens=2,
            sampling=SamplingSpec(seed=0, ignore_eos=True),
            seed=0,
            cache_salt="warm-up",
            logprobs=1,
            prompt_logprobs=1,
        )
        await self.submit(request)
        while not any(output.end for output in (await self.step()).outputs):
            pass

    # --- requests ------------------------------------------------------------------------------

    def _check(self, request: EngineRequest) -> Any:
        """Have vLLM check a request, before anything reaches the engine's processes."""
        try:
            return self._llm.input_processor.process_inputs(
                request.id,
                self._tokens_input(request.prompt_token_ids, cache_salt=request.cache_salt or None),
                self._sampling_params(request, request.sampling),
                supported_tasks=self._tasks,
            )
        except self._client_errors as error:
            _log.info("Refused a request: %s", error)
            raise InvalidRequestError(str(error.args[0]) if error.args else "refused") from None

    def _is_seeded(self, sampling: SamplingSpec) -> bool:
        # vLLM's runner for CPUs draws each seeded sequence by itself, which takes a thirtieth of the
        # throughput of a full batch; its runner for GPUs draws all alike.
        return not sampling.is_greedy and (sampling.is_seed_requested or not self._is_cpu)

    def _sampling_params(self, request: EngineRequest, sampling: SamplingSpec) -> Any:
        return self._params_type(
            temperature=sampling.temperature,
            top_p=max(sampling.top_p, _SMALLEST_TOP_P),
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias or None,
            ignore_eos=sampling.ignore_eos,
            seed=request.seed if self._is_seeded(sampling) else None,
            max_tokens=request.max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            detokenize=False,
        )


def engine_arguments(settings: Settings, engine_args: Any, *, is_cpu: bool) -> Any:
    """Return vLLM's engine arguments (an instance of `engine_args`) for these settings."""
    more = settings.engine_arguments
    unknown = sorted(set(more) - {field.name for field in fields(engine_args)})
    if unknown:
        raise ValueError(f"engine_arguments: vLLM knows no {', '.join(unknown)}")
    fixed = _FIXED_ARGUMENTS | (_CPU_FIXED_ARGUMENTS if is_cpu else set())
    if chosen := sorted(fixed.intersection(more)):
        raise ValueError(f"engine_arguments: {', '.join(chosen)} cannot be chosen here")
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "served_model_name": settings.served_name,
        # Defaults that a model brings along would change requests that leave a parameter out.
        "generation_config": "vllm",
        "max_logprobs": int(LOGPROBS.maximum),
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "enforce_eager": is_cpu if settings.enforce_eager is None else settings.enforce_eager,
        **({} if settings.context_window is None else {"max_model_len": settings.context_window}),
        **({} if settings.max_sequences is None else {"max_num_seqs": settings.max_sequences}),
        **more,
    }
    if is_cpu:
        # A seeded prompt that is split over steps kills the engine on a CPU, so none is split.
        arguments["enable_chunked_prefill"] = False
        longest = engine_args(**arguments).create_model_config().max_model_len
        arguments["max_num_batched_tokens"] = max(longest, _CPU_STEP_TOKENS)
    return engine_args(**arguments)


def _set_environment(settings: Settings) -> None:
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if settings.log_level == "DEBUG" else "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_kv_cache_gib),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "HF_HUB_OFFLINE": "1" if Path(settings.model_path).is_dir() else "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _tokenizer_json(model_path: str, tokenizer: Any) -> bytes:
    path = Path(model_path) / "tokenizer.json"
    if path.is_file():
        return path.read_bytes()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{model_path}: the model has no tokenizer in the `tokenizers` format")
    content: str = backend.to_str()
    return content.encode()


def _settle(future: "asyncio.Future[None]", outcome: BaseException | None) -> None:
    if outcome is None:
        future.set_result(None)
    else:
        future.set_exception(outcome)


def _stats(stats: Any) -> EngineStats | None:
    if stats is None:
        return None
    waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
    return EngineStats(stats.num_running_reqs, waiting, stats.kv_cache_usage)


def _output(output: Any) -> SequenceOutput:
    reason, prefill = output.finish_reason, output.prefill_stats
    stop = output.stop_reason
    return SequenceOutput(
        output.request_id,
        output.new_token_ids,
        None if reason is None else _ENDS[str(reason)],
        stop if isinstance(stop, int) else None,
        None if output.new_logprobs is None else _scores(output.new_logprobs),
        None
        if output.new_prompt_logprobs_tensors is None
        else _scores(output.new_prompt_logprobs_tensors),
        None if prefill is None else prefill.num_cached_tokens,
    )


def _scores(logprobs: Any) -> list[TokenScores]:
    """Pair the rows of token ids and log-probabilities; column 0 is the token that stands there."""
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(logprobs[0].tolist(), logprobs[1].tolist(), strict=True)
    ]
