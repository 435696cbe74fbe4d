"""A Triton driver for the CPU: it answers Triton's queries about a device, and drives none."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from typing_extensions import override


class InterpreterDriver(DriverBase):  # type: ignore[misc]  # Triton has no types.
    """The CPU as Triton's only device."""

    @classmethod
    @override
    def is_active(cls) -> bool:
        return True

    @override
    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    @override
    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 0)

    @override
    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @override
    def get_benchmarker(self) -> None:
        return None

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu
