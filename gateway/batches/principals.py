"""The principal for which the lines of a batch run."""

from dataclasses import replace
from typing import Final

from gateway.auth.authenticator import Authenticator
from gateway.auth.jwt_verifier import TokenClaims
from gateway.records.batches import Batch
from gateway.records.limits import JWT_PREFIX, LimitName, Limits, SubjectLimits
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

_LINE_LIMITS: Final = (
    LimitName.REQUESTS_PER_DAY,
    LimitName.TOKENS_PER_DAY,
    LimitName.BUDGET,
    LimitName.STORED_BYTES,
    LimitName.MODEL_SHARE,
)


async def principal_of(authenticator: Authenticator, batch: Batch) -> Principal:
    """Return the principal of the credential that created a batch, with its current rights.

    Raises AuthenticationError if the credential is revoked, PermissionDeniedError if it has lost
    its rights or the account is suspended, and StoreUnavailableError.
    """
    if not batch.credential_id.startswith(JWT_PREFIX):
        principal = await authenticator.principal_of_key(batch.credential_id)
    else:
        claims = TokenClaims(
            tenant_id=batch.tenant_id,
            subject=batch.credential_id.removeprefix(JWT_PREFIX),
            scopes=frozenset({Scope.COMPLETIONS}),
            operator_scopes=frozenset(),
            names_scopes=True,
            allowed_models=None
            if batch.allowed_models is None
            else frozenset(batch.allowed_models),
            dialect=batch.dialect,
            project_id=batch.project_id,
            role=None,
        )
        principal = await authenticator.principal_of_task(claims)
    principal.require_scope(Scope.COMPLETIONS)
    return principal


def without_rights(batch: Batch) -> Principal:
    """Return a principal for lines that only end: none of them runs."""
    return Principal(
        tenant_id=batch.tenant_id,
        tenant_weight=1.0,
        credential_id=batch.credential_id,
        scopes=frozenset(),
        allowed_models=None,
        project_id=batch.project_id,
        dialect=batch.dialect,
    )


def for_lines(principal: Principal) -> Principal:
    """Return a principal whose lines count only in limits of days, money, bytes and model shares.

    How many run at once depends on the free capacity, so they take nothing from limits per minute.
    But a limit of 0 allows no line.
    """
    return replace(principal, limits=tuple(map(_of_lines, principal.limits)))


def _of_lines(subject: SubjectLimits) -> SubjectLimits:
    limits = {name: subject.limits.get(name) for name in LimitName}
    kept = {name: value for name, value in limits.items() if name in _LINE_LIMITS or value == 0}
    return replace(subject, limits=Limits.from_values(kept, {}))
