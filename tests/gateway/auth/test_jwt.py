"""JWTs: what is accepted, and every way in which one is refused."""

import asyncio
import base64
import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from pydantic import SecretStr, ValidationError
from starlette.responses import JSONResponse

from contract.dialect import Dialect
from gateway.accounts.tenants.service import TenantService
from gateway.auth.authenticator import Authenticator
from gateway.auth.jwt_verifier import (
    AGAIN_SECONDS,
    CHECK_SECONDS,
    FRESH_SECONDS,
    JwksError,
    JwksFile,
    JwksUrl,
    JwtVerifier,
)
from gateway.platform.database.engine import Database
from gateway.platform.settings import JwtAlgorithm, Settings
from gateway.records.errors import (
    AccountSuspendedError,
    AuthenticationError,
    ExpiredCredentialError,
    ServiceUnavailableError,
)
from gateway.records.scopes import DEFAULT_SCOPES, TENANT_SCOPES, Scope
from tests.gateway.http_calls import serving
from tests.support.cases import all_cases, case

ISSUER = "https://login.example"
AUDIENCE = "sluice"
SECRET = "a secret of forty-eight characters, for the test"

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
WEAK_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=1024)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
P384_KEY = ec.generate_private_key(ec.SECP384R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()

PUBLIC = {
    "rsa": json.loads(RSAAlgorithm.to_jwk(RSA_KEY.public_key())),
    "weak": json.loads(RSAAlgorithm.to_jwk(WEAK_RSA_KEY.public_key())),
    "ec": json.loads(ECAlgorithm.to_jwk(EC_KEY.public_key())),
    "p384": json.loads(ECAlgorithm.to_jwk(P384_KEY.public_key())),
    "ed": json.loads(OKPAlgorithm.to_jwk(ED_KEY.public_key())),
}


def _write_jwks(path: Path, *kids: str) -> None:
    path.write_text(json.dumps({"keys": [{**PUBLIC[kid], "kid": kid} for kid in kids]}))


def _claims(**changes: Any) -> dict[str, Any]:
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "exp": int(time.time()) + 600,
        "sub": "robot",
        "tenant": "acme",
        **changes,
    }
    return {name: value for name, value in claims.items() if value is not None}


def _hs256(**changes: Any) -> str:
    return jwt.encode(_claims(**changes), SECRET, "HS256")


