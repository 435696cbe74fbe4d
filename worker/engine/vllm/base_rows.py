"""Requests without an adapter in a batch with adapters, on a CPU.

vLLM marks their rows with the slot -1. Its kernels for GPUs skip these rows. Its operations in
torch take -1 as an index, and apply the adapter in the last slot: another tenant's
(vllm-project/vllm#48421). These parts of vLLM are private, so this module fits one version of it.
"""

from typing import Any


def prepare_base_rows() -> None:
    """Patch this vLLM process so that adapters do not change rows of the base model."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0
    ) -> None:
        """Compute the first product. Rows of zeros add nothing in the second one."""
        shrink(inputs, weights, output, slots, scaling)
        output[slots < 0] = 0

    lora_ops.bgmv_shrink = bgmv_shrink
    punica_cpu.bgmv_shrink = bgmv_shrink
