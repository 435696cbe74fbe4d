"""Responses of transcriptions: as JSON, text, subtitles, or the events of a stream."""

import re
import zlib
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, Final

import msgspec
from typing_extensions import override

from contract.messages import AUDIO_RATE, Delta, decode_logprobs
from gateway.completions.queue.generation import Turn
from gateway.completions.rendering.assembler import Assembler, WholeResponse
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.rendering.events import EventRenderer
from gateway.completions.rendering.sse import error_data
from gateway.dialects.request import LANGUAGE, SpeechFormat
from gateway.records.errors import ApiError

_MARK: Final = re.compile(r"<\|([^|]*)\|>")
_TIME: Final = re.compile(r"[0-9]+\.[0-9]{2}")
_TEXT: Final = {"content-type": "text/plain; charset=utf-8"}
"""Headers of texts. Of other types, also `text/vtt`, OpenAI's client for .NET reads only JSON."""
_Scored = tuple[int, float]
"""A token id and its log-probability; 0 if it was not reported."""
_encode: Final = msgspec.json.Encoder().encode


class SpeechAssembler(Assembler):
    """Collects the text of each clip."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(completion)
        self._options = completion.request.speech
        self._texts = [""] * len(completion.request.prompts)
        self._tokens: list[list[_Scored]] = [[] for _ in self._texts]

    @override
    def add_delta(self, prompt_index: int, delta: Delta) -> None:
        self._texts[prompt_index] += delta.text
        scores = [each.logprob or 0.0 for each in decode_logprobs(delta.logprobs)]
        self._tokens[prompt_index] += zip(delta.token_ids, chain(scores, repeat(0.0)))  # noqa: B905

    @override
    async def response(self, turn: Turn) -> WholeResponse:
        form = self._options.format
        if form in (SpeechFormat.JSON, SpeechFormat.VERBOSE_JSON):
            return WholeResponse(_encode(self._body(form)), self.usage, {})
        if form is SpeechFormat.TEXT:
            content = f"{self._text()}\n"
        else:
            is_srt = form is SpeechFormat.SRT
            content = "" if is_srt else "WEBVTT\n\n"
            for each in self._segments():
                content += f"{each['id'] + 1}\n" if is_srt else ""
                start, end = (_clock(each[name], "," if is_srt else ".") for name in _ENDS)
                content += f"{start} --> {end}\n{each['text'].strip()}\n\n"
        return WholeResponse(content.encode(), self.usage, {**_TEXT})

    def _body(self, form: SpeechFormat) -> dict[str, Any]:
        usage = _usage(self.completion, self.usage)
        if form is SpeechFormat.JSON:
            return {"text": self._text(), "usage": usage}
        return {
            "task": "translate" if self._options.is_translated else "transcribe",
            "language": self._language(),
            "duration": self._options.ends[-1] / AUDIO_RATE,
            "text": self._text(),
            "segments": [*self._segments()],
            "usage": usage,
        }

    def _text(self) -> str:
        return "".join(_MARK.sub("", each) for each in self._texts).strip()

    def _language(self) -> str:
        found = _MARK.match(self._texts[0])
        written = found[1] if found and LANGUAGE.fullmatch(found[1]) else ""
        return self._options.language or written

    def _segments(self) -> Iterator[dict[str, Any]]:
        """Yield the segments. A time is never before an earlier one, or after its clip."""
        options, number = self._options, 0
        for index, text in enumerate(self._texts):
            begin, end = options.starts[index] / AUDIO_RATE, options.ends[index] / AUDIO_RATE
            times, texts = _timed(text, begin)
            runs = _runs(self._tokens[index], options.first_time)
            last = begin
            # A segment that the length of the response has cut off has no end.
            for at in range(0, len(times), 2):
                start = min(max(times[at], last), end)
                last = min(max([*times, end][at + 1], start), end)
                words, run = texts[at], runs[at] if at < len(runs) else []
                # Typed clients require all numbers.
                yield {
                    "id": number,
                    "seek": round(begin * 100),
                    "start": round(start, 3),
                    "end": round(last, 3),
                    "text": words,
                    "tokens": [token_id for token_id, _ in run],
                    "temperature": self.completion.request.sampling.temperature,
                    "avg_logprob": round(sum(score for _, score in run) / max(len(run), 1), 6),
                    "compression_ratio": _compression(words.encode()),
                    "no_speech_prob": 0.0,
                }
                number += 1


_ENDS: Final = ("start", "end")


def _usage(completion: Completion, usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage of audio, with the cost."""
    seconds = completion.request.speech.seconds
    return {"type": "duration", "seconds": seconds} | completion.cost(usage)


def _timed(text: str, begin: float) -> tuple[list[float], list[str]]:
    """Return the times in a clip's text, in seconds, and the text after each of them."""
    times: list[float] = []
    texts: list[str] = []
    marks = [each for each in _MARK.finditer(text) if _TIME.fullmatch(each[1])]
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        times.append(begin + float(mark[1]))
        texts.append(_MARK.sub("", text[mark.end() : following and following.start()]))
    return times, texts


def _runs(tokens: list[_Scored], first_time: int) -> list[list[_Scored]]:
    """Return the tokens after each time; those of times are at the end of the vocabulary."""
    runs: list[list[_Scored]] = []
    for token in tokens:
        if token[0] >= first_time:
            runs.append([])
        elif runs:
            runs[-1].append(token)
    return runs


def _compression(text: bytes) -> float:
    return round(len(text) / len(zlib.compress(text)), 3)


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


class SpeechRenderer(EventRenderer):
    """Renders the events of a transcription: the text of one clip after the other."""

    def __init__(self, completion: Completion, *, skip: int = 0, has_ids: bool = False) -> None:
        super().__init__(completion, skip=skip, has_ids=has_ids)
        self._options = completion.request.speech
        number = len(completion.request.prompts)
        self._waiting = [""] * number
        """Text of each clip that is not sent, because an earlier clip has not ended."""
        self._ended = [False] * number
        self._clip = 0
        self._text = ""

    @override
    def _add_delta(self, index: int, delta: Delta, parts: list[bytes]) -> None:
        self._waiting[index] += _MARK.sub("", delta.text)
        self._ended[index] = delta.finish_reason is not None
        while self._clip < len(self._waiting):
            new, self._waiting[self._clip] = self._waiting[self._clip], ""
            self._add_text(new, parts)
            if not self._ended[self._clip]:
                break
            self._clip += 1

    def _add_text(self, new: str, parts: list[bytes]) -> None:
        new = new if self._text else new.lstrip()
        if new:
            self._text += new
            self._add({"type": "transcript.text.delta", "delta": new}, parts)

    @override
    def _finish(self, parts: list[bytes]) -> None:
        usage = _usage(self._completion, self.usage)
        done = {"type": "transcript.text.done", "text": self._text.rstrip(), "usage": usage}
        self._add(done, parts)

    @override
    def _failure_events(self, error: ApiError) -> list[bytes]:
        return [error_data(error, self._completion.request.profile.error_style)]

    def _add(self, event: dict[str, Any], parts: list[bytes]) -> None:
        self._add_event(b"data: " + _encode(event), parts)
