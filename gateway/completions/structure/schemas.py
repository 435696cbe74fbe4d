"""JSON schemas as Lark: what the compiler enforces of them, with closed objects.

What cannot be enforced of a strict schema is refused, with its path. A lenient schema is enforced
without that part.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.completions.structure import lark
from gateway.completions.structure.closing import closed
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.mending import mended
from gateway.completions.structure.splitting import Split, split

_ANY_OBJECT: Final = {"type": "object"}
_NO_PROPERTIES: Final[dict[str, Any]] = {**_ANY_OBJECT, "properties": {}}
"""What a schema of arguments adds to: without properties, a tool has no arguments."""


@dataclass(slots=True)
class _Translation:
    source: Any
    """The client's schema, which must stay alive, because its id is the key."""
    place: str
    is_strict: bool
    of_arguments: bool
    found: Split | None = None
    closed: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return lark.json_value(self.closed)


class Schemas:
    """The schemas of one constraint, each translated once.

    Args:
        enforces_lenient: Whether lenient schemas are enforced at all.
    """

    def __init__(self, *, enforces_lenient: bool = True) -> None:
        self._enforces_lenient = enforces_lenient
        self._known: dict[int, _Translation] = {}
        self.unenforced: list[str] = []
        """Places of what is not enforced of lenient schemas."""

    def json(
        self, schema: Any, place: str, *, is_strict: bool = True, of_arguments: bool = False
    ) -> str:
        """Return Lark for JSON that matches a schema; see `closed`."""
        known = self.closed(schema, place, is_strict=is_strict, of_arguments=of_arguments)
        return lark.json_value(known)

    def closed(
        self, schema: Any, place: str, *, is_strict: bool = True, of_arguments: bool = False
    ) -> dict[str, Any]:
        """Return what is enforced of a decoded schema, which is an object or a boolean.

        Objects must have their properties in the schema's order, and only those that it names.
        Unknown keywords have no effect, as JSON Schema specifies.

        Args:
            schema: The schema.
            place: Its place in the body.
            is_strict: Whether to refuse what cannot be enforced, not leave it out.
            of_arguments: Whether the JSON is an object, with no properties unless the schema names
                them.

        Raises:
            RefusedError: It names the place of what is refused.
        """
        if (known := self._known.get(id(schema))) is None:
            known = _Translation(schema, place, is_strict, of_arguments)
            if is_strict or self._enforces_lenient:
                whole = schema
                if of_arguments and schema is not False:
                    whole = _ANY_OBJECT if schema is True else {**_NO_PROPERTIES, **schema}
                try:
                    self._take(known, split(whole))
                except RefusedError as error:
                    raise error.within(place) from None
            else:
                self._reduce(known)
            self._known[id(schema)] = known
        return known.closed

    def mend(self, find_error: Callable[[str], str]) -> bool:
        """Leave out what does not compile of the schemas. Return whether that is anything.

        `find_error` returns why a grammar does not compile, or "". Raises RefusedError for what
        does not compile of a strict schema.
        """
        mended_schemas = [each for each in self._known.values() if self._mend(each, find_error)]
        return bool(mended_schemas)

    def name_unenforced(self, schema: Any, paths: list[str]) -> None:
        """Name paths that the format of calls cannot enforce, whether strict or not."""
        place = self._known[id(schema)].place
        named = (place + path for path in paths)
        self.unenforced += (each for each in named if each not in self.unenforced)

    def leave_out(self, schema: Any) -> bool:
        """Leave out all of a schema, unless it is strict. Return whether it was enforced."""
        known = self._known[id(schema)]
        is_enforced = known.found is not None and not known.is_strict
        if is_enforced:
            self._reduce(known)
        return is_enforced

    def _mend(self, known: _Translation, find_error: Callable[[str], str]) -> bool:
        if known.found is None or not find_error(lark.document(known.text)):
            return False

        def find(part: dict[str, Any]) -> str:
            try:
                return find_error(lark.document(lark.json_value(closed(part))))
            except RefusedError as error:
                return str(error)

        try:
            self._take(known, mended(known.found, find))
        except RefusedError as error:
            if known.is_strict:
                raise error.within(known.place) from None
            self._reduce(known)
        return True

    def _take(self, known: _Translation, found: Split) -> None:
        if found.unenforced and known.is_strict:
            first = found.unenforced[0]
            raise RefusedError(first.reason, param=first.path)
        known.closed, known.found = closed(found.schema), found
        self.unenforced += (known.place + each.path for each in found.unenforced)

    def _reduce(self, known: _Translation) -> None:
        known.found, known.closed = None, _ANY_OBJECT if known.of_arguments else {}
        self.unenforced.append(known.place)
