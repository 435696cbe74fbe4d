"""How busy a GPU is, as its driver reports it."""

import os
import shutil
import subprocess
from contextlib import AbstractContextManager, suppress
from statistics import fmean
from types import TracebackType
from typing import Final, Self

from typing_extensions import override

NONE: Final = "none"
_PROGRAM: Final = "nvidia-smi"
_EVERY_MS: Final = 200
_SECONDS: Final = 20.0


def gpu_name() -> str:
    """Return the model of the GPU and its driver; "none" where no driver answers."""
    lines = _query("name,driver_version,memory.total")
    return lines[0] if lines else NONE


def used_mib() -> int | None:
    """Return the GPU's used memory in MiB; None without a GPU."""
    lines = _query("memory.used")
    return int(lines[0].split()[0]) if lines else None


class GpuUsage(AbstractContextManager["GpuUsage"]):
    """Samples the utilization within a block: the time in which a kernel ran, in percent."""

    busy_percent: float | None = None
    """Set at the end; None without a GPU."""

    @override
    def __enter__(self) -> Self:
        """Start sampling."""
        self._process = None
        if shutil.which(_PROGRAM):
            self._process = subprocess.Popen(
                [*_command("utilization.gpu"), f"--loop-ms={_EVERY_MS}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self

    @override
    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Stop sampling."""
        if self._process is None:
            return
        self._process.terminate()
        output, _ = self._process.communicate(timeout=_SECONDS)
        self.busy_percent = mean_percent(output)


def mean_percent(output: str) -> float | None:
    """Return the mean of lines such as `97 %`, without those that have no number."""
    values = []
    for line in output.splitlines():
        with suppress(ValueError, IndexError):
            values.append(float(line.split()[0]))
    return fmean(values) if values else None


def _command(fields: str) -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    return [_PROGRAM, f"--query-gpu={fields}", "--format=csv,noheader", f"--id={chosen}"]


def _query(fields: str) -> list[str]:
    """Return the line of the first GPU that vLLM sees, or none."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            _command(fields), capture_output=True, text=True, check=True, timeout=_SECONDS
        )
        return done.stdout.splitlines()
    return []
