"""What a credential may be used for."""

from enum import StrEnum


class Scope(StrEnum):
    """A right that a credential carries."""

    COMPLETIONS = "completions"  # Use the generation API, and see the models.
    ADMIN = "admin"  # Manage tenants and keys.


DEFAULT_SCOPES = frozenset({Scope.COMPLETIONS})
