"""The parameter `service_tier`."""

from contract.tier import ServiceTier
from gateway.dialects.profile import PROFILES
from tests.gateway.dialects.reading import read, refusal
from tests.support.cases import all_cases


@all_cases(
    ("given", "tier"),
    [
        (None, None),
        ("auto", "auto"),
        ("flex", ServiceTier.FLEX),
        ("default", ServiceTier.DEFAULT),
        ("priority", ServiceTier.PRIORITY),
        ("scale", ServiceTier.DEFAULT),
        ("fast", ServiceTier.PRIORITY),
        ("ultrafast", ServiceTier.PRIORITY),
    ],
)
def test_tier_is_read(given: str | None, tier: str | None) -> None:
    for profile in PROFILES.values():
        request = read(profile, service_tier=given)
        assert request.service_tier == tier
        assert request.ignored_parameters == ()


@all_cases("given", ["batch", "standard", "Priority", "", " flex"])
def test_other_tiers_are_refused_by_name(given: str) -> None:
    for profile in PROFILES.values():
        error = refusal(profile, service_tier=given)
        assert error.param == "service_tier"
        assert error.code == "invalid_value"
        assert "auto, flex, default, priority" in error.message
