"""Collects the replies of a request into one body."""

from contract.messages import Delta, JobFinished, PromptScored
from gateway.dispatch.generation import Generation, Reply
from gateway.errors import ServiceUnavailableError
from gateway.stream.completion import Choice, Completion, Usage, whole_body
from gateway.stream.failures import to_api_error


async def collect(completion: Completion, generation: Generation) -> tuple[bytes, Usage]:
    """Return the whole answer as JSON, and its token counts. Raises an ApiError if a job fails."""
    assembler = _Assembler(completion)
    while assembler.unfinished_jobs and not generation.overflowed:
        for reply in await generation.replies():
            assembler.add(reply)
    if generation.overflowed:
        raise ServiceUnavailableError("The answer is larger than the gateway holds.")
    return whole_body(completion, assembler.choices, assembler.usage), assembler.usage


class _Assembler:
    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self.usage = Usage()
        self.unfinished_jobs = len(completion.request.prompts)
        self.choices = [Choice() for _ in range(completion.choices)]
        if completion.request.echo:
            for index, choice in enumerate(self.choices):
                choice.texts.append(completion.prompt_texts[index // completion.request.n])

    def add(self, reply: Reply) -> None:
        message = reply.message
        if isinstance(message, Delta):
            index = self._completion.choice_index(reply.prompt_index, message.choice)
            characters = len(self._completion.prompt_texts[reply.prompt_index])
            self.choices[index].add(message, prompt_characters=characters)
        elif isinstance(message, JobFinished):
            self.usage.add(message)
            self.unfinished_jobs -= 1
        elif isinstance(message, PromptScored):
            for choice in range(self._completion.request.n):
                index = self._completion.choice_index(reply.prompt_index, choice)
                text = self._completion.prompt_texts[reply.prompt_index]
                self.choices[index].logprobs.extend_with_prompt(message.logprobs, text)
        else:
            raise to_api_error(message)
