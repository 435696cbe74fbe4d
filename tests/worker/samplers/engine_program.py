"""A process with vLLM, which generates the requests of `tests.worker.samplers.engines`."""

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


def main() -> None:
    """Start engines with the arguments of the first message, then answer lists of requests."""
    connection = Connection(int(sys.argv[1]))
    engines = {name: _start(**arguments) for name, arguments in connection.recv().items()}
    connection.send({name: _description(engine) for name, engine in engines.items()})
    while True:
        try:
            name, requests = connection.recv()
        except EOFError:
            # The process's exit does the rest of vLLM's cleanup.
            os._exit(0)
        connection.send(_answer(engines[name], requests))


def _start(*, is_async: bool, **arguments: Any) -> Any:
    from vllm import LLM
    from vllm.config.reasoning import ReasoningConfig
    from vllm.engine.arg_utils import EngineArgs

    create_engine_config = EngineArgs.create_engine_config

    def create(engine_args: Any, *args: Any, **options: Any) -> Any:
        config = create_engine_config(engine_args, *args, **options)
        # On a CPU vLLM turns scheduling ahead off, as it gains nothing there; its runner for GPUs
        # supports it.
        config.scheduler_config.async_scheduling = is_async
        return config

    EngineArgs.create_engine_config = create
    try:
        return LLM(
            **arguments,
            reasoning_config=ReasoningConfig(
                reasoning_start_str="<think>", reasoning_end_str="</think>"
            ),
        )
    finally:
        EngineArgs.create_engine_config = create_engine_config


def _description(engine: Any) -> tuple[str, bool]:
    """Return the runner, and whether the next step is scheduled while one still runs."""
    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return type(runner).__module__, core.batch_queue is not None


def _answer(engine: Any, requests: list[dict[str, Any]]) -> Any:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.inputs import tokens_input
    from vllm.sampling_params import StructuredOutputsParams

    for request in requests:
        if grammar := request.pop("grammar"):
            request["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
    prompts = [tokens_input(request.pop("prompt")) for request in requests]
    params = [SamplingParams(detokenize=False, **request) for request in requests]
    try:
        outputs = engine.generate(prompts, params, use_tqdm=False)
    except VLLMClientError as error:
        return error.args[0]
    return [_output(output.outputs[0]) for output in outputs]


def _output(output: Any) -> tuple[list[int], Any]:
    """Return the tokens, and for each of them the model's log-probabilities by token id."""
    if not output.logprobs:
        return list(output.token_ids), None
    flat = output.logprobs
    rows = np.full((len(output.token_ids), max(flat.token_ids) + 1), -np.inf)
    for row, start, end in zip(rows, flat.start_indices, flat.end_indices, strict=True):
        row[flat.token_ids[start:end]] = flat.logprobs[start:end]
    return list(output.token_ids), rows


if __name__ == "__main__":
    main()
