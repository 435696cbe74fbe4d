"""Checks of adapters: what an engine would trip over is found before."""

import io
import json
import struct

import pytest

from gateway.adapters.checks import (
    InvalidAdapterError,
    Tensor,
    check_adapter,
    check_weights,
    header_length,
)
from tests.support.adapters import FEATURES, Q_PROJ, RANK, config, data_bytes, header, tensors
from tests.support.stack import CHECKPOINT
from worker.model_files import adapter_modules

MODULES = adapter_modules(CHECKPOINT)
SHAPES = tensors()
A, B = SHAPES
BYTES = data_bytes(SHAPES)


def test_valid_adapter_is_reduced_to_what_was_checked() -> None:
    given = config(task_type="SOMETHING", auto_mapping={"x": 1}, revision="main", use_rslora=True)
    found = check_adapter(given, header(SHAPES), BYTES, modules=MODULES, max_rank=RANK)
    assert (found.rank, found.target_modules) == (RANK, ["q_proj"])
    assert json.loads(found.config) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 8.0,
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_rslora": True,
    }


def test_base_model_has_no_modules_of_its_vocabulary() -> None:
    assert MODULES[Q_PROJ] == (FEATURES, FEATURES)
    assert {name.rpartition(".")[2] for name in MODULES} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"{", "adapter_config.json is not valid"),
        (b"[]", "adapter_config.json is not valid"),
        (b" " * 70_000, "at most 65536 bytes. Given: 70000"),
        (config(peft_type="LOHA"), "Invalid enum value 'LOHA' - at `$.peft_type`"),
        (config(r=0), "`$.r`"),
        (config(r=RANK + 1), "'r' must be at most 4. Given: 5"),
        (config(r=RANK - 1), "must have the shape [3, 256]. Given: [4, 256]"),
        (config(lora_alpha=-1), "`$.lora_alpha`"),
        (config(bias="all"), "`$.bias`"),
        (config(use_dora=True), "'use_dora' is not supported"),
        (config(modules_to_save=["lm_head"]), "'modules_to_save' is not supported"),
        (config(rank_pattern={"q_proj": 64}), "'rank_pattern' is not supported"),
        (config(init_lora_weights="pissa"), "`$.init_lora_weights`"),
        (config(target_modules=["q_proj", "v_proj"]), "'target_modules' names \"v_proj\""),
    ],
)
def test_invalid_configuration_is_named(given: bytes, message: str) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        check_adapter(given, header(SHAPES), BYTES, modules=MODULES, max_rank=RANK)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "size", "message"),
    [
        (b"\x80\x04", BYTES, "The header of adapter_model.safetensors is not valid"),
        (b"{}", 0, "must have 1 to 100000 tensors. Given: 0"),
        (header(SHAPES, dtype="I8"), BYTES, 'Given: "I8"'),
        (header(SHAPES, shape=[-4, -256]), BYTES, "do not match its shape"),
        (header(SHAPES, shape=[4, 2**62]), BYTES, "do not match its shape"),
        (header(SHAPES), BYTES - 1, "without gaps or overlaps"),
        (header(SHAPES), BYTES + 1, "without gaps or overlaps"),
        (header(SHAPES, data_offsets=[0, 2048]), BYTES, "without gaps or overlaps"),
        (header({A: SHAPES[A]}), BYTES // 2, "must have both lora_A and lora_B"),
        (header({"lm_head.weight": (1, 1)}), 2, "must be called base_model.model.MODULE"),
        (header(tensors(module="model.layers.9.self_attn.q_proj")), BYTES, "has no module"),
        (header(tensors(module="model.embed_tokens")), BYTES, "has no module"),
        (header({**SHAPES, B: (128, RANK)}), BYTES * 3 // 4, "must have the shape [256, 4]"),
    ],
)
def test_invalid_weights_are_named(given: bytes, size: int, message: str) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        check_adapter(config(), given, size, modules=MODULES, max_rank=RANK)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "beginning", [b"", b"\x80\x04\x95", (2**24 + 1).to_bytes(8, "little"), bytes(8)]
)
def test_other_files_are_no_safetensors_files(beginning: bytes) -> None:
    with pytest.raises(InvalidAdapterError, match="safetensors file with a header of 2 to"):
        header_length(beginning)


def number(dtype: str, value: float) -> bytes:
    """Return a number as a weights file has it; BF16 is the upper half of F32."""
    if dtype == "BF16":
        return struct.pack("<f", value)[2:]
    return struct.pack({"F32": "<f", "F16": "<e"}[dtype], value)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("F32", 3.4e38), ("BF16", 3.3e38), ("F16", 65504.0)]
)
def test_weights_that_are_not_finite_are_named(dtype: str, largest: float) -> None:
    finite = [number(dtype, value) for value in (0.0, -0.0, 1.5, 1e-7, -largest, largest)]
    # NaNs with any payload and sign, as well as those of Python.
    top = {"F32": "0000807f", "BF16": "807f", "F16": "007c"}[dtype]
    signalling = (int.from_bytes(bytes.fromhex(top), "little") + 1).to_bytes(
        len(top) // 2, "little"
    )
    size = len(signalling)
    good = b"".join(finite) * (250_000 // size)  # More than one piece.
    tensors = {
        # Not in the order of the file.
        "last": Tensor(dtype, [1], (2 * len(good), 2 * len(good) + size)),
        "first": Tensor(dtype, [1], (0, len(good))),
        "second": Tensor(dtype, [1], (len(good), 2 * len(good))),
    }
    content = good + good + finite[-1]
    check_weights(io.BytesIO(content), tensors)
    bad = [number(dtype, float(value)) for value in ("nan", "inf", "-inf")]
    places = (0, 1 << 20, len(good) - size, len(good), 2 * len(good) - size, 2 * len(good))
    names = ("first", "first", "first", "second", "second", "last")
    for value in (*bad, signalling):
        for at, name in zip(places, names, strict=True):
            with pytest.raises(InvalidAdapterError) as caught:
                check_weights(
                    io.BytesIO(content[:at] + value + content[at + size :]),
                    tensors,
                )
            assert f'The tensor "{name}" has a weight that is NaN' in str(caught.value)
