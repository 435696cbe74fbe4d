"""The parameter `service_tier`."""

import pytest

from contract.tier import ServiceTier
from gateway.dialects.profile import Profile
from tests.gateway.dialects.reading import EVERY_PROFILE, read, refusal


@pytest.mark.parametrize(
    ("given", "tier"),
    [
        (None, None),
        ("auto", None),
        ("flex", ServiceTier.FLEX),
        ("default", ServiceTier.DEFAULT),
        ("priority", ServiceTier.PRIORITY),
    ],
)
@pytest.mark.parametrize("profile", EVERY_PROFILE)
def test_tier_is_read(profile: Profile, given: str | None, tier: ServiceTier | None) -> None:
    request = read(profile, service_tier=given)
    assert request.service_tier is tier
    assert request.ignored_parameters == ()


@pytest.mark.parametrize("given", ["scale", "Priority", "", " flex"])
@pytest.mark.parametrize("profile", EVERY_PROFILE)
def test_other_tiers_are_refused_by_name(profile: Profile, given: str) -> None:
    error = refusal(profile, service_tier=given)
    assert error.param == "service_tier"
    assert error.code == "invalid_value"
    assert "auto, flex, default, priority" in error.message