@pytest.fixture
def jwks_file(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    _write_jwks(path, *PUBLIC)
    return path


@pytest.fixture
def verifier(jwks_file: Path) -> JwtVerifier:
    """Accepts all algorithms."""
    return JwtVerifier(
        Settings(
            jwt_algorithms=frozenset(JwtAlgorithm),
            jwt_secret=SecretStr(SECRET),
            jwt_jwks_file=jwks_file,
            jwt_issuer=ISSUER,
            jwt_audience=AUDIENCE,
        )
    )


@pytest.fixture
def authenticator(
    database: Database, tenants: TenantService, verifier: JwtVerifier
) -> Authenticator:
    return Authenticator(database, verifier=verifier, ttl_seconds=60, max_entries=100)


def _changed(verifier: JwtVerifier, **changes: Any) -> JwtVerifier:
    return JwtVerifier(verifier._settings.model_copy(update=changes))


def _refusal(verifier: JwtVerifier, token: str) -> str:
    with pytest.raises(AuthenticationError) as caught:
        verifier.verify(token)
    assert caught.value.status == 401
    assert token.rpartition(".")[0] not in caught.value.message
    return caught.value.message


@all_cases(
    ("key", "algorithm", "kid"),
    [
        (SECRET, "HS256", None),
        (RSA_KEY, "RS256", "rsa"),
        (EC_KEY, "ES256", "ec"),
        (ED_KEY, "EdDSA", "ed"),
    ],
    ids=["HS256", "RS256", "ES256", "EdDSA"],
)
async def test_every_algorithm_gives_the_principal(
    authenticator: Authenticator, key: Any, algorithm: str, kid: str | None
) -> None:
    headers = {} if kid is None else {"kid": kid}
    token = jwt.encode(_claims(), key, algorithm, headers=headers)
    principal = await authenticator.authenticate(f"Bearer {token}")
    assert principal.tenant_id == "acme"
    assert principal.tenant_weight == 2.0
    assert principal.credential_id == "jwt:robot"
    assert principal.scopes == DEFAULT_SCOPES
    assert principal.allowed_models is None


def test_signature_by_another_key_is_refused(verifier: JwtVerifier) -> None:
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    token = jwt.encode(_claims(), stranger, "RS256", headers={"kid": "rsa"})
    assert _refusal(verifier, token) == "The token's signature is wrong."
    other_secret = jwt.encode(_claims(), SECRET[::-1], "HS256")
    assert _refusal(verifier, other_secret) == "The token's signature is wrong."


def test_changed_payload_is_refused(verifier: JwtVerifier) -> None:
    head, _, signature = _hs256().split(".")
    payload = base64.urlsafe_b64encode(json.dumps(_claims(tenant="other")).encode()).rstrip(b"=")
    assert "signature" in _refusal(verifier, f"{head}.{payload.decode()}.{signature}")


def test_alg_none_is_refused(verifier: JwtVerifier) -> None:
    token = jwt.encode(_claims(), "", "none")
    assert _refusal(verifier, token).startswith('The token\'s algorithm "none" is not accepted.')


@all_cases("algorithm", ["HS512", "RS512"])
def test_forbidden_algorithm_is_refused(verifier: JwtVerifier, algorithm: str) -> None:
    key: Any = SECRET * 2 if algorithm == "HS512" else RSA_KEY
    token = jwt.encode(_claims(), key, algorithm, headers={"kid": "rsa"})
    assert f'"{algorithm}" is not accepted. Accepted: ES256, EdDSA, HS256, RS256.' in _refusal(
        verifier, token
    )


def test_algorithm_that_is_not_pinned_is_refused(verifier: JwtVerifier) -> None:
    only_rsa = _changed(verifier, jwt_algorithms=frozenset({JwtAlgorithm.RS256}))
    assert '"HS256" is not accepted. Accepted: RS256.' in _refusal(only_rsa, _hs256())


@all_cases("form", [Encoding.PEM, Encoding.DER])
def test_public_key_does_not_serve_as_hmac_secret(verifier: JwtVerifier, form: Encoding) -> None:
    """Algorithm confusion: HS256 signed with the public RSA key."""
    published = RSA_KEY.public_key().public_bytes(form, PublicFormat.SubjectPublicKeyInfo)
    parts = [{"alg": "HS256", "kid": "rsa"}, _claims()]
    body = b".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts
    )
    mac = base64.urlsafe_b64encode(hmac.digest(published, body, hashlib.sha256)).rstrip(b"=")
    token = f"{body.decode()}.{mac.decode()}"
    assert _refusal(verifier, token) == "The token's signature is wrong."
    only = frozenset({JwtAlgorithm.RS256})
    no_secret = _changed(verifier, jwt_algorithms=only, jwt_secret=None)
    assert "not accepted" in _refusal(no_secret, token)


@all_cases(
    ("algorithm", "key", "kid", "message"),
    [
        ("RS256", RSA_KEY, "ec", "is of type EC, which does not match the algorithm RS256"),
        ("ES256", EC_KEY, "rsa", "is of type RSA, which does not match the algorithm ES256"),
        ("EdDSA", ED_KEY, "ec", "is of type EC, which does not match the algorithm EdDSA"),
        ("RS256", WEAK_RSA_KEY, "weak", "too weak"),
        ("ES256", EC_KEY, "p384", "does not match the key"),
    ],
)
def test_key_must_match_the_algorithm(
    verifier: JwtVerifier, algorithm: str, key: Any, kid: str, message: str
) -> None:
    # jwt.encode warns of the weak key, which is the point here.
    signer = jwt.PyJWS()
    payload = json.dumps(_claims()).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_args, **_options: None)
        token = signer.encode(payload, key, algorithm, {"kid": kid, "typ": "JWT"})
    assert message in _refusal(verifier, token)


