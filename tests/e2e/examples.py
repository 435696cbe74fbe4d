"""Known completions of the tiny model, from the file in its checkpoint."""

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
"""Its completion ends before max_tokens."""

LONG = max(EXAMPLES, key=lambda example: len(example.completion))
SPECIAL = next(example for example in EXAMPLES if example.prompt.startswith("<|"))
"""Its prompt has special tokens."""

MULTI_BYTE = [example for example in EXAMPLES if not example.completion.isascii()]

COUNTING = "1, 2, 3, 4,"
"""Its completion is nearly certain and repeats few tokens."""

OPEN = "One day"
"""Its completion has many likely variants, so that sampling has an effect."""

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def ids_of(text: str) -> list[int]:
    """Return the token ids of a text, computed independently of gateway and worker."""
    return list(TOKENIZER.encode(text).ids)
