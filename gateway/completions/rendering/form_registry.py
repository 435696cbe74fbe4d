"""The forms of responses: what renders the events of a stream, and what makes a whole response."""

from collections.abc import Callable

from gateway.completions.queue.generation import REPLIES_AT_ONCE, Generation, in_slices
from gateway.completions.rendering.assembler import Assembler, ChoicesAssembler, WholeResponse
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.embeddings import PooledAssembler
from gateway.completions.rendering.events import EventRenderer
from gateway.completions.rendering.messages import MessageAssembler, MessageRenderer
from gateway.completions.rendering.responses import ResponseAssembler, ResponseRenderer
from gateway.completions.rendering.speech import SpeechAssembler, SpeechRenderer
from gateway.completions.rendering.sse import ChunkRenderer, NativeRenderer
from gateway.dialects.request import ResponseForm

_RENDERERS: dict[ResponseForm, type[EventRenderer]] = {
    ResponseForm.OPENAI: ChunkRenderer,
    ResponseForm.NATIVE: NativeRenderer,
    ResponseForm.MESSAGES: MessageRenderer,
    ResponseForm.RESPONSES: ResponseRenderer,
    ResponseForm.SPEECH: SpeechRenderer,
}
_ASSEMBLERS: dict[ResponseForm, type[Assembler]] = {
    ResponseForm.MESSAGES: MessageAssembler,
    ResponseForm.RESPONSES: ResponseAssembler,
    ResponseForm.POOLED: PooledAssembler,
    ResponseForm.SPEECH: SpeechAssembler,
}


def event_renderer(
    completion: Completion, *, skip: int = 0, has_ids: bool = False
) -> EventRenderer:
    """Return a renderer for the events of a response."""
    return _RENDERERS[completion.request.form](completion, skip=skip, has_ids=has_ids)


def assembler_of(completion: Completion) -> Assembler:
    """Return what makes a whole response of its replies."""
    return _ASSEMBLERS.get(completion.request.form, ChoicesAssembler)(completion)


async def collect(
    completion: Completion, generation: Generation, *, check: Callable[[], None] = lambda: None
) -> WholeResponse:
    """Wait for the whole response. Raises an ApiError if a job fails.

    `check` may raise to end this. Wake the generation when it would.
    """
    assembler = assembler_of(completion)
    while assembler.unfinished_jobs:
        check()
        replies = await generation.replies()
        if len(replies) < REPLIES_AT_ONCE and completion.request.scored_alternatives is None:
            for reply in replies:
                assembler.add(reply)
            continue
        for some in in_slices(replies):
            await assembler.prompt_logprobs.prepare(some, generation.turn)
            async with generation.turn_for(some):
                for reply in some:
                    assembler.add(reply)
    return await assembler.response(generation.turn)