def test_key_is_chosen_by_kid(verifier: JwtVerifier) -> None:
    unknown = jwt.encode(_claims(), RSA_KEY, "RS256", headers={"kid": "gone"})
    assert _refusal(verifier, unknown) == 'The token\'s key "gone" is unknown.'
    missing = jwt.encode(_claims(), RSA_KEY, "RS256")
    assert "lacks 'kid'" in _refusal(verifier, missing)


@all_cases(
    ("changes", "message"),
    [
        ({"iss": "https://other.example"}, "issuer (claim 'iss')"),
        ({"aud": "other"}, "another audience (claim 'aud')"),
        ({"aud": ["x", "y"]}, "another audience (claim 'aud')"),
        ({"iss": None}, 'lacks the claim "iss"'),
        ({"aud": None}, 'lacks the claim "aud"'),
        ({"exp": None}, 'lacks the claim "exp"'),
        ({"exp": "soon"}, "not a valid JWT"),
        ({"nbf": time.time() + 3600}, "not valid yet"),
        ({"tenant": None}, 'lacks the claim "tenant"'),
        ({"tenant": 7}, 'claim "tenant" must be a string'),
        ({"sub": 7}, "not a valid JWT"),
        ({"scope": 7}, 'claim "scope" must be a string or a list of strings'),
        ({"scope": "usage", "scp": {"usage": True}}, 'claim "scp" must be a string or a list'),
        ({"scopes": ["usage", 7]}, 'claim "scopes" must be a string or a list of strings'),
        ({"permissions": [{"rsname": "usage"}]}, 'claim "permissions" must be a string or a list'),
        ({"models": "m1"}, 'claim "models" must be a list of strings'),
        ({"dialect": 7}, 'claim "dialect" must be a string'),
        ({"dialect": "klingon"}, 'claim "dialect" must be one of openai, '),
        ({"dialect": ""}, 'claim "dialect" must be one of'),
        ({"models": [1]}, 'claim "models" must be a list of strings'),
        ({"sub": "a\ud800"}, 'claim "sub" must not contain'),
        ({"sub": "a\0"}, 'claim "sub" must not contain'),
        ({"sub": "a" * 256}, 'claim "sub" must have at most 255 characters. Given: 256.'),
        ({"tenant": "a\0"}, 'claim "tenant" must not contain'),
        ({"tenant": "\ud800"}, 'claim "tenant" must not contain'),
        ({"project": "\0"}, 'claim "project" must not contain'),
        ({"dialect": "\ud800"}, 'claim "dialect" must not contain'),
        ({"scope": "completions \0"}, 'claim "scope" must not contain'),
        ({"scp": ["completions", "\0"]}, 'claim "scp" must not contain'),
        ({"models": ["m1", "\ud800"]}, 'claim "models" must not contain'),
    ],
)
def test_wrong_claims_are_refused(
    verifier: JwtVerifier, changes: dict[str, Any], message: str
) -> None:
    claims = _claims(**changes)
    # PyJWT refuses to write some of these; a forger does not.
    token = jwt.PyJWS().encode(json.dumps(claims).encode(), SECRET, "HS256", {"typ": "JWT"})
    assert message in _refusal(verifier, token)


def test_expiry_allows_for_the_leeway_and_no_more(verifier: JwtVerifier) -> None:
    assert verifier.verify(_hs256(exp=int(time.time()) - 20)).tenant_id == "acme"
    with pytest.raises(ExpiredCredentialError) as caught:
        verifier.verify(_hs256(exp=int(time.time()) - 31))
    assert caught.value.code == "expired_token"


