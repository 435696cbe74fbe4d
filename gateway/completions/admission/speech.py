"""Prepare the jobs of a transcription: clips of audio, each with a prompt of Whisper's tokens.

The prompt says what to write: `<|startoftranscript|><|en|><|transcribe|><|notimestamps|>`. What is
not in the prompt, the grammar of the job makes the model write first.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec
from tokenizers import AddedToken, Tokenizer

from common.not_none import not_none
from contract.messages import AUDIO_RATE, WorkerCard
from contract.prompts import packed
from gateway.completions.prompt.audio.decoder import AudioDecoder
from gateway.completions.prompt.preparation import PreparedPrompt, PreparedRequest
from gateway.completions.structure.lark import document
from gateway.dialects.request import GenerationRequest, SpeechOptions
from gateway.records.errors import must, unsupported

_START: Final = "<|startoftranscript|>"
_EARLIER: Final = "<|startofprev|>"
_NO_TIMES: Final = "<|notimestamps|>"
_LANGUAGE: Final = re.compile(r"<\|[a-z]{2,3}\|>")
_TIME: Final = re.compile(r"<\|[0-9]+\.[0-9]{2}\|>")
_TEXT: Final = r"TEXT: /([^<]|<[^|])*/"
"""Text without tokens that mark something."""


def prepare_speech(
    request: GenerationRequest, tokenizer: Tokenizer, literal: Tokenizer, card: WorkerCard
) -> tuple[GenerationRequest, PreparedRequest]:
    """Prepare a transcription as if its file, which is not decoded yet, had one second of audio.

    `literal` is the tokenizer for the text before the audio. Raises an ApiError.
    """
    options = request.speech
    writer = _Writer(tokenizer, options, card)
    kept = literal.encode(str(request.prompts[0]), add_special_tokens=False).ids
    prompt = writer.prompt(kept[-(card.context_window // 2 - 1) :] if kept else [])
    prepared = PreparedPrompt(
        token_ids=packed(prompt),
        max_tokens=card.context_window - len(prompt),
        cut_tokens=0,
        plain_tokens=len(prompt),
        shown="",
    )
    options = msgspec.structs.replace(options, ends=[AUDIO_RATE], first_time=writer.first_time)
    request = msgspec.structs.replace(request, prompts=[""], form_options=options)
    return request, PreparedRequest([prepared], request.sampling, grammar=writer.grammar())


async def with_audio(
    request: GenerationRequest,
    prepared: PreparedRequest,
    card: WorkerCard,
    decoder: AudioDecoder,
    *,
    tenant_id: str,
) -> tuple[GenerationRequest, PreparedRequest]:
    """Decode the file of a prepared transcription, and cut it into clips with a prompt each.

    Raises an ApiError.
    """
    clips = await decoder.decode(
        request.audio[0], clip_seconds=card.clip_seconds, tenant_id=tenant_id
    )
    number = len(clips.samples)
    request = msgspec.structs.replace(
        request,
        prompts=[""] * number,
        images=[[]] * number,
        image_params=[[]] * number,
        audio=clips.samples,
        form_options=msgspec.structs.replace(request.speech, ends=[*accumulate(clips.lengths)]),
    )
    return request, msgspec.structs.replace(prepared, prompts=prepared.prompts * number)


class _Writer:
    """Writes prompts and grammars with the tokens of a model."""

    def __init__(self, tokenizer: Tokenizer, options: SpeechOptions, card: WorkerCard) -> None:
        self._tokenizer = tokenizer
        added = {token.content: number for number, token in _added(tokenizer)}
        self._languages = [added[text] for text in added if _LANGUAGE.fullmatch(text)]
        self._times = sorted(added[text] for text in added if _TIME.fullmatch(text))
        self._language = f"<|{options.language}|>" if options.language else ""
        self._has_times = options.has_times
        if self._language and self._language not in added:
            known = sorted(text[2:-2] for text in added if _LANGUAGE.fullmatch(text))
            raise must("language", f"be one of {', '.join(known)}", options.language)
        if not self._languages and not self._language and _START not in added:
            raise unsupported("model", f"'{card.model}' lacks the tokens of Whisper.")
        if self._has_times and not self._times:
            raise unsupported(
                "response_format", f"must be json or text: '{card.model}' writes no times."
            )
        self._task = "<|translate|>" if options.is_translated else "<|transcribe|>"

    @property
    def first_time(self) -> int:
        """Token of the time 0; times are at its end of the vocabulary."""
        return self._times[0] if self._times else 0

    def prompt(self, earlier: Sequence[int]) -> list[int]:
        """Return the tokens of the prompt, after a text before the audio."""
        marks = [_START]
        if self._language:
            marks += [self._language, self._task, *[_NO_TIMES] * (not self._has_times)]
        before = [self._id(_EARLIER), *earlier] if earlier else []
        return [*before, *map(self._id, marks)]

    def grammar(self) -> str:
        """Return the grammar of what the prompt does not say."""
        first = []
        if not self._language:
            first = [_any(self._languages), _any([self._id(self._task)])]
            first += [_any([self._id(_NO_TIMES)])] * (not self._has_times)
        if not self._has_times:
            return document(" ".join([*first, "TEXT"]), _TEXT) if first else ""
        time = _any(self._times)
        return document(" ".join([*first, "segment*"]), f"segment: {time} TEXT {time}", _TEXT)

    def _id(self, text: str) -> int:
        return not_none(self._tokenizer.token_to_id(text))


def _added(tokenizer: Tokenizer) -> list[tuple[int, AddedToken]]:
    return sorted(tokenizer.get_added_tokens_decoder().items())


def _any(token_ids: Sequence[int]) -> str:
    """Return the expression for one of these tokens."""
    ranges: list[list[int]] = []
    for number in sorted(token_ids):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return f"<[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in ranges)}]>"
