"""Gateway cost of rendering the chunk of one delta: `python -m bench.chunks`.

Deltas arrive one at a time, which is the most expensive case. Streams with and without event ids
alternate. Each result is the fastest of several rounds, in microseconds of CPU per delta; other
programs on the machine slow down the other rounds.
"""

import time
from collections.abc import Sequence
from typing import Any

from contract.dialect import Dialect
from contract.messages import CallPiece, Delta, TokenLogprob, encode_logprobs
from contract.sampling import SamplingSpec
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.sse import ChunkRenderer
from gateway.dialects.profile import PROFILES, ContextLengthBehavior
from gateway.dialects.request import ChatRequest, GenerationRequest

ROUNDS = 9
DELTAS = 20_000

_SCORED = encode_logprobs([TokenLogprob(" word", -0.5, 0, [(" word", -0.5)], [9])])
_CHAT = {"chat": ChatRequest(messages=[])}
_CASES: dict[str, tuple[dict[str, Any], Delta]] = {
    "completion: text": ({}, Delta(1, 1, 0, 0, " word", [9])),
    "completion: text, logprobs": (
        {"logprobs": 1},
        Delta(1, 1, 0, 0, " word", [9], logprobs=_SCORED),
    ),
    "completion: text, usage": ({"continuous_usage": True}, Delta(1, 1, 0, 0, " word", [9])),
    "chat: content": (_CHAT, Delta(1, 1, 0, 0, " word", [9])),
    "chat: reasoning": (
        _CHAT,
        Delta(1, 1, 0, 0, "", [9], reasoning=" word", reasoning_tokens=1),
    ),
    "chat: arguments of a call": (
        _CHAT,
        Delta(1, 1, 0, 0, "", [9], calls=[CallPiece(0, "", " word")]),
    ),
    "chat: content, logprobs": (
        _CHAT | {"logprobs": 1},
        Delta(1, 1, 0, 0, " word", [9], logprobs=_SCORED),
    ),
}


def main() -> None:
    """Measure every kind of delta and print its cost."""
    for name, (fields, delta) in _CASES.items():
        replies = [Reply(0, delta)]
        pairs = [
            [_seconds(_completion(**fields), replies, has_ids=each) for each in (False, True)]
            for _ in range(ROUNDS)
        ]
        plain, numbered = (1e6 * min(times) / DELTAS for times in zip(*pairs, strict=True))
        ratio = plain / numbered
        print(f"{name:28} {plain:6.2f} us, with ids {numbered:6.2f} us, ratio {ratio:.2f}")


def _seconds(completion: Completion, replies: Sequence[Reply], *, has_ids: bool) -> float:
    renderer = ChunkRenderer(completion, has_ids=has_ids)
    renderer.render(replies)  # Renders the role.
    began = time.process_time()
    for _ in range(DELTAS):
        renderer.render(replies)
    return time.process_time() - began


def _completion(**fields: Any) -> Completion:
    request: dict[str, Any] = {
        "profile": PROFILES[Dialect.OPENAI],
        "model": "m",
        "prompts": [""],
        "images": [[]],
        "image_params": [],
        "max_tokens": DELTAS,
        "context_length_behavior": ContextLengthBehavior.TRUNCATE,
        "n": 1,
        "best_of": 1,
        "stop": [],
        "includes_stop": False,
        "logprobs": None,
        "echo": False,
        "stream": True,
        "include_usage": False,
        "sampling": SamplingSpec(seed=1),
        "ignored_parameters": (),
    }
    return Completion(
        id="chatcmpl-" + 26 * "a",
        model="m",
        created=1_700_000_000,
        fingerprint="fp_1",
        request=GenerationRequest(**(request | fields)),
        prompt_token_ids=[[1]],
        prompt_texts=[""],
    )


if __name__ == "__main__":
    main()
