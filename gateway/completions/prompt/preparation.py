"""Prepare a request's prompts for the engine: token ids that fit the context window."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import msgspec
from tokenizers import Tokenizer

from contract.messages import Pooling, WorkerCard
from contract.pieces import REPLACEMENT
from contract.prompts import TokenIds, packed
from contract.sampling import MAX_LOGIT_BIAS_ENTRIES, SamplingSpec
from gateway.completions.prompt.infill import find_template
from gateway.completions.prompt.segments import KnownSegments
from gateway.completions.prompt.tokenizers import PromptEncoder
from gateway.completions.prompt.window import (
    Layout,
    cut,
    fit_max_tokens,
    prompt_too_long,
    tokens_to_keep,
)
from gateway.dialects.images import IMAGE_MARK
from gateway.dialects.request import FIT, GenerationRequest, Prompt
from gateway.platform.concurrency.large_work import Beside
from gateway.records.errors import (
    ContextLengthExceededError,
    InvalidParameterError,
    UnsupportedParameterError,
    must,
)

PROMPT_SIZE: Final = 128
"""Bytes of a text that take as long to prepare as a prompt of one token."""

CONTEXT_TOKENS = 16
"""Tokens before the echoed ones that are decoded with them: a token's text may depend on them."""


class PreparedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in the engine's form."""

    token_ids: TokenIds
    max_tokens: int
    """Maximum completion tokens; together with the prompt they fit into the context window."""
    cut_tokens: int
    """Number of tokens cut from the prompt."""
    plain_tokens: int
    """Tokens before the first image: the engine replaces an image's token by many others."""
    shown: str
    """The text of the prompt that the response contains; empty if it contains none."""
    pooling: Pooling | None = None
    """What a pooling model computes of the prompt, which is several inputs."""


class PreparedRequest(msgspec.Struct, frozen=True):
    """The prompts and sampling parameters for the jobs of a request."""

    prompts: list[PreparedPrompt]
    sampling: SamplingSpec
    grammar: str = ""
    """What the text must match, if the preparation decides that."""

    @property
    def applied_max_tokens(self) -> int:
        """The lowest max_tokens applied to any prompt."""
        return min([prompt.max_tokens for prompt in self.prompts])

    @property
    def cut_tokens(self) -> int:
        """Number of tokens cut from all prompts together."""
        return sum([prompt.cut_tokens for prompt in self.prompts])


async def prepare(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    card: WorkerCard,
    beside: Beside,
    *,
    literal: Tokenizer | None = None,
    known: KnownSegments | None = None,
) -> PreparedRequest:
    """Encode the prompts and apply the context rule to each of them.

    `literal` is the tokenizer for the texts of infill, and for the protected texts of a chat, in
    which special tokens are text. `known` encodes long texts with `tokenizer`.

    Raises an ApiError that names the prompt or the parameter; one invalid prompt rejects the whole
    request.
    """
    preparation = _Preparation(request, tokenizer, card, literal, known)
    # A small body may have many prompts, and a template may render a long text from it.
    has_chat = request.chat is not None
    size = len(request.prompts[0]) if has_chat else (len(request.prompts) - 1) * PROMPT_SIZE
    return await beside(preparation.run, size=size)


def _param(request: GenerationRequest) -> str:
    return "prompt" if request.chat is None else request.chat.param


