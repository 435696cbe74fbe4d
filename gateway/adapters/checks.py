"""Checks of an adapter's files: all that an engine relies on, and that weights are finite."""

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, BinaryIO, Final, Literal, NamedTuple

import msgspec

from contract.adapters import MAX_CONFIG_BYTES, MAX_HEADER_BYTES, ModuleShapes
from gateway.records.errors import shown

LENGTH_BYTES: Final = 8
"""Bytes of the number with which a safetensors file begins: the length of its header."""
MAX_TENSORS: Final = 100_000

_TYPES: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of the numbers that weights may have."""
_PIECE_BYTES: Final = 1 << 20
_FINITE_F16: Final = bytes(byte for byte in range(256) if byte & 0x7C != 0x7C)
"""High bytes of finite numbers: the whole exponent is in them."""
_ALL_ONES: Final = bytes(byte & 0x7F == 0x7F for byte in range(256))
_TOP_BIT: Final = bytes(byte >> 7 for byte in range(256))
"""Tables for F32 and BF16: the last bit of their exponent is the top bit of the next byte."""
_NAME: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_UNSUPPORTED: Final = (
    *("modules_to_save", "use_dora", "lora_bias", "fan_in_fan_out"),
    *("layer_replication", "alora_invocation_tokens", "use_bdlora", "use_qalora"),
    *("rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices"),
)
"""Options of PEFT that must be absent, false or empty: engines lack them, or they hide ranks."""


class InvalidAdapterError(Exception):
    """The files of an adapter are not valid. The message is fit for its owner."""


class Tensor(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class AdapterFormat(NamedTuple):
    """What a valid adapter consists of."""

    config: bytes
    """The configuration that engines read: only what the checks have understood."""
    rank: int
    target_modules: list[str]
    tensors: Mapping[str, Tensor]
    """The tensors by name."""


class _Config(msgspec.Struct):
    """The options of an adapter_config.json that matter."""

    peft_type: Literal["LORA"]
    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    target_modules: list[str] | str | None = None
    bias: Literal["none"] = "none"
    use_rslora: bool = False
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] | None = True


_decode_config = msgspec.json.Decoder(_Config).decode


def check_adapter(
    config: bytes, header: bytes, data_bytes: int, *, modules: ModuleShapes, max_rank: int
) -> AdapterFormat:
    """Check the configuration of an adapter, and the names and shapes of its weights.

    Args:
        config: Content of adapter_config.json.
        header: The header of adapter_model.safetensors.
        data_bytes: Bytes of that file after the header.
        modules: Shapes of the base model's modules.
        max_rank: Maximum rank that the base model's workers accept.

    Raises InvalidAdapterError.
    """
    options = _read_config(config)
    if options.r > max_rank:
        raise InvalidAdapterError(f"'r' must be at most {max_rank}. Given: {options.r}.")
    tensors = _read_header(header, data_bytes)
    found = _read_modules(tensors, options.r, modules)
    names = sorted({name.rpartition(".")[2] for name in found})
    if isinstance(options.target_modules, list):
        _check_targets(options.target_modules, found)
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.r,
        "lora_alpha": options.lora_alpha,
        "target_modules": names,
        "bias": "none",
        "use_rslora": options.use_rslora,
    }
    return AdapterFormat(msgspec.json.encode(content), options.r, names, tensors)


def check_weights(data: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Check that no weight is NaN or infinite.

    Args:
        data: The weights file, at the end of its header. It is read in pieces.
        tensors: The checked tensors, which fill the data.

    Raises InvalidAdapterError.
    """
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, end = tensor.data_offsets
        for at in range(start, end, _PIECE_BYTES):
            if not _is_finite(data.read(min(_PIECE_BYTES, end - at)), tensor.dtype):
                raise InvalidAdapterError(
                    f"The tensor {shown(name)} has a weight that is NaN or infinite."
                )


def header_length(beginning: bytes) -> int:
    """Return the bytes of the header that follow a file's first bytes. Raises InvalidAdapterError.

    `beginning` has LENGTH_BYTES, or fewer if the file is shorter.
    """
    length = int.from_bytes(beginning, "little")
    if len(beginning) < LENGTH_BYTES or not 2 <= length <= MAX_HEADER_BYTES:
        raise InvalidAdapterError(
            "The weights must be a safetensors file with a header of 2 to "
            f"{MAX_HEADER_BYTES} bytes."
        )
    return length


