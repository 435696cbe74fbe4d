"""Request and response bodies of keys."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BeforeValidator, Field
from typing_extensions import override

from contract.dialect import Dialect
from gateway.accounts.keys.addresses import MAX_ADDRESSES, read_addresses
from gateway.accounts.keys.rules import DEFAULT_GRACE, MAX_ALLOWED_MODELS, MAX_GRACE
from gateway.accounts.keys.service import CreatedKey
from gateway.accounts.shared.fields import (
    BodyWithLimits,
    LimitsGiven,
    LimitsShown,
    ListBody,
    Name,
    RecordBody,
    RequestBody,
)
from gateway.records.scopes import Scope

Scopes = Annotated[
    list[Scope],
    Field(min_length=1, max_length=2 * len(Scope), description="Scopes of the key."),
]
Models = Annotated[
    list[Name] | None,
    Field(min_length=1, max_length=MAX_ALLOWED_MODELS, description="Null: all models."),
]
Addresses = Annotated[
    list[Annotated[str, Field(max_length=100)]] | None,
    Field(
        min_length=1,
        max_length=MAX_ADDRESSES,
        description="Addresses and networks that may use the key; null: any.",
        examples=[["192.0.2.7", "10.0.0.0/8", "2001:db8::/32"]],
    ),
]
KeyDialect = Annotated[
    Dialect | None,
    Field(description="Default for requests that specify none; null: the tenant's dialect."),
]
KeyExpiry = Annotated[AwareDatetime | None, Field(description="Expiry of the key; null: never.")]


class _KeyOptions(BodyWithLimits):
    @override
    def options(self) -> dict[str, Any]:
        """Return the arguments for the service. Raises InvalidParameterError."""
        options = super().options()
        if options.get("allowed_addresses") is not None:
            options["allowed_addresses"] = read_addresses(options["allowed_addresses"])
        if options.get("allowed_models") is not None:
            options["allowed_models"] = frozenset(options["allowed_models"])
        if "scopes" in options:
            options["scopes"] = frozenset(options["scopes"])
        return options


class KeyCreation(_KeyOptions):
    """A key to create."""

    name: Name = Field(description="Name of the key.")
    scopes: Scopes = Field(default_factory=lambda: [Scope.COMPLETIONS])
    project_id: Annotated[str | None, Field(max_length=63)] = None
    allowed_models: Models = None
    allowed_addresses: Addresses = None
    expires_at: KeyExpiry = None
    dialect: KeyDialect = None
    limits: LimitsGiven = Field(default_factory=dict)


class KeyChange(_KeyOptions):
    """Changes to a key; absent fields stay unchanged."""

    name: Name = Field(default_factory=str)
    scopes: Scopes = Field(default_factory=list)
    allowed_models: Models = None
    allowed_addresses: Addresses = None
    expires_at: KeyExpiry = None
    dialect: KeyDialect = None
    limits: LimitsGiven = Field(default_factory=dict)


class KeyRotation(RequestBody):
    """Options of a key rotation."""

    grace_seconds: int = Field(
        int(DEFAULT_GRACE.total_seconds()),
        strict=True,
        ge=0,
        le=int(MAX_GRACE.total_seconds()),
        description="How long the current secret remains valid.",
    )


def _sorted(values: Iterable[str] | None) -> list[str] | None:
    return None if values is None else sorted(values)


def _texts(values: Iterable[object] | None) -> list[str] | None:
    return None if values is None else list(map(str, values))


class KeyBody(RecordBody):
    """A key, without its secret."""

    object: Literal["key"] = "key"
    id: str
    tenant_id: str
    project_id: str | None
    prefix: str = Field(description="The public part of the key: `sk-PREFIX-...`.")
    name: str
    scopes: Annotated[list[Scope], BeforeValidator(sorted)]
    allowed_models: Annotated[list[str] | None, BeforeValidator(_sorted)] = Field(
        description="Null: all models."
    )
    allowed_addresses: Annotated[list[str] | None, BeforeValidator(_texts)] = Field(
        description="Null: any address."
    )
    dialect: Dialect | None
    limits: LimitsShown
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    old_prefix: str | None = Field(description="Prefix of the previous secret, after a rotation.")
    old_expires_at: datetime | None = Field(description="Expiry of the previous secret.")


class CreatedKeyBody(KeyBody):
    """A key with its new secret."""

    key: str = Field(description="The complete key. Store it: it cannot be shown again.")

    @classmethod
    def of_created(cls, created: CreatedKey) -> Self:
        """Return the response body of a new key, the only one with its secret."""
        return cls(**KeyBody.of(created.record).model_dump(), key=created.key.reveal())


class RevokedKeyBody(KeyBody):
    """A revoked key."""

    made_keys: list[str] = Field(description="Ids of the keys that it made and that end with it.")


class KeyList(ListBody[KeyBody]):
    """A page of keys, oldest first."""
