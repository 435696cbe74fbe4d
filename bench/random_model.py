"""Models with random weights in the shape of a real one, for measurements of speed.

vLLM draws the weights itself (`load_format: dummy`), so the folder has a configuration and a
tokenizer only. The tokenizer is that of the demo model, with as many more tokens as the shape's
vocabulary has: the model predicts any of them, and each has a text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copy
from types import MappingProxyType
from typing import Any, Final

from bench.starting import CHECKPOINT

_VOCABULARY: Final = 128_256
SHAPES: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        # That of Llama 3 8B.
        "8b": {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "head_dim": 128,
        },
        # Its vocabulary, for a try on a small machine.
        "small": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "head_dim": 32,
        },
    }
)


def write_model(shape: str, folder: Path) -> Path:
    """Write the files of a model of one of the SHAPES into a new folder, and return it."""
    folder.mkdir()
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config |= {
        **SHAPES[shape],
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    _extend(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        copy(CHECKPOINT / name, folder / name)
    return folder


def _extend(tokenizer: dict[str, Any]) -> None:
    """Add words that no text is encoded with."""
    known: dict[str, int] = tokenizer["model"]["vocab"]
    first = 1 + max([*known.values(), *(each["id"] for each in tokenizer["added_tokens"])])
    known |= {f"Ġw{number}": number for number in range(first, _VOCABULARY)}
