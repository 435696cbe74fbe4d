"""Response head: what any gateway needs to replay or resume a response."""

from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, Final

import msgspec
from msgspec.structs import FieldInfo

from common import clock
from contract import messages
from contract.dialect import Dialect
from contract.messages import GenerationJob, decode_job, wire_form
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.sealing import Sealer
from gateway.dialects.parameters import shown_names
from gateway.dialects.profile import PROFILES
from gateway.dialects.request import ChatRequest, GenerationRequest
from gateway.limits.replies import Kept
from gateway.limits.stored_bytes import names_of_counted
from gateway.records.limits import SubjectLimits
from gateway.records.usage_record import Counts, UsageRecord

_FIELDS: Final = msgspec.structs.fields(GenerationRequest)


def _stored(field: FieldInfo) -> tuple[str, Any] | tuple[str, Any, Any]:
    hint = Dialect if field.name == "profile" else field.type
    if field.required:
        return field.name, hint
    if field.default is msgspec.NODEFAULT:
        return field.name, hint, msgspec.field(default_factory=field.default_factory)
    return field.name, hint, field.default


# A GenerationRequest with the name of its profile instead of the profile. A field added by a newer
# gateway takes its default when the stored request is from an older one.
_StoredRequest = msgspec.defstruct(
    "_StoredRequest", [_stored(each) for each in _FIELDS], kw_only=True
)
_LEFT_OUT: Final = frozenset({"structure", "bias_texts", "infill_files", "audio"})
_CUT: Final = frozenset(
    {"profile", "prompts", "chat", "images", "image_params", "tool_use", "ignored_parameters"}
)
_WHOLE: Final = [each for each in _FIELDS if each.name not in _LEFT_OUT | _CUT]
_NAMES: Final = tuple(each.name for each in _WHOLE)
_DEFAULTS: Final = tuple(each.default for each in _WHOLE)
_values_of: Final = attrgetter(*_NAMES)


