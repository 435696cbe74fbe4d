"""What every process of vLLM does first: vLLM calls `prepare` in each of them (entry point in pyproject.toml)."""

import logging

_log = logging.getLogger(__name__)


def prepare() -> None:
    """Ask the kernel for the CPU's matrix tiles (AMX), where there are any.

    vLLM's CPU attention uses them without asking. Where oneDNN has not asked before, as with a first
    prompt of one token, the first step then ends the process with "illegal instruction".
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():  # noqa: SLF001 - torch has no public name
        _log.warning("The kernel refuses the CPU's matrix tiles (AMX), which vLLM will try to use.")