def _read_config(content: bytes) -> _Config:
    if len(content) > MAX_CONFIG_BYTES:
        raise InvalidAdapterError(
            f"adapter_config.json must have at most {MAX_CONFIG_BYTES} bytes. "
            f"Given: {len(content)}."
        )
    try:
        given = msgspec.json.decode(content, type=dict[str, Any])
        options = _decode_config(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidAdapterError(f"adapter_config.json is not valid: {error}.") from None
    if wrong := [name for name in _UNSUPPORTED if given.get(name)]:
        raise InvalidAdapterError(
            f"adapter_config.json: '{wrong[0]}' is not supported, so it must be absent, false or "
            f"empty. Given: {shown(given[wrong[0]])}."
        )
    return options


def _read_header(content: bytes, data_bytes: int) -> dict[str, Tensor]:
    try:
        header = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=Tensor) for name, raw in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidAdapterError(
            f"The header of adapter_model.safetensors is not valid: {error}."
        ) from None
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise InvalidAdapterError(
            f"adapter_model.safetensors must have 1 to {MAX_TENSORS} tensors. "
            f"Given: {len(tensors)}."
        )
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    places = sorted(tensor.data_offsets for tensor in tensors.values())
    ends = [(0, 0), *places, (data_bytes, data_bytes)]
    if any(before[1] != after[0] for before, after in pairwise(ends)):
        raise InvalidAdapterError(
            "adapter_model.safetensors: its tensors must fill the file without gaps or overlaps."
        )
    return tensors


def _check_tensor(name: str, tensor: Tensor) -> None:
    size = _TYPES.get(tensor.dtype)
    if size is None:
        raise InvalidAdapterError(
            f"The tensor {shown(name)} must have one of the types {', '.join(_TYPES)}. "
            f"Given: {shown(tensor.dtype)}."
        )
    start, end = tensor.data_offsets
    if min(tensor.shape, default=0) < 1 or end - start != size * math.prod(tensor.shape):
        raise InvalidAdapterError(
            f"The tensor {shown(name)} has {end - start} bytes, which do not match its shape "
            f"{tensor.shape}."
        )


def _is_finite(numbers: bytes, dtype: str) -> bool:
    """Whether the exponent of no little-endian number is all ones."""
    size = _TYPES[dtype]
    high = numbers[size - 1 :: size]
    if dtype == "F16":
        return not high.translate(None, _FINITE_F16)
    if b"\x7f" not in high and b"\xff" not in high:
        return True
    # Numbers above 1.7e38 have such bytes too. Combine all exponents at once: a loop over numbers
    # would be too slow for files that are made of them.
    rest = numbers[size - 2 :: size].translate(_TOP_BIT)
    return not int.from_bytes(high.translate(_ALL_ONES)) & int.from_bytes(rest)


def _read_modules(
    tensors: Mapping[str, Tensor], rank: int, modules: ModuleShapes
) -> dict[str, set[str]]:
    """Return for each changed module which of its two matrices there are: both."""
    found: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidAdapterError(
                f"The tensor {shown(name)} must be called base_model.model.MODULE.lora_A.weight, "
                "or lora_B."
            )
        module, matrix = match.groups()
        features = modules.get(module)
        if features is None:
            raise InvalidAdapterError(
                f"The base model has no module {shown(module)} that adapters may change."
            )
        wanted = [rank, features[1]] if matrix == "A" else [features[0], rank]
        if tensor.shape != wanted:
            raise InvalidAdapterError(
                f"The tensor {shown(name)} must have the shape {wanted}. Given: {tensor.shape}."
            )
        found.setdefault(module, set()).add(matrix)
    for module, matrices in found.items():
        if len(matrices) == 1:
            raise InvalidAdapterError(
                f"The module {shown(module)} must have both lora_A and lora_B."
            )
    return found


def _check_targets(targets: list[str], found: Mapping[str, set[str]]) -> None:
    for target in targets:
        if not any(module == target or module.endswith(f".{target}") for module in found):
            raise InvalidAdapterError(
                f"'target_modules' names {shown(target)}, for which there are no weights."
            )
