"""Files of shell variables that only their owner can read."""

import fcntl
import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from gateway.records.errors import StartupError

_OTHERS = 0o077
"""Permissions of all users but the owner."""


class EnvFile:
    """A file of shell variables. A missing file has none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, str]:
        """Return the variables."""
        try:
            return _parse(self.path.read_text())
        except FileNotFoundError:
            return {}

    def write(self, variables: Mapping[str, str]) -> None:
        """Replace the file atomically, readable only by its owner."""
        os.close(self._replace(variables))

    def remove(self) -> None:
        """Remove the file if it exists."""
        self.path.unlink(missing_ok=True)

    def _replace(self, variables: Mapping[str, str]) -> int:
        """Replace the file atomically, and return a descriptor that holds its lock."""
        text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, text.encode())
        draft.replace(self.path)
        return descriptor


class LiveEnvFile(EnvFile):
    """A file that is valid while the process that wrote it runs.

    That process holds the file's lock, which the system releases however the process ends.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._descriptor: int | None = None

    @override
    def read(self) -> dict[str, str]:
        """Return the variables; none if the process that wrote them has ended.

        Raises StartupError if another user may have written them.
        """
        try:
            file = os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise self._unusable(error.strerror or "it cannot be opened") from error
        with file:
            if not _is_locked(file.fileno()):
                return {}
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
                raise self._unusable("only its owner, the current user, may have access")
            return _parse(file.read())

    @override
    def write(self, variables: Mapping[str, str]) -> None:
        self._descriptor = self._replace(variables)

    @override
    def remove(self) -> None:
        """Remove the file that this object wrote, and an invalid one."""
        super().remove()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _unusable(self, reason: str) -> StartupError:
        return StartupError(
            f"The file {self.path.absolute()} cannot be used: {reason}. "
            "Set SLUICE_REDIS_URL and SLUICE_DATABASE_URL instead."
        )


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _parse(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: "".join(shlex.split(value)) for name, _, value in pairs}
