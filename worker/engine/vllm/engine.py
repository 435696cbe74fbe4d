"""The vLLM engine: vLLM's engine core, with its outputs read once per step.

`AsyncLLM` starts the engine and validates requests. Its output handling wakes a task for every
token and is not used. Requests go directly to the engine core, and `receiving.py` reads its
outputs, one batch for each step. These parts of vLLM are private, so this module fits one version
of it.
"""

import asyncio
import copy
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

from contract.messages import AUDIO_RATE, SAMPLE_BYTES, Feature, Pooling
from contract.sampling import SamplingSpec
from worker.engine.base import (
    AdapterRejectedError,
    EngineAdapter,
    EngineDeadError,
    EngineInfo,
    EngineRequest,
    EngineStep,
    Held,
    InvalidRequestError,
    nothing_allowed,
)
from worker.engine.vllm.arguments import engine_arguments, environment_variables, publishes_cache
from worker.engine.vllm.bans import BannedOutputs, Bans
from worker.engine.vllm.cache_events import CacheEvents
from worker.engine.vllm.description import describe
from worker.engine.vllm.exactness import read_exactness
from worker.engine.vllm.metrics import EngineMetrics
from worker.engine.vllm.parameters import ParameterFactory
from worker.engine.vllm.parser_format import parser_format
from worker.engine.vllm.parsers import VllmParsers
from worker.engine.vllm.pooling import pooling_arguments, pooling_support
from worker.engine.vllm.processes import EngineProcesses
from worker.engine.vllm.prompt_turns import payer
from worker.engine.vllm.prompts import (
    Prompts,
    clip_seconds,
    decoder_tokens,
    fitting_max_tokens,
)
from worker.engine.vllm.receiving import receive_outputs, step_of
from worker.engine.vllm.resumption import ResumedSequences, replayed_token_ids
from worker.parsing.base import NO_PARSERS, Parsers
from worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

_START_STOP_SECONDS = 3.0
_WARM_UP_GRAMMAR = 'start: "a"'