@all_cases("token", ["..", "a.b.c", "e30.e30.", "ä.b.c", "ey..J", "null.null.null"])
async def test_other_text_with_two_dots_is_refused(
    authenticator: Authenticator, token: str
) -> None:
    with pytest.raises(AuthenticationError) as caught:
        await authenticator.authenticate(f"Bearer {token}")
    assert caught.value.status == 401


def test_models_are_read(verifier: JwtVerifier) -> None:
    claims = verifier.verify(_hs256(models=["m1", "m2"]))
    assert claims.allowed_models == frozenset({"m1", "m2"})
    assert not claims.names_scopes


@pytest.mark.parametrize("name", ["scope", "scp", "scopes", "permissions"])
def test_every_claim_of_rights_restricts_the_token(verifier: JwtVerifier, name: str) -> None:
    both = {Scope.USAGE, Scope.COMPLETIONS}
    for value, scopes in (
        ("openid usage completions", both),
        (["openid", "usage", "completions"], both),
        (["usage completions"], both),
        (["usage"], {Scope.USAGE}),
        ("openid profile", set()),
        ("", set()),
        ([], set()),
    ):
        with case(value):
            claims = verifier.verify(_hs256(**{name: value}))
            assert claims.scopes == scopes
            assert claims.names_scopes
            # The other claims can only remove rights.
            other = "scope" if name != "scope" else "scp"
            fewer = verifier.verify(_hs256(**{name: value, other: ["usage"]}))
            assert fewer.scopes == scopes & {Scope.USAGE}
    # Without a value, nobody knows what the issuer means.
    token = jwt.encode(_claims() | {name: None}, SECRET, "HS256")
    assert f'claim "{name}" must be' in _refusal(verifier, token)


def test_operators_are_made_by_the_mapped_claim_alone(verifier: JwtVerifier) -> None:
    mapped = _changed(
        verifier,
        jwt_operator_claim="groups",
        jwt_operator_value="sluice-operators",
        jwt_operator_reader_value="sluice-auditors",
    )
    everything = " ".join(Scope)
    for claims, of_tenant, of_operator in (
        ({"scope": everything}, TENANT_SCOPES, set()),
        ({"scope": "admin", "groups": []}, set(), set()),
        ({"groups": "sluice-operators"}, DEFAULT_SCOPES, {Scope.ADMIN}),
        ({"groups": ["staff", "sluice-auditors"]}, DEFAULT_SCOPES, {Scope.ADMIN_READ}),
        (
            {"groups": ["sluice-operators", "sluice-auditors"], "scope": ""},
            set(),
            {Scope.ADMIN, Scope.ADMIN_READ},
        ),
        ({"groups": "sluice-operators staff"}, DEFAULT_SCOPES, set()),
        ({"groups": {"sluice-operators": True}}, DEFAULT_SCOPES, set()),
        ({"groups": [["sluice-operators"], None, 1]}, DEFAULT_SCOPES, set()),
        ({"groups": True}, DEFAULT_SCOPES, set()),
    ):
        token = _hs256(**claims)
        with case(claims):
            read = mapped.verify(token)
            assert read.scopes == of_tenant
            assert read.operator_scopes == of_operator
            unmapped = verifier.verify(token)
            assert unmapped.scopes == of_tenant
            assert not unmapped.operator_scopes


async def test_dialect_of_the_token_precedes_the_tenants(
    authenticator: Authenticator, tenants: TenantService
) -> None:
    await tenants.update("acme", dialect=Dialect.OMLX, strict_parameters=True, default_model="m1")
    own = await authenticator.authenticate(f"Bearer {_hs256(dialect='fireworks-2026')}")
    assert (own.dialect, own.is_strict) == (Dialect.FIREWORKS_2026, True)
    tenants_own = await authenticator.authenticate(f"Bearer {_hs256()}")
    assert (tenants_own.dialect, tenants_own.default_model) == (Dialect.OMLX, "m1")


