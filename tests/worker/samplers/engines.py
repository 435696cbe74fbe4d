"""vLLM with the demo model in separate processes, on either of its model runners."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.sampling import SamplingSpec
from tests.support.interpreter import environment
from worker.engine.base import EngineRequest
from worker.engine.vllm.arguments import GRAMMAR_BACKEND
from worker.engine.vllm.resumption import output_arguments, replayed_token_ids
from worker.samplers.arguments import PROCESSOR, chain_arguments

MODEL_FOLDER = Path(__file__).parents[3] / "worker" / "demo_model" / "checkpoint"
VOCABULARY = 2048
CONTEXT_WINDOW = 1024
MAX_SEQUENCES = 16
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # Everything in one process, which starts in seconds.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Other processes may use the same cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


_NATIVE = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty")
_ARGUMENTS = {
    "model": str(MODEL_FOLDER),
    "max_model_len": CONTEXT_WINDOW,
    "max_num_seqs": MAX_SEQUENCES,
    "max_num_batched_tokens": 4096,
    "enable_chunked_prefill": False,
    "enforce_eager": True,
    # With fewer bits a CPU's results depend on how many tokens are read at once.
    "dtype": "float32",
    "max_logprobs": -1,
    "structured_outputs_config": {"backend": GRAMMAR_BACKEND},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A sequence to be generated."""

    prompt: Sequence[int]
    max_tokens: int = 32
    sampling: SamplingSpec = field(default_factory=lambda: SamplingSpec(seed=0))
    breakers: Sequence[tuple[list[int], list[int]]] = ()
    wants_logprobs: bool = False
    grammar: str = ""
    """A grammar for the text, in llguidance's Lark; any text if empty."""
    output: Sequence[int] = ()
    """What an earlier engine has generated of `max_tokens`; mirostat generates it again."""
    extra_args: dict[str, Any] | None = None
    """In place of those that follow from `sampling`."""

    def arguments(self) -> dict[str, Any]:
        """Return the prompt and the arguments of vLLM's SamplingParams."""
        spec = self.sampling
        resumed = self._resumed()
        arguments = {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "seed": None if spec.is_greedy else spec.seed,
            "temperature": 0.0 if spec.is_greedy else 1.0,
            "grammar": self.grammar,
            "allowed_token_ids": spec.allowed_token_ids or None,
            "logit_bias": spec.logit_bias or None,
            "thinking_token_budget": spec.thinking_budget,
            "extra_args": self.extra_args or output_arguments(resumed),
        }
        if spec.chain is None:
            arguments |= {name: getattr(spec, name) for name in _NATIVE}
        else:
            arguments["extra_args"] = chain_arguments(
                spec,
                seed=spec.seed,
                prompt_tokens=len(self.prompt),
                breakers=list(self.breakers),
                spared_token_ids=[],
                replayed=replayed_token_ids(resumed),
            ) | output_arguments(resumed)
        if self.wants_logprobs:
            arguments |= {"logprobs": VOCABULARY, "flat_logprobs": True}
        return arguments

    def _resumed(self) -> EngineRequest:
        return EngineRequest(
            id="",
            prompt_token_ids=list(self.prompt),
            output_token_ids=list(self.output),
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            seed=self.sampling.seed,
            cache_salt="",
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request."""

    tokens: list[int]
    logprobs: npt.NDArray[np.float64] | None
    """The model's own log-probabilities at each position, before any chain."""


class Engines:
    """Engines on the older ("v1") or the newer ("v2") runner, by name. Close them at the end.

    `plain` has no chains; `chained` and `ahead` have. `ahead` also schedules a step while another
    one runs, which only the newer runner supports on a CPU. The default run has `ahead` alone.
    """

    def __init__(self, runner: str, *, is_long: bool) -> None:
        ours, theirs = socket.socketpair()
        runner_environment = environment() if runner == "v2" else {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.worker.samplers.engine_program",
                    str(theirs.fileno()),
                ],
                env=os.environ | _ENVIRONMENT | runner_environment,
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[3],
            )
        self._connection = Connection(ours.detach())
        chained = _ARGUMENTS | {"logits_processors": [PROCESSOR]}
        engines = {}
        if runner == "v2":
            engines["ahead"] = chained | {"is_async": True}
        if is_long:
            engines["plain"] = _ARGUMENTS | {"is_async": False}
            engines["chained"] = chained | {"is_async": False}
        self._connection.send(engines)

    @cached_property
    def descriptions(self) -> dict[str, tuple[str, bool]]:
        """Module of each started engine's runner, and whether it schedules ahead."""
        descriptions: dict[str, tuple[str, bool]] = self._connection.recv()
        return descriptions

    def generate(self, requests: Sequence[Request], engine: str = "chained") -> list[Completion]:
        """Generate all concurrently; more than fit into a batch wait. Raises RefusedError."""
        assert engine in self.descriptions
        self._connection.send((engine, [request.arguments() for request in requests]))
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise RefusedError(answer)
        return [Completion(*each) for each in answer]

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()


class RefusedError(Exception):
    """vLLM refused a request."""


@dataclass(frozen=True)
class Side:
    """An engine with chains."""

    engines: Engines
    name: str
    is_fast: bool

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all at once."""
        return self.engines.generate(requests, self.name)
