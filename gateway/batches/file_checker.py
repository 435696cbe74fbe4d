"""Validation of input files: find the errors of lines, and cut the file into chunks."""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from contract.sampling import N
from gateway.batches.lines import MAX_CUSTOM_ID_CHARACTERS, CheckedLine, InputLine
from gateway.dialects.profile import ALL_THAT_FIT
from gateway.dialects.wire import MAX_DEPTH
from gateway.records.batches import Chunk
from gateway.records.errors import MAX_SHOWN_CHARACTERS, MissingParameterError, printable, shown

CHUNK_LINES: Final = 32
CHUNK_BYTES: Final = 256 * 1024
"""A chunk of several lines has at most this many bytes."""
MAX_ERRORS: Final = 100
"""Errors after which the validation stops."""
MAX_MODELS: Final = 16
METHOD: Final = "POST"
UNREADABLE_CODE: Final = "file_unreadable"
DIGEST_BYTES: Final = 15
"""A digest this long takes as little memory as one of 8 bytes."""

_IS_NUMBER: Final = re.compile(rb"-?[0-9]").match
_IS_NO_TEXT: Final = re.compile(rb"-?[0-9]|\{").match
"""Token ids, and the items of a response's `input`, are parts of one prompt."""
_FIELD: Final = re.compile(r"`\$\.([a-z_]+)`")
_UNKNOWN: Final = re.compile(r"unknown field `(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `([a-z_]+)`")


class ModelBounds(NamedTuple):
    """What a batch needs to know of a model."""

    refusal: str
    """Why the batch may not use it, or an empty text."""
    window: int = 0
    """Tokens of its context window."""
    max_tokens: int = ALL_THAT_FIT
    """Completion tokens of a request that names no maximum."""


class _Body(msgspec.Struct, frozen=True):
    """The parts of a request that are checked before any line runs.

    Numbers may have any type: a wrong one concerns one line only.
    """

    model: str | None = None
    stream: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: object = None
    max_completion_tokens: object = None
    max_output_tokens: object = None
    n_predict: object = None
    n: object = None
    n_cmpl: object = None
    best_of: object = None

    def most_tokens(self, content: bytes, model: ModelBounds) -> int:
        """Return the most tokens that the request may take: each is at least a byte of it."""
        prompts, window = 1, model.window
        texts, is_other = (self.prompt, _IS_NUMBER) if self.prompt else (self.input, _IS_NO_TEXT)
        if bytes(texts)[:1] == b"[":
            prompts = sum(not is_other(bytes(each)) for each in _decode_list(texts)) or 1
        lengths = _numbers(
            self.max_tokens, self.max_completion_tokens, self.max_output_tokens, self.n_predict
        )
        length = max(lengths, default=model.max_tokens)
        # Other numbers concern one line only, which is refused when it runs.
        choices = max(_numbers(self.n, self.n_cmpl, self.best_of), default=1)
        choices = min(max(choices, int(N.minimum)), int(N.maximum))
        most = prompts * window if b"image" in content else min(len(content), prompts * window)
        return most + prompts * choices * (window if length < 0 else min(length, window))


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_line = msgspec.json.Decoder(CheckedLine).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def _numbers(*values: object) -> list[int]:
    return [int(each) for each in values if type(each) is int or type(each) is float]