class _Preparation:
    """Prepares one request."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        card: WorkerCard,
        literal: Tokenizer | None,
        known: KnownSegments | None,
    ) -> None:
        self._request = request
        self._card = card
        self._encoder = PromptEncoder(
            tokenizer,
            vocabulary_size=card.vocabulary_size,
            bos_token_id=card.bos_token_id,
            # The mark of a protected text is a character of others.
            inner=None if request.chat is None else literal,
            known=known,
        )
        self._literal = literal

    def run(self) -> PreparedRequest:
        """Prepare all prompts."""
        sampling = resolve_sampling(
            self._request, self._encoder, eos_token_ids=self._card.eos_token_ids
        )
        prompts = [self._prompt(index) for index in range(len(self._request.prompts))]
        return PreparedRequest(prompts, sampling)

    def _prompt(self, index: int) -> PreparedPrompt:
        request, window = self._request, self._card.context_window
        kept = request.prompt_tokens_kept
        is_only = len(request.prompts) == 1
        param = _param(request) if is_only else f"prompt[{index}]"
        whole = self._layout(index, param)
        layout = whole
        lost: Sequence[int] = ()
        if kept is not None:
            keep = tokens_to_keep(whole.length, kept, max_tokens=request.max_tokens, window=window)
            layout, lost = cut(whole, keep, window=window, keeps_start=request.keeps_prompt_start)
        if request.images[index]:
            self._check_images_are_whole(lost, param)
        token_ids = layout.token_ids
        max_tokens = fit_max_tokens(
            len(token_ids),
            request.max_tokens,
            window=window,
            behavior=request.context_length_behavior,
            param=param,
            max_tokens_param=request.max_tokens_param,
        )
        shown = ""
        if request.echo:
            shown = self._echo(index, layout, is_cut=bool(lost))
        elif request.is_native:
            shown = self._encoder.decode([*token_ids])
        return PreparedPrompt(
            token_ids=packed(token_ids),
            max_tokens=max_tokens,
            cut_tokens=len(lost),
            plain_tokens=self._plain_tokens(token_ids, has_images=bool(request.images[index])),
            shown=shown,
        )

    def _plain_tokens(self, token_ids: Sequence[int], *, has_images: bool) -> int:
        if not has_images:
            return len(token_ids)
        images = self._image_ids
        return next((at for at, token in enumerate(token_ids) if token in images), len(token_ids))

    def _layout(self, index: int, param: str) -> Layout:
        """Return a prompt's token ids; only those near the kept end if it is far too long."""
        request = self._request
        prompt = request.prompts[index]
        if request.infill_param:
            return self._infill(prompt, param)
        images = len(request.images[index])
        if images and request.chat is None:
            # The chat template has already placed the image tokens.
            prompt = self._with_image_tokens(prompt, images, param)
        part = self._part_of(prompt, param, kept=request.prompt_tokens_kept)
        if images and self._image_tokens(part) < images:
            raise self._loses_image(param)
        ids = self._encoder.encode(
            part, param=param, adds_special_tokens=request.adds_special_tokens
        )
        return Layout([], ids, [])

    def _part_of(self, prompt: Prompt, param: str, *, kept: int | None) -> Prompt:
        """Return the part of a prompt to encode: at least `kept` tokens from the kept end.

        Raises ContextLengthExceededError if the prompt is far too long and must not be cut.
        """
        window = self._card.context_window
        most = window if kept is None or kept == FIT else min(kept, window)
        keeps_start = kept is not None and self._request.keeps_prompt_start
        part_of = self._encoder.start_of if keeps_start else self._encoder.end_of
        part = part_of(prompt, tokens=most)
        if kept is None and part is not prompt:
            raise prompt_too_long(
                window + 1, self._request.max_tokens, window=window, param=param, is_least=True
            )
        return part

    def _infill(self, prompt: Prompt, param: str) -> Layout:
        template = find_template(self._encoder.tokenizer)
        if template is None:
            raise UnsupportedParameterError(
                f"'{self._request.infill_param}' is not supported by the model "
                f"'{self._card.model}': it has no infill tokens.",
                param=self._request.infill_param,
            )
        if not isinstance(prompt, str):
            raise InvalidParameterError(
                f"'{param}' must be text if 'suffix' is given.", param="prompt"
            )
        request = self._request
        part = self._part_of(prompt, param, kept=request.prompt_tokens_kept)
        self._part_of(request.suffix, request.infill_param, kept=None)
        for _, text in request.infill_files or ():
            self._part_of(text, "input_extra", kept=None)
        return template.layout(
            replace(self._encoder, tokenizer=self._literal or self._encoder.tokenizer, known=None),
            str(part),
            request.suffix,
            begins=request.adds_special_tokens,
            files=request.infill_files,
        )

    def _with_image_tokens(self, prompt: Prompt, images: int, param: str) -> Prompt:
        """Return the prompt with each image mark replaced by the model's own image token."""
        token = self._card.image_token
        if not token:
            raise UnsupportedParameterError(
                f"'images' is not supported by the model '{self._card.model}': it has no image "
                "input.",
                param="images",
            )
        pieces = [prompt] if isinstance(prompt, str) else prompt
        marked = [p.replace(IMAGE_MARK, token) if isinstance(p, str) else p for p in pieces]
        found = self._image_tokens(marked)
        if found != images:
            # The engine inserts an image wherever that token occurs.
            raise InvalidParameterError(
                f"'{param}' must not contain the model's image token except as {IMAGE_MARK}. "
                f"Given: {found} image tokens, {images} images.",
                param="prompt",
            )
        return marked[0] if isinstance(prompt, str) and isinstance(marked[0], str) else marked

    def _image_tokens(self, prompt: Prompt) -> int:
        token, ids = self._card.image_token, self._image_ids
        pieces = [prompt] if isinstance(prompt, str) else prompt
        return sum(p.count(token) if isinstance(p, str) else p in ids for p in pieces)

    def _check_images_are_whole(self, lost_ids: Sequence[int], param: str) -> None:
        if not self._image_ids.isdisjoint(lost_ids):
            raise self._loses_image(param)

    @property
    def _image_ids(self) -> frozenset[int]:
        ids = self._encoder.text_ids(self._card.image_token, adds_special_tokens=False)
        return frozenset(ids)

    def _loses_image(self, param: str) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            f"'{param}' is too long, and truncation would remove an image",
            advice=f"Please reduce the length of '{param}'.",
            window=self._card.context_window,
            param=_param(self._request),
        )

    def _echo(self, index: int, layout: Layout, *, is_cut: bool) -> str:
        prompt = self._request.prompts[index]
        return echoed_text(
            self._request,
            # Echo the text as sent: decoding its tokens may produce a different text.
            text=prompt if isinstance(prompt, str) and not is_cut else None,
            token_ids=layout.token_ids,
            decode=self._encoder.decode,
        )


