"""Rotated keys: both secrets work, then one, on every gateway."""

from dataclasses import replace
from datetime import timedelta

import pytest

from common import clock
from contract.dialect import Dialect
from gateway.accounts.keys.service import CreatedKey, KeyService
from gateway.auth.authenticator import Authenticator
from gateway.records.errors import ApiError, AuthenticationError, ExpiredCredentialError
from gateway.records.principal import Principal
from tests.gateway.auth.gateways import Gateway, all_accept, until_refused


async def _principal(authenticator: Authenticator, key: CreatedKey) -> Principal:
    return await authenticator.authenticate(f"Bearer {key.key.reveal()}")


async def test_both_secrets_are_the_same_key_until_the_grace_period_ends(
    authenticator: Authenticator,
    keys: KeyService,
    key: CreatedKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rotated = await keys.rotate("acme", key.record.id, grace=timedelta(minutes=10))
    principals = [await _principal(authenticator, each) for each in (key, rotated)]
    # The former secret manages keys only until its own end.
    until = rotated.record.old_expires_at
    former = replace(principals[1], expires_at=until, is_former_secret=True)
    assert principals == [former, principals[1]]
    assert principals[1].expires_at is None
    assert principals[0].credential_id == key.record.id
    now = clock.now_ms()
    monkeypatch.setattr(clock, "now_ms", lambda: now + 599_000)
    await _principal(authenticator, key)
    monkeypatch.setattr(clock, "now_ms", lambda: now + 601_000)
    with pytest.raises(ExpiredCredentialError):
        await _principal(authenticator, key)
    assert await _principal(authenticator, rotated) == principals[1]
    authenticator.expire_all()
    with pytest.raises(ExpiredCredentialError):
        await _principal(authenticator, key)


async def test_old_secret_does_not_outlive_the_key_itself(
    authenticator: Authenticator,
    keys: KeyService,
    key: CreatedKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = clock.now_ms()
    rotated = await keys.rotate("acme", key.record.id, grace=timedelta(days=30))
    expires_at = rotated.record.created_at + timedelta(hours=1)
    await keys.update("acme", key.record.id, expires_at=expires_at)
    monkeypatch.setattr(clock, "now_ms", lambda: now + 3_601_000)
    for each in (key, rotated):
        with pytest.raises(ExpiredCredentialError):
            await _principal(authenticator, each)


async def test_old_secret_with_the_new_prefix_is_no_key(
    authenticator: Authenticator, keys: KeyService, key: CreatedKey
) -> None:
    rotated = await keys.rotate("acme", key.record.id)
    mixed = f"Bearer sk-{rotated.key.prefix}{key.key.reveal()[15:]}"
    with pytest.raises(ApiError):
        await authenticator.authenticate(mixed)


async def test_secret_without_grace_is_refused_by_every_gateway(
    gateways: list[Gateway], keys: KeyService, key: CreatedKey
) -> None:
    assert await all_accept(gateways, key)
    rotated = await keys.rotate("acme", key.record.id, grace=timedelta(0))
    await until_refused(gateways, key)
    assert await all_accept(gateways, rotated)


async def test_second_rotation_ends_the_oldest_secret_on_every_gateway(
    gateways: list[Gateway], keys: KeyService, key: CreatedKey
) -> None:
    assert await all_accept(gateways, key)
    second = await keys.rotate("acme", key.record.id)
    assert await all_accept(gateways, key)
    assert await all_accept(gateways, second)
    third = await keys.rotate("acme", key.record.id)
    await until_refused(gateways, key)
    assert await all_accept(gateways, second)
    assert await all_accept(gateways, third)


async def test_revocation_ends_both_secrets_on_every_gateway(
    gateways: list[Gateway], keys: KeyService, key: CreatedKey
) -> None:
    rotated = await keys.rotate("acme", key.record.id)
    assert await all_accept(gateways, key)
    assert await all_accept(gateways, rotated)
    await keys.revoke("acme", key.key.prefix)
    await until_refused(gateways, key)
    await until_refused(gateways, rotated)
    with pytest.raises(AuthenticationError, match="unknown or has been revoked"):
        await _principal(gateways[0].authenticator, key)


async def test_changed_option_holds_for_the_old_secret_too(
    authenticator: Authenticator, keys: KeyService, key: CreatedKey
) -> None:
    await keys.rotate("acme", key.record.id)
    await _principal(authenticator, key)
    await keys.update("acme", key.record.id, dialect=Dialect.OMLX)
    authenticator.drop_key(key.record.id)
    assert (await _principal(authenticator, key)).dialect is Dialect.OMLX