class ResponseHead(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """All of a response that is known before it begins.

    It is stored in Redis as msgpack; fields may only be added, with defaults.
    """

    request_id: str
    shown_id: str = ""
    """The id that clients see, if it is another one."""
    model: str
    """As given by the client."""
    created: int
    """Unix time in seconds, as shown in the response."""
    fingerprint: str
    request: dict[str, Any]
    """The GenerationRequest without the fields that only its jobs need: see `ResponseHead.of`.

    Most fields have their default and are left out: the gateway keeps the head of each stream.
    """
    prompt_texts: list[str]
    """The text of each prompt that the response contains."""
    generation_settings: dict[str, Any] = {}
    """See `Completion.generation_settings`."""
    jobs: list[GenerationJob]
    """As they were enqueued: job `i` runs prompt `i`."""
    record: UsageRecord
    """Draft of the usage record, created at admission."""
    subjects: tuple[SubjectLimits, ...]
    """The subjects whose limits the request counts towards."""
    most: Counts = Counts()
    """The most tokens that the request may use."""
    is_sliced: bool = False
    """Whether its completion tokens are reserved in slices."""
    weight: float
    shows_cost: bool = False
    is_background: bool = False
    """Whether it continues without a connected client."""
    most_ms: int
    """How long it may run, from its beginning or from when it resumes."""
    retention_ms: int
    """How long it can be read after its end."""
    stored_bytes: int = 0
    """Bytes of its jobs in the queue (`gateway.limits.stored_bytes`) until it ends."""

    @classmethod
    def of(
        cls,
        completion: Completion,
        *,
        request_id: str,
        jobs: list[GenerationJob],
        **others: Any,
    ) -> "ResponseHead":
        """Return the head of a response; `others` are fields that do not follow from these.

        Prompts, infill, messages, images, audio, tools, structure and biases are left out of the
        request: the jobs contain them, or they were only needed to make the jobs.
        """
        request = completion.request
        values = _values_of(request)
        # Defaults are mostly constants, so their identity suffices.
        fields: dict[str, Any] = dict(
            compress(zip(_NAMES, values, strict=True), map(is_not, values, _DEFAULTS))
        )
        fields["profile"] = request.profile.name
        fields["prompts"] = [""] * len(request.prompts)
        fields["images"] = [[] for _ in request.images]
        fields["image_params"] = []
        fields["ignored_parameters"] = shown_names(request.ignored_parameters)
        if request.chat is not None:
            fields["chat"] = ChatRequest(
                messages=[],
                shows_reasoning=request.chat.shows_reasoning,
                uses_legacy_functions=request.chat.uses_legacy_functions,
            )
        if request.tool_use is not None:
            fields["tool_use"] = replace(request.tool_use, tools=[])
        return cls(
            request_id=request_id,
            shown_id="" if completion.id == request_id else completion.id,
            model=completion.model,
            created=completion.created,
            fingerprint=completion.fingerprint,
            request=fields,
            prompt_texts=completion.prompt_texts,
            generation_settings=completion.generation_settings,
            jobs=jobs,
            shows_cost=completion.cost_of is not None,
            most_ms=max(max(job.deadline_ms for job in jobs) - clock.now_ms(), 0),
            **others,
        )

    @property
    def tenant_id(self) -> str:
        """The tenant that owns the response."""
        return self.record.tenant_id

    def kept(self, owner: str, term: int) -> Kept:
        """Return what the record of its request has in a term."""
        stored_for = names_of_counted(self.subjects)
        return Kept(owner, term, self.is_background, self.retention_ms, stored_for=stored_for)

    def without_chunks(self) -> "ResponseHead":
        """Return a head that is stored with whole prompts."""
        jobs = [msgspec.structs.replace(job, chunks=b"") for job in self.jobs]
        return msgspec.structs.replace(self, jobs=jobs)

    def generation_request(self) -> GenerationRequest:
        """Return the part of the request that determines the format of the response."""
        stored = msgspec.convert(self.request, _StoredRequest)
        values = msgspec.structs.asdict(stored)
        return GenerationRequest(**values | {"profile": PROFILES[values["profile"]]})

    def completion(self, sealer: Sealer) -> Completion:
        """Return the parts shared by all chunks of the response."""
        request = self.generation_request()
        return Completion(
            id=self.shown_id or self.request_id,
            model=self.model,
            created=self.created,
            fingerprint=self.fingerprint,
            request=request,
            prompt_token_ids=[job.prompt_token_ids for job in self.jobs],
            prompt_texts=self.prompt_texts,
            generation_settings=self.generation_settings,
            cost_of=cost_by(self.record) if self.shows_cost else None,
            seal=sealer.seal_of(self.request_id, request, tenant_id=self.tenant_id),
        )


def cost_by(record: UsageRecord) -> Callable[[Usage], int]:
    """Return a function that returns the cost of usage in micro-dollars, by a record's prices."""
    seconds = sum(record.job_seconds)
    return lambda usage: record.cost_of(
        usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, seconds
    )


def encode_head(head: ResponseHead) -> bytes:
    """Encode a head to be stored, with the prompts of its jobs as workers get them."""
    return messages.encode(msgspec.structs.replace(head, jobs=[*map(wire_form, head.jobs)]))


_StoredHead = msgspec.defstruct(
    "_StoredHead", [("jobs", list[msgspec.Raw])], bases=(ResponseHead,), kw_only=True
)
_decode = msgspec.msgpack.Decoder(_StoredHead).decode


def decode_head(content: bytes) -> ResponseHead:
    """Return the head that `encode_head` encoded. Raises msgspec.MsgspecError.

    Its jobs lack the chunks of their prompts.

    A thread that decodes a large head lets the event loop run between two jobs.
    """
    stored: Any = _decode(content)
    values = {name: getattr(stored, name) for name in ResponseHead.__struct_fields__}
    return ResponseHead(**values | {"jobs": [decode_job(job) for job in stored.jobs]})
