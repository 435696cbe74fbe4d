"""Values from a model folder that can be read without loading the model."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from contract.adapters import ModuleShapes

_DIMENSIONS = 2
_UNCHANGED_MODULES = ("embed_tokens", "lm_head")
"""Adapters that change the vocabulary are not supported."""


def context_window(folder: Path) -> int:
    """Return the context window from config.json, in tokens; 0 if it has none."""
    config = _read(folder / "config.json")
    # A vision model has a nested configuration for its text model.
    within = config.get("text_config") or {}
    name = "max_position_embeddings"
    found = config.get(name) or within.get(name)
    return int(found or config.get("max_target_positions") or 0)


def bos_token_id(folder: Path) -> int | None:
    """Return the id of the beginning-of-text token, or None if the tokenizer has none."""
    return _special_token_id(folder, "bos_token")


def eos_token_id(folder: Path) -> int:
    """Return the id of the end-of-text token."""
    token_id = _special_token_id(folder, "eos_token")
    if token_id is None:
        raise ValueError(f"{folder}: tokenizer_config.json names no eos_token")
    return token_id


def adapter_modules(folder: Path) -> ModuleShapes:
    """Return the linear layers of a model's safetensors files, which adapters may change.

    Empty if the folder has no such file.
    """
    shapes: ModuleShapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and len(tensor["shape"]) == _DIMENSIONS:
                shapes[module] = (tensor["shape"][0], tensor["shape"][1])
    return {
        module: shape
        for module, shape in shapes.items()
        if module.rpartition(".")[2] not in _UNCHANGED_MODULES
    }


def _special_token_id(folder: Path, name: str) -> int | None:
    token = _read(folder / "tokenizer_config.json").get(name)
    if isinstance(token, dict):
        token = token["content"]
    if token is None:
        return None
    return Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
