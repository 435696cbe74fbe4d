"""vLLM's runner for GPUs on a machine without one, for tests.

That runner ("model runner V2") is built on Triton kernels. Triton has an interpreter that runs
kernels in Python on the CPU, but it has no driver for it, and vLLM requires one. This package is
that driver. The folder `installed` next to this file has what an installer would write. With it on
PYTHONPATH, every process of vLLM finds this package by its entry points, and nothing has to be
installed.
"""

from pathlib import Path

_ROOT = Path(__file__).parents[3]
_INSTALLED = Path(__file__).parent / "installed"


def environment() -> dict[str, str]:
    """Return the variables with which vLLM runs its GPU runner in the interpreter."""
    return {
        "PYTHONPATH": f"{_INSTALLED}:{_ROOT}",
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_BACKEND": "cpu",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