def resolve_sampling(
    request: GenerationRequest, encoder: PromptEncoder, *, eos_token_ids: Sequence[int]
) -> SamplingSpec:
    """Return the sampling spec with biases for texts resolved. Raises InvalidParameterError."""
    sampling = _with_texts(request, encoder)
    _check_end_may_come(request, sampling, eos_token_ids)
    return sampling


def _with_texts(request: GenerationRequest, encoder: PromptEncoder) -> SamplingSpec:
    sampling = request.sampling
    size = encoder.vocabulary_size
    _check("logit_bias", sampling.logit_bias, size)
    _check("allowed_token_ids", sampling.allowed_token_ids, size)
    _check("stop_token_ids", sampling.stop_token_ids, size)
    if not request.bias_texts:
        return sampling
    bias = _of_texts(request.bias_texts, encoder) | sampling.logit_bias
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise must("logit_bias", f"name at most {MAX_LOGIT_BIAS_ENTRIES} tokens", len(bias))
    return msgspec.structs.replace(sampling, logit_bias=bias)


def _check_end_may_come(
    request: GenerationRequest, sampling: SamplingSpec, eos_token_ids: Sequence[int]
) -> None:
    is_tool_forced = request.tool_use is not None and request.tool_use.is_constraint
    if request.structure is None and not is_tool_forced:
        return
    constraint = "tools" if request.structure is None else request.structure.param
    for token in eos_token_ids:
        if sampling.logit_bias.get(token) == -math.inf:
            raise InvalidParameterError(
                f"'logit_bias' must not forbid the end-of-text token {token} if '{constraint}' is "
                "given: constrained text ends with it.",
                param="logit_bias",
            )


def _of_texts(texts: dict[str, float], encoder: PromptEncoder) -> dict[int, float]:
    bias: dict[int, float] = {}
    for text, value in texts.items():
        bias |= dict.fromkeys(encoder.text_ids(text, adds_special_tokens=False), value)
    return bias


def _check(param: str, token_ids: Iterable[int], vocabulary_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocabulary_size:
            raise InvalidParameterError(
                f"'{param}' must have token ids from 0 to {vocabulary_size - 1}. Given: {token}.",
                param=param,
            )


def echoed_text(
    request: GenerationRequest,
    *,
    text: str | None,
    token_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> str:
    """Return the text that precedes every choice of one prompt.

    `text` is the client's prompt, or None for token ids; `decode` shows special tokens. If the
    first echoed token completes a character, the echo includes the whole character.
    """
    last = request.echo_last
    if not request.echo or last == 0:
        return ""
    if last is None or last >= len(token_ids):
        return text if text is not None else decode(list(token_ids))
    context = list(token_ids[-last - CONTEXT_TOKENS : -last])
    shown = decode([*context, *token_ids[-last:]])
    while context and decode(context).endswith(REPLACEMENT):
        context.pop()
    return shown[len(decode(context)) :]
