"""Find the parts of a JSON schema that do not compile.

Splitting finds the keywords that the compiler lacks. Here the compiler itself judges values and
combinations, such as an invalid regular expression, or a type that no value of an `enum` has.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.splitting import Schema, Split, Unenforced, within

_MOST_SECONDS: Final = 0.2
"""CPU time for one schema."""
_OVERLAP: Final = (
    "'oneOf' cannot be enforced, because its schemas may overlap. Use 'anyOf', or require in each "
    "one of its 'properties' with another 'const'"
)


def mended(found: Split, find_error: Callable[[dict[str, Any]], str]) -> Split:
    """Return a schema without the parts that do not compile, which are its `unenforced`.

    `find_error` returns why a schema does not compile, or "". Raises RefusedError if the search
    takes too long.
    """
    return _Mender(found, find_error).mended()


class _Mender:
    def __init__(self, found: Split, find_error: Callable[[dict[str, Any]], str]) -> None:
        self._found = found
        self._find_error = find_error
        self._ends_at = time.process_time() + _MOST_SECONDS
        self._left_out: list[Unenforced] = []
        self._definitions: dict[str, Schema] = {}

    def mended(self) -> Split:
        schema, places = self._found.schema, self._found.places
        definitions = schema.get("$defs", {})
        # Until they are mended, they permit everything.
        self._definitions = dict.fromkeys(definitions, True)
        for (name, each), place in zip(definitions.items(), places, strict=True):
            self._definitions[name] = self._mended(each, place)
        root = {keyword: each for keyword, each in schema.items() if keyword != "$defs"}
        result = {**self._mended(root, ""), "$defs": self._definitions}
        return Split(result, self._left_out, places)

    def _mended(self, schema: Schema, path: str) -> Any:
        if isinstance(schema, bool) or not self._error(schema):
            return schema
        result: dict[str, Any] = {}
        for keyword in sorted(schema, key=lambda each: each != "type"):
            place = within(path, keyword)
            value = self._parts(schema[keyword], keyword, place)
            error = self._error({**result, keyword: value})
            if not error:
                result[keyword] = value
            elif keyword == "oneOf" and not self._error(many := {**result, "anyOf": value}):
                self._left_out.append(Unenforced(place, _OVERLAP))
                result = many
            else:
                reason = f"'{keyword}' cannot be enforced: {error}"
                self._left_out.append(Unenforced(place, reason))
        if "patternProperties" in schema.keys() - result.keys():
            result["additionalProperties"] = True
        return result

    def _parts(self, value: Any, keyword: str, place: str) -> Any:
        match keyword:
            case "properties" | "patternProperties":
                return {
                    name: self._mended(each, within(place, name)) for name, each in value.items()
                }
            case "items" | "additionalItems" | "additionalProperties" if not isinstance(
                value, list
            ):
                return self._mended(value, place)
            case "items" | "prefixItems" | "allOf" | "anyOf" | "oneOf":
                return [self._mended(each, f"{place}[{index}]") for index, each in enumerate(value)]
            case _:
                return value

    def _error(self, schema: dict[str, Any]) -> str:
        if time.process_time() > self._ends_at:
            raise RefusedError("too complex: it takes too long to find what does not compile")
        return self._find_error({**schema, "$defs": self._definitions})
