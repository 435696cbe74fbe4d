"""Process with two vLLM engines, with and without the sampler chain; `bench.samplers` starts it.

Both engines run inside this process, so that only the engine's step is timed. The argument is JSON:
the number of `rounds`, `tokens` and `sequences`, and vLLM's `arguments`. It prints one line of JSON
for each measurement.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from contract.sampling import DEFAULT_SAMPLERS, Dry, Mirostat, Sampler, SamplerChain, SamplingSpec
from worker.samplers.arguments import PROCESSOR, chain_arguments
from worker.samplers.breakers import DryBreakers

PROMPT_TOKENS = 48
Breakers = list[tuple[list[int], list[int]]]

_BREAKERS = ["\n", ":", '"', "*"]
_CHAINS = {
    "llama.cpp's defaults": SamplingSpec(
        seed=0,
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        chain=SamplerChain(order=list(DEFAULT_SAMPLERS), penalty_last_n=64),
    ),
    "mirostat 2": SamplingSpec(
        seed=0, chain=SamplerChain(order=[], mirostat=Mirostat(version=2, tau=5.0, eta=0.1))
    ),
    "DRY": SamplingSpec(
        seed=0,
        chain=SamplerChain(
            order=[Sampler.DRY],
            dry=Dry(
                multiplier=0.8, base=1.75, allowed_length=2, last_n=-1, breakers=list(_BREAKERS)
            ),
        ),
    ),
}


def main() -> None:
    """Measure everything, round by round."""
    load = json.loads(sys.argv[1])
    tokens, sequences, arguments = load["tokens"], load["sequences"], load["arguments"]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    plain, chained = (_engine(arguments, sequences, each) for each in (None, [PROCESSOR]))
    breakers = _breakers(Path(arguments["model"]))
    cases = [(plain, "not loaded", 0), (chained, "no chain", 0)]
    cases += [(chained, chain, users) for chain in _CHAINS for users in (1, sequences)]
    for number in range(load["rounds"] + 1):
        # Reverse the order every round, so that no engine is always first.
        for engine, chain, users in cases[:: 1 if number % 2 else -1]:
            params = list(_params(chain, users, sequences, tokens, breakers))
            seconds = _run(engine, params)
            if number:  # The first round only warms up.
                step = 1e3 * seconds / tokens
                print(json.dumps({"chain": chain, "users": users, "milliseconds": step}))
    sys.stdout.flush()
    os._exit(0)  # Skip vLLM's cleanup.


def _engine(arguments: Mapping[str, Any], sequences: int, processors: Sequence[str] | None) -> Any:
    from vllm import LLM

    return LLM(
        **{
            "max_model_len": 1024,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": sequences * PROMPT_TOKENS,
            "logits_processors": processors,
            **arguments,
        }
    )


def _breakers(model: Path) -> Breakers:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return DryBreakers(tokenizer).resolve(_BREAKERS)


def _params(
    chain: str, users: int, sequences: int, tokens: int, breakers: Breakers
) -> Iterator[Any]:
    """Yield the sampling parameters of each sequence; the first `users` have the chain."""
    from vllm import SamplingParams

    for number in range(sequences):
        arguments = None
        if number < users:
            arguments = chain_arguments(
                _CHAINS[chain],
                seed=number,
                prompt_tokens=PROMPT_TOKENS,
                breakers=breakers,
                spared_token_ids=[],
            )
        yield SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=arguments
        )


def _run(engine: Any, params: Sequence[Any]) -> float:
    """Return the seconds to generate a full batch."""
    from vllm.inputs import tokens_input

    random = Random(0)
    prompts = [tokens_input(random.choices(range(10, 2000), k=PROMPT_TOKENS)) for _ in params]
    began = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
