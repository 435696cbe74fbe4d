"""Aliases: public names of models that split their requests over models by weight."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from enum import StrEnum
from typing import Final

from gateway.records.errors import InvalidParameterError, ModelRetiredError, must, shown

MAX_WEIGHT: Final = 1_000_000
_SPACE: Final = 2.0**64


class Sticky(StrEnum):
    """Whose requests go to the same model."""

    TENANT = "tenant"
    USER = "user"  # The tenant together with `user` of the request.


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A public model name that stands for one of several models."""

    name: str
    weights: Mapping[str, int]
    """Weights by model, in the operator's order; at least one is positive."""
    sticky: Sticky
    fallback: str | None
    """The model that is tried next if the one that the weights choose cannot run a request."""
    fallbacks: Sequence[str] = ()
    """Models that are tried after it, in order."""
    sunset_at: datetime | None
    """When requests for the alias begin to fail."""
    deprecated_at: datetime | None
    """When the alias got a sunset date; None without one."""
    replacement: str
    """The model name to use instead of an alias that has a sunset date."""
    created_at: datetime

    @property
    def models(self) -> list[str]:
        """Every model that may run a request for the alias."""
        weighted = (model for model, weight in self.weights.items() if weight)
        return [*dict.fromkeys((*weighted, *self.later_models))]

    @property
    def later_models(self) -> Sequence[str]:
        """The models to try after the one that the weights choose, in order."""
        return self.fallbacks if self.fallback is None else (self.fallback, *self.fallbacks)

    @property
    def is_pattern(self) -> bool:
        """Whether the name stands for all names that match it; a `*` matches any text."""
        return "*" in self.name

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its responses: `Sunset` (RFC 8594) and `Deprecation` (RFC 9745)."""
        if self.sunset_at is None or self.deprecated_at is None:
            return {}
        return {
            "sunset": format_datetime(self.sunset_at, usegmt=True),
            "deprecation": f"@{int(self.deprecated_at.timestamp())}",
        }

    def is_over(self, now: datetime) -> bool:
        """Whether requests for the alias fail."""
        return self.sunset_at is not None and self.sunset_at <= now

    def check_current(self, now: datetime) -> None:
        """Raise ModelRetiredError if the sunset date has passed."""
        if self.is_over(now):
            raise ModelRetiredError(
                self.name,
                retired_at=str(self.sunset_at),
                replacement=self.replacement,
                headers=self.headers,
            )

    def is_allowed(self, allows: Callable[[str], bool]) -> bool:
        """Whether a caller may use the alias, given whether it may use each name."""
        return allows(self.name) or all(map(allows, self.models))

    def order(self, tenant_id: str, user: str) -> list[str]:
        """Return the models to try for a request, the one that the weights choose first."""
        return [*dict.fromkeys((self.choose(tenant_id, user), *self.later_models))]

    def choose(self, tenant_id: str, user: str) -> str:
        """Return the model of a caller; `user` is empty if the request has none.

        Every gateway returns the same model. If a weight changes, callers move only to or from its
        model (weighted rendezvous hashing).
        """
        caller = (tenant_id, user if self.sticky is Sticky.USER else "")

        def rank(model: str) -> float:
            # `user` is last, since only the others cannot contain NUL.
            identity = "\0".join((self.name, model, *caller)).encode(errors="surrogatepass")
            digest = hashlib.blake2b(identity, digest_size=8).digest()
            return math.log((int.from_bytes(digest) + 1) / _SPACE) / self.weights[model]

        return max((model for model, weight in self.weights.items() if weight), key=rank)


def read_weights(given: Iterable[str]) -> dict[str, int]:
    """Parse weights given as MODEL or MODEL=WEIGHT. Raises InvalidParameterError."""
    weights: dict[str, int] = {}
    for each in given:
        model, separator, weight = each.rpartition("=")
        if not separator:
            model, weight = each, "1"
        if not (weight.isascii() and weight.isdigit()):
            raise must(
                "models", f"be MODEL or MODEL=WEIGHT with an integer from 0 to {MAX_WEIGHT}", each
            )
        if model in weights:
            raise InvalidParameterError(
                f"'models' must name each model once. Given twice: {shown(model)}.", param="models"
            )
        weights[model] = int(weight[:20])
    return weights