def _set_environment(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _begin(settings: WorkerSettings) -> bool:
    """Set environment variables before vLLM imports its kernels. Return whether it uses a CPU."""
    _set_environment(environment_variables(settings))
    from vllm.platforms import current_platform

    is_cpu = bool(current_platform.is_cpu())
    if settings.reproducible and not is_cpu:
        _set_environment({"VLLM_BATCH_INVARIANT": "1"})
    return is_cpu


def _set_compiler(*, is_used: bool) -> None:
    """Let vLLM's processes compile nothing, if so asked.

    Even if its model runs without a compiler, vLLM compiles a part of its sampler. On a CPU this
    needs a C++ compiler, and takes 15 s where its results are not cached.
    """
    import torch

    if not is_used:
        _set_environment({"TORCHDYNAMO_DISABLE": "1"})
        torch.compiler.set_stance("force_eager")  # For forks of this process.


def _has_bfloat16() -> bool:
    """Whether this CPU multiplies 16-bit numbers: oneDNN needs AVX-512; PyTorch itself is slow."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability()) != "AVX2"


def read_arguments(settings: WorkerSettings) -> tuple[Any, bool]:
    """Return vLLM's engine arguments, and whether it uses a CPU. Imports vLLM.

    Raises ValueError for arguments that cannot be used.
    """
    is_cpu = _begin(settings)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    arguments = engine_arguments(
        settings,
        AsyncEngineArgs,
        is_cpu=is_cpu,
        can_sleep=current_platform.is_sleep_mode_available(),
        has_bfloat16=_has_bfloat16(),
    )
    return arguments, is_cpu


class VllmEngine:
    """vLLM in separate processes, on the device of this machine."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._llm: Any = None
        self._closing = False
        self._starting: asyncio.Future[None] | None = None
        self._processes = EngineProcesses()
        self._resumed = ResumedSequences()
        self._banned = BannedOutputs()
        self.parsers: Parsers = NO_PARSERS
        self._cache_events: CacheEvents | None = None
        # vLLM's tokenizer is not thread-safe, so one thread does everything that
        # needs it. The other thread keeps grammars from waiting for images.
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._compiling = ThreadPoolExecutor(1, "compile")

    async def start(self) -> None:
        """Load the model in a thread: this takes half a minute or more."""
        loop = asyncio.get_running_loop()
        starting = self._starting = loop.create_future()

        def start() -> None:
            # The engine's processes inherit this mask: Ctrl-C
            # must reach only the worker, which drains.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._start()
            except BaseException as error:  # Raised in the callers.
                outcome: BaseException | None = error
            else:
                outcome = None
            loop.call_soon_threadsafe(_settle, starting, outcome)

        Thread(target=start, name="start-engine", daemon=True).start()
        await asyncio.shield(starting)
        self._processes.look()
        receive_outputs(self._llm.engine_core)
        self._tasks = await self._llm.get_supported_tasks()
        if self._settings.runner == "pooling":
            support = pooling_support(
                self._llm.model_config,
                self._tasks,
                has_own_pairs=self._has_own_pairs,
                has_given_template=self._settings.chat_template is not None,
            )
            self.info: EngineInfo = replace(self.info, pooling=support)
        elif self._settings.runner == "transcription":
            seconds = clip_seconds(self._llm.model_config, self._model_class)
            self.info = replace(self.info, clip_seconds=seconds)
        own = environment_variables(self._settings)
        variables = {name: value for name, value in os.environ.items() if name not in own}
        exactness = await read_exactness(self._llm, self._settings.engine_arguments, variables)
        self.info = replace(self.info, exactness=exactness)
        await self._warm_up()

    async def aclose(self) -> None:
        """Stop the engine's processes."""
        self._closing = True
        if self._starting is not None and not self._starting.done():
            await asyncio.to_thread(self._processes.kill)
            await asyncio.wait([self._starting], timeout=_START_STOP_SECONDS)
        for executor in (self._tokenizing, self._compiling):
            executor.shutdown(wait=False, cancel_futures=True)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)
            await _end_messaging(llm.engine_core)
        if self._cache_events is not None:
            self._cache_events.close()
        await asyncio.to_thread(self._processes.kill)

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Add the sequences of one job.

        They differ in id, seed, `output_token_ids` and `prompt_logprobs` only; inputs of a pooling
        model differ in `prompt_token_ids` and `second_text`.
        Slow if the prompt has images or the job has a grammar. Raises EngineDeadError, or
        InvalidRequestError, after which the caller must abort the sequences.
        """
        if requests[0].pooling is not None:
            for made in [self._check_input(request) for request in requests]:
                await self._add(made)
            return
        executor = self._executor_for(requests[0])
        if executor is None:
            core_requests, bans = self._check(requests)
        else:
            loop = asyncio.get_running_loop()
            core_requests, bans = await loop.run_in_executor(executor, self._check, requests)
        for request, core_request in zip(requests, core_requests, strict=True):
            if request.output_token_ids:
                self._resumed.add(
                    request.id,
                    prompt_tokens=len(core_request.prompt_token_ids),
                    replayed_tokens=len(replayed_token_ids(request)),
                )
            self._banned.add(request, bans)
            await self._add(core_request)

    async def abort(self, sequence_ids: Sequence[str]) -> None:
        """End sequences immediately, without further output. Unknown ids are ignored."""
        for followers in (self._resumed, self._banned, self._metrics):
            followers.remove(sequence_ids)
        try:
            await self._llm.engine_core.abort_requests_async(list(sequence_ids))
        except self._dead_errors as error:
            raise EngineDeadError(str(error)) from None

    async def load_adapter(self, adapter: EngineAdapter) -> None:
        """Load an adapter. Raises AdapterRejectedError or EngineDeadError.

        A request with an adapter that cannot be loaded would end the engine.
        """
        try:
            await self._llm.engine_core.add_lora_async(self._lora_request(adapter))
        except self._dead_errors as error:
            raise EngineDeadError(str(error)) from None
        except Exception as error:  # vLLM raises what the loading raised in its process.
            raise AdapterRejectedError(str(error)) from None

    async def unload_adapter(self, adapter: EngineAdapter) -> None:
        """Unload an adapter. Raises EngineDeadError."""
        try:
            await self._llm.engine_core.remove_lora_async(adapter.number)
        except self._dead_errors as error:
            raise EngineDeadError(str(error)) from None

    def _lora_request(self, adapter: EngineAdapter) -> Any:
        # vLLM's prefix cache distinguishes adapters by their names.
        return self._make_lora_request(adapter.digest, adapter.number, adapter.folder)

    async def step(self) -> EngineStep:
        """Wait for the outputs of the next step. Raises EngineDeadError."""
        core = self._llm.engine_core
        try:
            outputs = await core.get_output_async()
        except Exception as error:
            # Without the task that receives outputs there will be none.
            if isinstance(error, self._dead_errors) or core.resources.output_queue_task.done():
                raise EngineDeadError(str(error)) from None
            raise
        preemptions = self._metrics.note(outputs)
        step = step_of(outputs)
        outputs = self._banned.ended(self._resumed.own(step.outputs))
        return EngineStep(outputs, step.stats, preemptions)

    async def read_cache(self, held: Held, /) -> None:
        """Note the prefixes that the cache has gained and lost since the last call."""
        if self._cache_events is not None:
            await self._cache_events.read(held)

    async def sleep(self) -> None:
        """Move the weights to the machine's memory and free the KV cache. Raises EngineDeadError.

        On a CPU, vLLM clears its caches and keeps the memory.
        """
        try:
            await self._llm.sleep(level=1)
        except Exception as error:  # What failed in a process of the engine leaves it in no state.
            raise EngineDeadError(f"cannot sleep: {error}") from None
        if self._cache_events is not None:
            await self._cache_events.clear()

    async def wake(self) -> None:
        """Load the weights into the device again. Raises EngineDeadError."""
        try:
            is_awake = await self._llm.wake_up()
        except Exception as error:  # As above.
            raise EngineDeadError(f"cannot wake up: {error}") from None
        if not is_awake:
            raise EngineDeadError("cannot wake up")

    # --- starting ------------------------------------------------------------------------------

    def _start(self) -> None:
        arguments, is_cpu = read_arguments(self._settings)
        import vllm
        import zmq
        from vllm.config.kv_events import KVEventsConfig
        from vllm.config.reasoning import ReasoningConfig
        from vllm.distributed.kv_events import KVEventBatch
        from vllm.inputs import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.model_executor.model_loader import get_model_cls
        from vllm.model_executor.models.interfaces import supports_score_template
        from vllm.renderers.hf import resolve_chat_template
        from vllm.renderers.inputs.preprocess import parse_model_prompt
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.utils.network_utils import get_open_zmq_ipc_path
        from vllm.v1.engine import exceptions
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics import stats
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend

        _set_compiler(is_used=not (is_cpu and arguments.enforce_eager))
        parsers = parser_format(
            self._settings,
            lambda: cached_tokenizer_from_config(arguments.create_model_config()),
        )
        if parsers.reasoning_end:
            # The bare mark: a budget that ends with one token
            # behaves the same after any earlier tokens.
            arguments.reasoning_config = ReasoningConfig(
                reasoning_start_str=parsers.reasoning_start,
                reasoning_end_str=parsers.reasoning_end,
            )
        if self._closing:
            raise EngineDeadError("closed while starting")
        if publishes_cache(self._settings, arguments):
            endpoint = get_open_zmq_ipc_path()
            self._cache_events = CacheEvents(endpoint, KVEventBatch)
            # Nobody asks for messages again, so vLLM keeps none.
            arguments.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, buffer_steps=1
            )
        # Outside of an event loop, AsyncLLM does not start its own output handling.
        self._llm = AsyncLLM.from_engine_args(arguments)
        self._metrics = EngineMetrics(self._llm.logger_manager, stats)
        self._client_errors = (vllm.exceptions.VLLMClientError, ValueError, TypeError)
        self._make_lora_request = LoRARequest
        self._pooling_params = vllm.PoolingParams
        self._has_token_types = "token_type_ids" in getattr(
            self._llm.tokenizer, "model_input_names", ()
        )
        self._model_class = get_model_cls(self._llm.model_config)
        self._has_own_pairs = supports_score_template(self._model_class)
        self._dead_errors = (exceptions.EngineDeadError, zmq.ZMQError)
        self._prompts = Prompts(
            self._llm, tokens_input, partial(parse_model_prompt, self._llm.model_config)
        )
        self.info = describe(
            self._llm,
            self._prompts,
            self._settings,
            version=vllm.__version__,
            has_grammars=GuidanceBackend.is_tokenizer_supported(self._llm.tokenizer),
            parsers=parsers,
            publishes_cache=self._cache_events is not None,
            resolve_template=partial(
                resolve_chat_template,
                self._llm.tokenizer,
                None,
                model_config=self._llm.model_config,
            ),
        )
        if self._cache_events is not None:
            self._cache_events.begin(self.info.cache_block_tokens)
        if parsers.tool_parser or parsers.reasoning_parser:
            self.parsers = VllmParsers(
                parsers.tool_parser, parsers.reasoning_parser, self.info.tokenizer_json
            )
        self._parameters = ParameterFactory(
            vllm.sampling_params,
            self.info.tokenizer_json,
            self.info.eos_token_ids,
            # vLLM's CPU runner draws each seeded sequence separately, which costs a thirtieth
            # of the throughput of a full batch. Its GPU runner draws all sequences alike.
            seeds_cost_time=is_cpu,
        )
        # A thinking budget forces this token whatever else is forbidden.
        end = self._llm.tokenizer.convert_tokens_to_ids(parsers.reasoning_end or [])
        self._forced = {end} if isinstance(end, int) else set()

    async def _warm_up(self) -> None:
        """Run one request of every kind, because first requests take seconds.

        If `worker.engine.vllm.plugin` is not installed, this request fails instead of a client's.
        """
        support = self.info.pooling
        request = EngineRequest(
            id="warm-up",
            prompt_token_ids=[0, 0],
            max_tokens=2,
            sampling=SamplingSpec(seed=0, ignore_eos=True),
            seed=0,
            cache_salt="warm-up",
            logprobs=1,
            prompt_logprobs=1,
            grammar=_WARM_UP_GRAMMAR if Feature.STRUCTURE in self.info.features else "",
            pooling=None if support is None else Pooling(support.task, [2]),
            audio=bytes(AUDIO_RATE * SAMPLE_BYTES) if self.info.clip_seconds else b"",
        )
        await self.submit([request])
        while not any(output.end for output in (await self.step()).outputs):
            pass

    # --- requests ------------------------------------------------------------------------------

    def _executor_for(self, request: EngineRequest) -> ThreadPoolExecutor | None:
        """Return the executor for a job's check if it would block the event loop too long."""
        chain = request.sampling.chain
        if request.images or request.audio or request.sampling.bad_words:
            return self._tokenizing
        if request.grammar or (chain is not None and chain.dry is not None):
            return self._compiling
        return None

    def _check_input(self, request: EngineRequest) -> Any:
        """Check an input of a pooling model with vLLM. Raises InvalidRequestError."""
        arguments = pooling_arguments(request, has_token_types=self._has_token_types)
        with self._rejecting():
            prompt, params = self._prompts.make(request), self._pooling_params(**arguments)
            return self._processed(request, prompt, params)

    def _processed(self, request: EngineRequest, prompt: Any, params: Any) -> Any:
        return self._llm.input_processor.process_inputs(
            request.id,
            prompt,
            params,
            supported_tasks=self._tasks,
            lora_request=None if request.adapter is None else self._lora_request(request.adapter),
            priority=int(request.is_preemptible),
            session_id=payer(request.tenant, request.weight),
        )

    @contextmanager
    def _rejecting(self) -> Iterator[None]:
        """Convert vLLM's errors about a request. Raises InvalidRequestError."""
        try:
            yield
        except self._client_errors as error:
            _log.info("Rejected a request: %s", error)
            raise InvalidRequestError(str(error.args[0]) if error.args else "refused") from None

    def _check(self, requests: Sequence[EngineRequest]) -> tuple[list[Any], Bans]:
        """Check a job with vLLM before it reaches the engine's processes."""
        first, *others = requests
        with self._rejecting():
            prompt = self._prompts.make(first)
            prompt_tokens = decoder_tokens(prompt)
            max_tokens = fitting_max_tokens(first, prompt_tokens, self.info.context_window)
            for request in requests:
                self._check_output(request, prompt_tokens, max_tokens)
            params = self._parameters.make(
                first, prompt_tokens=prompt_tokens, max_tokens=max_tokens
            )
            made = self._processed(first, prompt, params)
        self._parameters.forbid_words(made.sampling_params)
        is_bounded = first.sampling.thinking_budget is not None
        bans = Bans(first, made.sampling_params, forced=self._forced if is_bounded else ())
        if not bans.leave_any(self.info.vocabulary_size):
            raise nothing_allowed(first.sampling)
        return [made, *(self._sibling(made, each) for each in others)], bans

    def _check_output(self, request: EngineRequest, prompt_tokens: int, max_tokens: int) -> None:
        """Reject earlier tokens that would break vLLM's processes. Raises InvalidRequestError."""
        token_ids = request.output_token_ids
        if not token_ids:
            return
        largest, window = self.info.vocabulary_size - 1, self.info.context_window
        if not (min(token_ids) >= 0 and max(token_ids) <= largest):
            raise InvalidRequestError(f"Earlier tokens must have ids between 0 and {largest}.")
        if not (len(token_ids) < max_tokens and prompt_tokens + len(token_ids) < window):
            raise InvalidRequestError(
                f"Earlier tokens must leave room for another one: be less than max_tokens "
                f"({max_tokens}), and less than {window} with the prompt of {prompt_tokens}. "
                f"Given: {len(token_ids)}"
            )

    def _sibling(self, first: Any, request: EngineRequest) -> Any:
        sibling = copy.copy(first)
        sibling.request_id = request.id
        sibling.sampling_params = self._parameters.vary(first.sampling_params, request)
        return sibling

    async def _add(self, core_request: Any) -> None:
        self._metrics.added(core_request)
        try:
            await self._llm.engine_core.add_request_async(core_request)
        except self._dead_errors as error:
            raise EngineDeadError(str(error)) from None
        except (OverflowError, TypeError, ValueError):
            # Raised while the request is encoded, so nothing was sent.
            self._metrics.remove([core_request.request_id])
            raise InvalidRequestError("A number of the request is too large.") from None


async def _end_messaging(engine_core: Any) -> None:
    """Terminate ZeroMQ's threads. vLLM closes its sockets, but leaves these to garbage collection.

    This terminates the context that owns the threads, not the one that created asyncio's sockets.
    The latter would end them without notice to the owner, which warns when it is collected.
    """
    ending = Thread(target=engine_core.resources.ctx.term, name="end-messaging", daemon=True)
    ending.start()
    await asyncio.to_thread(ending.join, _START_STOP_SECONDS)


def _settle(future: "asyncio.Future[None]", outcome: BaseException | None) -> None:
    if outcome is None:
        future.set_result(None)
    else:
        future.set_exception(outcome)
