"""`sluice check --role worker`: look at a deployment from the place of a worker."""

import asyncio
import ctypes
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Final

from pydantic import Field

from common.checks import Finding, State, check_redis, finding, report
from common.logs import configure_logs
from worker.command_line import settings_command
from worker.settings import WorkerSettings

_CUDA_RUNTIMES: Final = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_NO_DRIVER: Final = (
    "Install NVIDIA's driver, and give the container the GPU (nvidia.com/gpu, --gpus all)."
)


class CheckSettings(WorkerSettings):
    """Settings of the worker, and the form of the output."""

    as_json: Annotated[bool, Field(description="Print JSON.")] = False


def run(settings: CheckSettings) -> int:
    """Print what is wrong, and return the exit code."""
    configure_logs(settings.log_format, level="ERROR")
    return report(asyncio.run(_check(settings)), as_json=settings.as_json)


async def _check(settings: CheckSettings) -> list[Finding]:
    url = settings.redis_url.get_secret_value()
    found = [each async for each in check_redis("Redis", url, _cause_of)]
    if settings.engine == "vllm":
        found += [_check_gpu(), _check_arguments(settings)]
    return found


def _cause_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _check_gpu() -> Finding:
    """Compare the driver with the CUDA runtime that is installed with vLLM."""
    runtime = next(filter(None, map(_version, _CUDA_RUNTIMES)), None)
    if _version("vllm") is None or runtime is None:
        return Finding("GPU", State.OK, "none needed by this build of vLLM")
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("GPU", State.ERROR, "no driver (libcuda.so.1)", _NO_DRIVER)
    number, count = ctypes.c_int(), ctypes.c_int()
    if (code := cuda.cuInit(0)) != 0:
        return Finding("GPU", State.ERROR, f"the driver fails (cuInit: {code})", _NO_DRIVER)
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    newest = (number.value // 1000, number.value % 1000 // 10)
    return finding(
        "GPU",
        f"{count.value} devices, driver for CUDA {newest[0]}.{newest[1]}, runtime {runtime}",
        (count.value == 0, State.ERROR, _NO_DRIVER),
        (
            int(runtime.partition(".")[0]) > newest[0],
            State.ERROR,
            f"Install a driver for CUDA {runtime} or later.",
        ),
    )


def _check_arguments(settings: CheckSettings) -> Finding:
    try:
        from worker.engine.vllm.engine import read_arguments

        read_arguments(settings)
    except Exception as error:  # vLLM raises anything.
        return Finding("engine arguments", State.ERROR, _cause_of(error), "Correct the setting.")
    return Finding("engine arguments", State.OK, "accepted by vLLM")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


command = settings_command(
    "check", CheckSettings, run, description="Check a deployment from the place of a worker."
)

if __name__ == "__main__":
    command(prog_name="python -m worker.check")
