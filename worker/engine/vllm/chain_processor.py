"""vLLM's logits processor entry point: the sampler chain for either of its model runners."""

from typing import Any

from vllm.v1.sample.logits_processor.interface import LogitsProcessor as InterfaceV1
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as InterfaceV2

from worker.engine.vllm.chain_v1 import ProcessorV1
from worker.engine.vllm.chain_v2 import ProcessorV2
from worker.samplers.arguments import chain_parameters


# The type checker skips vLLM.
class ChainProcessor(InterfaceV1, InterfaceV2):  # type: ignore[misc]
    """Passes the type checks of both runners, and creates the processor for the caller.

    Raises ValueError with speculative decoding: a step then samples several tokens of a sequence,
    and the chain would not receive the first of them.
    """

    def __new__(cls, vllm_config: Any, *rest: Any) -> Any:
        """Create the processor; the newer runner passes its state, the older one two arguments."""
        if vllm_config.speculative_config is not None:
            raise ValueError("The sampler chain does not work with speculative decoding.")
        if len(rest) == 1:
            return ProcessorV2(vllm_config, *rest)
        return ProcessorV1(vllm_config, *rest)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for a malformed chain, before the request reaches the engine."""
        chain_parameters(sampling_params.extra_args)
