"""Files of LoRA adapters for the demo model. Their weights are zeros: they change nothing."""

import json
from pathlib import Path
from typing import Any

RANK = 4
Q_PROJ = "model.layers.0.self_attn.q_proj"
FEATURES = 256
"""Inputs and outputs of this module."""


def tensors(rank: int = RANK, module: str = Q_PROJ) -> dict[str, tuple[int, int]]:
    """Return the shapes of the matrices that adapt one module."""
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": (rank, FEATURES),
        f"{prefix}.lora_B.weight": (FEATURES, rank),
    }


def config(**changes: Any) -> bytes:
    """Return a configuration file as PEFT writes it."""
    known = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "bias": "none",
        "lora_dropout": 0.0,
    }
    return json.dumps(known | changes).encode()


def header(shapes: dict[str, tuple[int, int]], *, size: int = 2, **changes: Any) -> bytes:
    """Return the header of a weights file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (rows, columns) in shapes.items():
        end = start + size * rows * columns
        entry = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [start, end]}
        entries[name] = entry | changes
        start = end
    return json.dumps(entries).encode()


def data_bytes(shapes: dict[str, tuple[int, int]], *, size: int = 2) -> int:
    """Return the bytes of all weights."""
    return sum(size * rows * columns for rows, columns in shapes.values())


def write_adapter(
    folder: Path, *, alpha: float = 8, rank: int = RANK, last_weight: bytes = bytes(2)
) -> str:
    """Write an adapter, which differs from those with another `alpha`. Return its folder."""
    shapes = tensors(rank)
    content = header(shapes)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(config(lora_alpha=alpha, r=rank))
    (folder / "adapter_model.safetensors").write_bytes(
        len(content).to_bytes(8, "little") + content + bytes(data_bytes(shapes) - 2) + last_weight
    )
    return str(folder)
