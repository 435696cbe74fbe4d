"""A Triton compiler for the CPU that compiles nothing: the interpreter runs kernels as they are."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend
from typing_extensions import override


class InterpreterBackend(BaseBackend):  # type: ignore[misc]  # Triton has no types.
    """The members that Triton requires of a backend."""

    @staticmethod
    @override
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    @override
    def hash(self) -> str:
        return "interpreter"

    @override
    def parse_options(self, options: dict[str, Any]) -> object:
        return options

    @override
    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        pass

    @override
    def load_dialects(self, context: Any) -> None:
        pass

    @override
    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
