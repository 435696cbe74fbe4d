"""Processes whose clock can be set while they run, through Debian's libfaketime."""

from pathlib import Path

_PLACES = "faketime/libfaketimeMT.so.1"
_ROOTS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib")

HINT = "libfaketime is not installed (apt-get install libfaketime)"


def library() -> Path | None:
    """Return the path of libfaketime; None if it is not installed."""
    found = (Path(root) / _PLACES for root in _ROOTS)
    return next((path for path in found if path.exists()), None)


def clock_variables(folder: Path, name: str) -> dict[str, str]:
    """Return the environment of a process whose clock can be set; empty without libfaketime."""
    path = library()
    if path is None:
        return {}
    set_clock(folder, name, 0)
    return {
        "LD_PRELOAD": str(path),
        "FAKETIME_TIMESTAMP_FILE": str(_file(folder, name)),
        "FAKETIME_CACHE_DURATION": "1",
        # Timeouts ignore changes of the wall clock on a real machine too.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def set_clock(folder: Path, name: str, offset_seconds: float) -> None:
    """Set a process's clock to an offset from the real one in seconds, negative for the past."""
    draft = _file(folder, name).with_suffix(".draft")
    draft.write_text(f"{offset_seconds:+.3f}\n")
    draft.rename(_file(folder, name))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.clock"