class LineError(Exception):
    """A line is invalid."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class FileChecker:
    """Checks lines in their order, and cuts them into chunks.

    It holds a digest of each `custom_id` and a chunk for each 32 lines: about 120 MB for a million
    lines.
    """

    def __init__(self, batch_id: str, url: str, *, look_up: Callable[[str], ModelBounds]) -> None:
        """Accept requests to `url`. `look_up` returns what is known of a model."""
        self.chunks: list[Chunk] = []
        self.errors: list[dict[str, Any]] = []
        self.lines = 0
        """Lines so far, without blank ones at the end."""
        self.tokens = 0
        """The most tokens that all requests may take."""
        self.takes_bad_bodies = False
        """Whether a body that cannot run is no error: its line fails when it runs."""
        self._batch_id = batch_id
        self._url = url
        self._look_up = look_up
        self._models: dict[str, ModelBounds] = {}
        self._custom_ids: set[bytes] = set()
        self._at = 0
        self._first_line, self._start = 1, 0
        self._blank = 0
        """Blank lines since the last other one."""

    @property
    def models(self) -> list[str]:
        """The names of the models in the lines."""
        return list(self._models)

    @property
    def is_over(self) -> bool:
        """Whether so many lines are invalid that the others need no check."""
        return len(self.errors) >= MAX_ERRORS

    def feed(self, lines: Sequence[bytes]) -> None:
        """Check the next lines, which have no line ends."""
        for line in lines:
            if self.is_over:
                return
            if not line.strip():
                self._blank += 1
                continue
            for _ in range(self._blank):
                self.lines += 1
                self._note("empty_line", "The line is empty.")
            self._blank = 0
            size = len(line) + 1
            self.lines += 1
            if self.lines - self._first_line == CHUNK_LINES or (
                self._at + size - self._start > CHUNK_BYTES and self.lines > self._first_line
            ):
                self._cut()
            self._at += size
            try:
                self._check(line)
            except LineError as error:
                self._note(error.code, str(error), error.param)

    def finish(self) -> None:
        """Cut the last chunk. Call it after the last line; blank lines at the end are ignored."""
        self.lines += 1
        if self.lines == 1:
            self._note("empty_line", "The file has no request.")
        self._cut()
        self.lines -= 1

    def _note(self, code: str, message: str, param: str | None = None) -> None:
        if not self.is_over:
            self.errors.append(error_of(message, code, param, self.lines))

    def _cut(self) -> None:
        """End a chunk before the current line."""
        lines = self.lines - self._first_line
        if lines:
            self.chunks.append(
                Chunk(
                    batch_id=self._batch_id,
                    number=len(self.chunks),
                    first_line=self._first_line,
                    lines=lines,
                    start=self._start,
                    size=self._at - self._start,
                )
            )
        self._first_line, self._start = self.lines, self._at

    def _check(self, line: bytes) -> None:
        found = _read(line)
        if not 0 < len(found.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
            raise LineError(
                "invalid_custom_id",
                f"'custom_id' must have 1 to {MAX_CUSTOM_ID_CHARACTERS} characters. "
                f"Given: {len(found.custom_id)}.",
                "custom_id",
            )
        digest = hashlib.blake2b(found.custom_id.encode(), digest_size=DIGEST_BYTES).digest()
        if digest in self._custom_ids:
            raise LineError(
                "duplicate_custom_id",
                f"The custom_id {shown(found.custom_id)} occurs in an earlier line.",
                "custom_id",
            )
        self._custom_ids.add(digest)
        if found.method != METHOD:
            raise LineError(
                "invalid_parameter",
                f"'method' must be {METHOD}. Given: {shown(found.method)}.",
                "method",
            )
        if found.url != self._url:
            raise LineError(
                "mismatched_url",
                f"'url' must be the endpoint of the batch, {self._url}. Given: {shown(found.url)}.",
                "url",
            )
        try:
            self._check_body(bytes(found.body))
        except LineError:
            if not self.takes_bad_bodies:
                raise

    def _check_body(self, content: bytes) -> None:
        try:
            body = _decode_body(content)
        except msgspec.ValidationError as error:
            field = _FIELD.search(str(error))
            name = "body" if field is None else f"body.{field[1]}"
            raise LineError("invalid_body", f"'{name}' is invalid: {error}.", name) from None
        if body.stream:
            raise LineError("invalid_body", "'body.stream' must be false.", "body.stream")
        self.tokens += body.most_tokens(content, self._model_of(body))

    def _model_of(self, body: _Body) -> ModelBounds:
        name = body.model or ""
        known = self._models.get(name)
        if known is not None:
            return known
        found = self._look_up(name)
        if found.refusal:
            if body.model is None:
                raise _missing("body.model")
            raise LineError("model_not_found", found.refusal, "body.model")
        if len(self._models) == MAX_MODELS:
            raise LineError(
                "too_many_models", f"A batch must have at most {MAX_MODELS} models.", "body.model"
            )
        self._models[name] = found
        return found


def error_of(message: str, code: str, param: str | None, line: int | None) -> dict[str, Any]:
    """Return an error in the form in which the API shows it."""
    return {"code": code, "message": message, "param": param, "line": line}


def _missing(param: str) -> LineError:
    error = MissingParameterError(param)
    return LineError(error.code, error.message, param)


def _read(line: bytes) -> InputLine:
    try:
        return _decode_line(line)
    except msgspec.ValidationError as error:
        if (unknown := _UNKNOWN.search(str(error))) is not None:
            names = ", ".join(CheckedLine.__struct_fields__)
            raise LineError(
                "unknown_parameter",
                f"A line must have only the members {names}. Given: {shown(unknown[1])}.",
                printable(unknown[1])[:MAX_SHOWN_CHARACTERS],
            ) from None
        missing = _MISSING.search(str(error))
        if missing is not None:
            raise _missing(missing[1]) from None
        field = _FIELD.search(str(error))
        param = None if field is None else field[1]
        if param is None:
            raise LineError("invalid_json_line", "The line is not a JSON object.") from None
        raise LineError("invalid_parameter", f"'{param}' is invalid: {error}.", param) from None
    except RecursionError:
        message = f"The line must be nested at most {MAX_DEPTH} levels deep."
        raise LineError("invalid_json_line", message) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError("invalid_json_line", f"The line is not valid JSON: {error}.") from None
