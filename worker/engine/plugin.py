"""What every process of vLLM does first: vLLM calls `prepare` in each of them (entry point in pyproject.toml)."""

import logging
import multiprocessing
import os
from threading import Thread
from typing import Protocol

_log = logging.getLogger(__name__)

_PARENT_DIED = 70


class _Parent(Protocol):
    def join(self) -> None: ...


def prepare() -> None:
    """Make a process of vLLM safe to run beside us."""
    _allow_matrix_tiles()
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent,), name="end-with-parent", daemon=True).start()


def _allow_matrix_tiles() -> None:
    """Ask the kernel for the CPU's matrix tiles (AMX), where there are any.

    vLLM's CPU attention uses them without asking. Where no earlier matrix product has asked, as with a
    first batch of one token, the first step ends the process with "illegal instruction".
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():  # noqa: SLF001 - torch has no public name
        _log.warning("The kernel refuses the CPU's matrix tiles (AMX), which vLLM will try to use.")


def _end_with(parent: _Parent) -> None:
    """End this process when the one that started it is gone, however that came about.

    vLLM's engine core would stay behind where its front is killed while the model is being loaded.
    """
    parent.join()
    os._exit(_PARENT_DIED)
