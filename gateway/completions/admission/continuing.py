"""Requests that name kept responses: their items are read, so that a request has all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from gateway.completions.admission.call import Call
from gateway.completions.stored.kept import Kept, KeptResponses
from gateway.dialects.endpoint import RESPONSES, Endpoint
from gateway.dialects.parameters import is_nothing
from gateway.dialects.request import ResponseForm
from gateway.dialects.responses.items import PREVIOUS, REFERENCE, Continued, as_items, place_of
from gateway.dialects.wire import StructureMeter
from gateway.http.body import BodyLimits, BodyReader
from gateway.platform.settings import Settings
from gateway.records.errors import (
    NotFoundError,
    PayloadTooLargeError,
    PreviousResponseNotFoundError,
    invalid,
    must,
    shown,
)

MOST_RESPONSES: Final = 1_000
"""Kept responses that one request reads: each step of an agent is one."""
_WHY: Final = "does not exist, has not ended, has expired, or was not kept"


@dataclass(eq=False)
class Continuations:
    """Reads what requests name of kept responses."""

    _settings: Settings
    _kept: KeptResponses
    _bodies: BodyReader

    async def continued(self, call: Call, endpoint: Endpoint) -> Call:
        """Return a call whose input has all items of its conversation.

        A `Continued` is in place of the id of the response that it continues, and items are in
        place of references. A deployment that keeps no responses reads none. Raises an ApiError.
        """
        if endpoint.form is not ResponseForm.RESPONSES:
            return call
        keeps, store = self._settings.keeps_responses, call.body.get("store")
        # The result of a line is in a file.
        is_unkept = call.line is not None or not keeps or not call.is_kept
        if is_unkept and (store is None or store is True):
            asks = store and call.line is None and not call.body.get("background")
            ignored = (*call.ignored_query, "store") if asks else call.ignored_query
            body = call.body | {"store": False}
            call = msgspec.structs.replace(call, body=body, ignored_query=ignored)
        if not keeps:
            return call
        references = await call.beside(partial(_references, call.body.get("input")))
        previous = call.body.get(PREVIOUS)
        previous = None if is_nothing(previous) else previous
        if previous is None and not references:
            return call
        if not isinstance(previous, str | None):
            raise must(PREVIOUS, "be a string", previous)
        # Items of the input are in an object of their own.
        wanted = dict[str, bool]()
        for response, is_input in filter(None, map(place_of, references.values())):
            id_ = RESPONSES.id_prefix + response
            wanted[id_] = wanted.get(id_, False) or is_input
        if previous is not None and RESPONSES.has_given(previous):
            wanted[previous] = True
        if len(wanted) > MOST_RESPONSES:
            raise must("input", f"refer to at most {MOST_RESPONSES} responses", len(wanted))
        limits = self._bodies.limits
        try:
            kept = await self._kept.find(call.principal, wanted, most_bytes=limits.most_bytes)
            complete = partial(_complete, call.body, previous, references, kept, limits)
            size = sum(len(text) for each in kept.values() for text in each)
            # What follows works on all items, however short the body was.
            beside = partial(call.beside, size=size)
            return msgspec.structs.replace(call, body=await beside(complete), beside=beside)
        except PayloadTooLargeError as error:
            param = "input" if previous is None else PREVIOUS
            rule = f"names kept responses that could not be sent whole. {error.message}"
            raise invalid(param, rule) from None


def _references(items: object) -> dict[int, str]:
    """Return the ids of the items to which an input refers, by their places in the input."""
    found = dict[int, str]()
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == REFERENCE:
            if not isinstance(item.get("id"), str):
                raise must(f"input[{index}].id", "be the id of an item", item.get("id"))
            found[index] = item["id"]
    return found


def _complete(
    body: dict[str, Any],
    previous: str | None,
    references: Mapping[int, str],
    kept: Mapping[str, Kept],
    limits: BodyLimits,
) -> dict[str, Any]:
    """Return a body with the items that it names. Raises an ApiError."""
    meter = StructureMeter(most_items=limits.most_items, most_members=limits.most_members)
    meter.feed(b"".join(text for each in kept.values() for text in each))
    while meter.is_in_doubt:
        meter.count()
    items_of = {
        id_: (msgspec.json.decode(each.input)["items"] if each.input else [])
        + msgspec.json.decode(each.response)["output"]
        for id_, each in kept.items()
    }
    known = {item["id"]: item for items in items_of.values() for item in items}
    # One item may be named many times.
    sizes = {id_: len(msgspec.json.encode(known.get(id_))) for id_ in {*references.values()}}
    if (total := sum(map(sizes.__getitem__, references.values()))) > limits.most_bytes:
        raise PayloadTooLargeError(f"They have {total} bytes, of at most {limits.most_bytes}.")
    given: Any = [*body["input"]] if references else body.get("input")
    for index, id_ in references.items():
        if id_ not in known:
            message = f"'input[{index}]' refers to item {shown(id_)}, which {_WHY}."
            raise NotFoundError(f"{message} Send the item itself.", param=f"input[{index}]")
        given[index] = known[id_]
    if previous is None or given is None:
        return body | {"input": given, PREVIOUS: None}
    if previous not in kept:
        message = f"Previous response with id {shown(previous)} not found: it {_WHY}."
        raise PreviousResponseNotFoundError(message, param=PREVIOUS)
    earlier = items_of[previous]
    continued = Continued(previous, len(earlier))
    return body | {"input": earlier + as_items(given), PREVIOUS: continued}
