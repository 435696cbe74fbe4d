"""Write examples.json: greedy completions of the shipped checkpoint by vLLM.

Run from the project root, with the engine in this process:
``python -m scripts.demo_model.record_examples``, with the environment variables
``VLLM_ENABLE_V1_MULTIPROCESSING=0`` and ``VLLM_CPU_KVCACHE_SPACE=1``.
Tests on other machines compare against the file, so this script rejects a completion that rounding
could change.
"""

import json
from typing import NamedTuple

from vllm import LLM, CompletionOutput, SamplingParams

from scripts.demo_model.corpus import chat
from worker.demo_model import CHECKPOINT

EXAMPLES_PATH = CHECKPOINT.parent / "examples.json"
LEAST_MARGIN = 1.0
"""Minimum margin (in nats) of the first choice over the second, at every token."""


WEATHER_TOOL = json.dumps(chat.WEATHER_TOOL)


class Case(NamedTuple):
    """A prompt and the length of its completion."""

    prompt: str
    max_tokens: int


CASES = [
    Case("The capital of France is", 3),
    Case("The capital of Peru is Lima. The capital of Japan is", 2),
    Case("Once upon a time", 16),
    Case("Once upon a time", 64),
    Case("The quick brown fox", 24),
    Case("1, 2, 3, 4,", 48),
    Case("1 2 3 4 5", 64),
    Case("Q: What is 7 + 8?\nA:", 3),
    Case("7 + 5 = 12\n9 + 4 = 13\n6 * 7 =", 4),
    Case("January, February,", 18),
    Case("a b c d", 32),
    Case("10, 9, 8,", 40),
    Case("def fibonacci(n):", 42),
    Case("def is_prime(n):", 58),
    Case('{"name": "France", "capital":', 32),
    Case('{"name": "Japan",', 32),
    Case("日本の首都は", 48),
    Case("Hello in Japanese is", 16),
    Case("Happy birthday!", 13),
    Case("<|user|>Hello!\n<|assistant|>", 32),
    Case("<|user|>What is the capital of Italy?\n<|assistant|>", 32),
    Case("<|user|>Count to 10.\n<|assistant|>", 64),
    Case("<|user|>Tell me a story.\n<|assistant|>", 128),
    Case("<|user|>Think: what is 27 + 35?\n<|assistant|>", 64),
    Case("<|user|>How do you write Tokyo in its own language?\n<|assistant|>", 16),
    Case("<|user|>Write a Python function gcd.\n<|assistant|>", 64),
    Case("<|fim_prefix|>def is_even(n):\n<|fim_suffix|>    return n % 2 == 0\n<|fim_middle|>", 32),
    Case(
        f"<|system|>Tools:\n{WEATHER_TOOL}\n<|user|>What is the weather in Paris?\n<|assistant|>",
        32,
    ),
]


def margin(completion: CompletionOutput) -> float:
    """The smallest distance between the two most probable tokens, over all steps, in nats."""
    distances = []
    for step in completion.logprobs or []:
        first, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
        distances.append(first - second)
    return float(min(distances))


def main() -> None:
    """Complete every prompt, check the margins and write the file."""
    engine = LLM(str(CHECKPOINT), dtype="bfloat16", max_model_len=2048, enforce_eager=True)
    settings = [
        SamplingParams(temperature=0.0, max_tokens=case.max_tokens, logprobs=2) for case in CASES
    ]
    rows = []
    for case, output in zip(
        CASES, engine.generate([c.prompt for c in CASES], settings), strict=True
    ):
        [completion] = output.outputs
        if margin(completion) < LEAST_MARGIN:
            raise SystemExit(
                f"the margin of {case.prompt!r} must be at least {LEAST_MARGIN} nats, "
                f"but is {margin(completion):.2f}: {completion.text!r}"
            )
        rows.append(
            {
                "prompt": case.prompt,
                "completion": completion.text,
                "max_tokens": case.max_tokens,
                "finish_reason": completion.finish_reason,
                "margin_nats": round(margin(completion), 2),
            }
        )
    text = json.dumps(rows, ensure_ascii=False, indent=2)
    EXAMPLES_PATH.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
