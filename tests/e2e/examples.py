"""What the tiny model is known to answer, from the file that is shipped with its checkpoint."""

import json
from typing import NamedTuple

from tokenizers import Tokenizer

from tests.support.stack import CHECKPOINT

EXAMPLES_PATH = CHECKPOINT.parent / "examples.json"


class Example(NamedTuple):
    """A prompt and its greedy completion."""

    prompt: str
    completion: str
    max_tokens: int
    finish_reason: str


EXAMPLES = [
    Example(row["prompt"], row["completion"], row["max_tokens"], row["finish_reason"])
    for row in json.loads(EXAMPLES_PATH.read_text(encoding="utf-8"))
]
ENDING = next(example for example in EXAMPLES if example.finish_reason == "stop")
"""Its completion ends by itself, before max_tokens."""

LONG = max(EXAMPLES, key=lambda example: len(example.completion))
SPECIAL = next(example for example in EXAMPLES if example.prompt.startswith("<|"))
"""Its prompt has special tokens in it."""

MULTI_BYTE = [example for example in EXAMPLES if not example.completion.isascii()]

COUNTING = "1, 2, 3, 4,"
"""Its completion is sure of itself and uses few tokens again and again."""

OPEN = "One day"
"""Its completion can go many ways, so that sampling shows."""

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def ids_of(text: str) -> list[int]:
    """Return the token ids of a text, counted independently of gateway and worker."""
    return list(TOKENIZER.encode(text).ids)