def test_tenant_claim_may_have_another_name(verifier: JwtVerifier) -> None:
    renamed = _changed(verifier, jwt_tenant_claim="https://sluice/tenant")
    token = _hs256(**{"https://sluice/tenant": "other"})
    assert renamed.verify(token).tenant_id == "other"


async def test_tenant_must_exist_and_be_active(
    authenticator: Authenticator, tenants: TenantService
) -> None:
    with pytest.raises(AuthenticationError, match="tenant does not exist"):
        await authenticator.authenticate(f"Bearer {_hs256(tenant='nobody')}")
    header = f"Bearer {_hs256()}"
    assert (await authenticator.authenticate(header)).tenant_id == "acme"
    await tenants.suspend("acme")
    assert (await authenticator.authenticate(header)).tenant_id == "acme", "still cached"
    authenticator.drop_tenant("acme")
    with pytest.raises(AccountSuspendedError):
        await authenticator.authenticate(header)


class TurnedClock:
    """A monotonic clock that the test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _touch(path: Path, seconds: int) -> None:
    os.utime(path, ns=(seconds * 10**9, seconds * 10**9))


def test_jwks_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / "jwks.json", TurnedClock()
    _write_jwks(path, "rsa")
    _touch(path, 1)
    jwks = JwksFile(path, monotonic=clock)
    assert (jwks.get("rsa") is None, jwks.get("ec") is None) == (False, True)
    _write_jwks(path, "ec")
    _touch(path, 2)
    clock.seconds += CHECK_SECONDS / 2
    assert jwks.get("ec") is None, "looked at again at most once a second"
    clock.seconds += CHECK_SECONDS / 2
    assert (jwks.get("rsa") is None, jwks.get("ec") is None) == (True, False)


@pytest.mark.parametrize(
    "breakage",
    [lambda path: path.write_text("{"), lambda path: path.unlink(), _write_jwks],
    ids=["not JSON", "missing", "empty"],
)
def test_broken_jwks_file_leaves_the_earlier_keys_in_use(
    tmp_path: Path, breakage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "jwks.json", TurnedClock()
    _write_jwks(path, "rsa")
    jwks = JwksFile(path, monotonic=clock)
    breakage(path)
    clock.seconds += CHECK_SECONDS
    assert jwks.get("rsa") is not None
    assert "previous keys remain in use" in caplog.text


async def test_keys_of_a_url_follow_a_rotation_with_few_requests(
    database: Database, tenants: TenantService
) -> None:
    clock, published, statuses = TurnedClock(), ["rsa"], list[int]()

    async def issuer(scope: Any, receive: Any, send: Any) -> None:
        statuses.append(200 if published else 503)
        keys = [{**PUBLIC[kid], "kid": kid} for kid in published]
        await JSONResponse({"keys": keys}, statuses[-1])(scope, receive, send)

    async with serving(issuer, most_connections=9) as url:
        settings = Settings(
            jwt_algorithms=frozenset({JwtAlgorithm.RS256, JwtAlgorithm.ES256}),
            jwt_jwks_url=url,
            jwt_issuer=ISSUER,
            jwt_audience=AUDIENCE,
        )
        verifier = JwtVerifier(settings)
        verifier._jwks = verifier._published = JwksUrl(url, monotonic=clock)
        authenticator = Authenticator(database, verifier=verifier, ttl_seconds=60, max_entries=9)

        def tried(key: Any, algorithm: str, kid: str) -> asyncio.Task[Any]:
            token = jwt.encode(_claims(), key, algorithm, headers={"kid": kid})
            return asyncio.create_task(authenticator.authenticate(f"Bearer {token}"))

        left = tried(RSA_KEY, "RS256", "rsa")
        await asyncio.sleep(0)
        left.cancel()  # Its client disconnects; the keys arrive for others.
        assert (await tried(RSA_KEY, "RS256", "rsa")).tenant_id == "acme"
        published[:] = ["ec"]
        flood = await asyncio.gather(
            *(tried(EC_KEY, "ES256", f"none-{i}") for i in range(50)), return_exceptions=True
        )
        assert {type(each) for each in flood} == {AuthenticationError}
        assert statuses == [200]
        clock.seconds += AGAIN_SECONDS
        rotated = await asyncio.gather(*(tried(EC_KEY, "ES256", "ec") for _ in range(9)))
        assert rotated[0].tenant_id == "acme"
        with pytest.raises(AuthenticationError, match="unknown"):
            await tried(RSA_KEY, "RS256", "rsa")
        assert statuses == [200, 200]
        published.clear()
        clock.seconds += FRESH_SECONDS
        assert (await tried(EC_KEY, "ES256", "ec")).tenant_id == "acme", "the former keys remain"
        assert statuses == [200, 200, 503]
        # The issuer may have published this one meanwhile.
        with pytest.raises(ServiceUnavailableError) as unread_key:
            await tried(RSA_KEY, "RS256", "rsa")
        assert unread_key.value.retry_after_seconds == AGAIN_SECONDS
        unread = JwksUrl(url, monotonic=clock)
        with pytest.raises(ServiceUnavailableError):
            await unread.refresh("ec")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("[]", "not a JSON Web Key Set"),
        ('{"keys": []}', "no signature key"),
        ('{"keys": [{"kty": "RSA", "kid": "x"}]}', "no signature key"),
        ('{"keys": [{"kty": "RSA", "kid": "x", "use": "enc"}]}', "no signature key"),
    ],
)
def test_unusable_jwks_file_stops_the_start(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "jwks.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(JwksError, match=message):
        JwksFile(path)


def test_settings_without_algorithms_refuse_every_token() -> None:
    assert JwtVerifier.from_settings(Settings()) is None


def test_settings_configure_the_verifier(jwks_file: Path) -> None:
    settings = Settings(
        jwt_algorithms=frozenset({JwtAlgorithm.RS256}),
        jwt_jwks_file=jwks_file,
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        jwt_operator_claim="groups",
        jwt_operator_value="ops",
        jwt_operator_reader_value="auditors",
    )
    verifier = JwtVerifier.from_settings(settings)
    assert verifier is not None
    for group, scopes in (("ops", {Scope.ADMIN}), ("auditors", {Scope.ADMIN_READ})):
        token = jwt.encode(_claims(groups=[group]), RSA_KEY, "RS256", headers={"kid": "rsa"})
        claims = verifier.verify(token)
        assert claims.subject == "robot"
        assert claims.operator_scopes == scopes


@all_cases(
    ("settings", "message"),
    [
        ({"jwt_operator_claim": "groups"}, "needs one of them"),
        ({"jwt_operator_value": "ops"}, "is required with SLUICE_JWT_OPERATOR_VALUE"),
        ({"jwt_operator_reader_value": "ops"}, "SLUICE_JWT_OPERATOR_CLAIM is required"),
        ({"jwt_role_claim": "groups"}, "either of them requires SLUICE_OIDC_ROLES"),
        ({"oidc_roles": {"a": {"b": "admin"}}}, "requires SLUICE_OIDC_ROLE_CLAIM or SLUICE_JWT"),
        *(
            (
                {"jwt_operator_claim": claim, "jwt_operator_value": "admin"},
                "must not be a claim about a tenant",
            )
            for claim in ("scope", "scp", "scopes", "sub", "project", "models", "dialect", "tenant")
        ),
    ],
)
def test_claim_without_values_or_that_a_tenant_writes_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings(**settings)


def test_short_secret_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ALGORITHMS": "HS256",
        "SECRET": "hunter2",
        "ISSUER": ISSUER,
        "AUDIENCE": AUDIENCE,
    }.items():
        monkeypatch.setenv(f"SLUICE_JWT_{name}", value)
    with pytest.raises(ValidationError, match="at least 32 bytes") as caught:
        Settings()
    assert "hunter2" not in str(caught.value)
