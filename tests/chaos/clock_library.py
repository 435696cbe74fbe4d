"""Processes with a clock that can be set while they run, by Debian's libfaketime where it is installed."""

from pathlib import Path

_PLACES = "faketime/libfaketimeMT.so.1"
_ROOTS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib")

HINT = "libfaketime is not installed (apt-get install libfaketime)"


def library() -> Path | None:
    """Return the library that goes between a process and the clock; None if there is none."""
    found = (Path(root) / _PLACES for root in _ROOTS)
    return next((path for path in found if path.exists()), None)


def clock_variables(folder: Path, name: str) -> dict[str, str]:
    """Return the environment of a process whose clock can be set; nothing without the library."""
    path = library()
    if path is None:
        return {}
    set_clock(folder, name, 0)
    return {
        "LD_PRELOAD": str(path),
        "FAKETIME_TIMESTAMP_FILE": str(_file(folder, name)),
        "FAKETIME_CACHE_DURATION": "1",
        # Time-outs do not follow a clock that is set, on a real machine either.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def set_clock(folder: Path, name: str, offset_seconds: float) -> None:
    """Set the clock of a process ahead of the real one, or behind it."""
    draft = _file(folder, name).with_suffix(".draft")
    draft.write_text(f"{offset_seconds:+.3f}\n")
    draft.rename(_file(folder, name))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.clock"
