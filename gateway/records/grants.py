"""Grants: the upper bound of the rights that a credential gives, changes and sees.

Every route of the management API compares rights here and nowhere else. A key field that narrows
the key is a row of the table `BOUNDS`. The principal must have the same field, and every route
compares it and passes it on.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import collapse_addresses
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gateway.records.errors import PermissionDeniedError, shown
from gateway.records.limits import LimitChanges, LimitName, Limits, LimitScope, LimitValues
from gateway.records.records import KeyRecord, Network, Plan, Project
from gateway.records.scopes import OPERATOR_SCOPES, ROLE_SCOPES, Role

Bounds = Mapping[str, Any]
"""Restrictions by their names in `BOUNDS`. Absent names do not apply: a project has no models."""


class Excess(NamedTuple):
    """A bound that is exceeded."""

    param: str
    held: str
    given: str


def _is_within(given: Network, held: Iterable[Network]) -> bool:
    same: list[Any] = [each for each in held if each.version == given.version]
    # Collapse adjacent networks first: together they cover what none of them covers alone.
    return any(given.subnet_of(each) for each in collapse_addresses(same))


def _limits_beyond(held: Limits, given: Limits) -> Iterator[Excess]:
    for name in LimitName:
        most, limit = held.get(name), given.get(name)
        if most is not None and _is_more(limit, most):
            yield Excess(f"limits.{name}", shown(most), shown(limit))


def _is_more(limit: int | None, most: int) -> bool:
    return limit is None or limit > most


def _listed(value: Any) -> str:
    is_list = isinstance(value, Collection) and not isinstance(value, str)
    return shown(sorted(map(str, value)) if is_list else value)


BOUNDS: Final[Mapping[str, Callable[[Any, Any], bool]]] = MappingProxyType(
    {
        "project_id": lambda held, given: given == held,
        "scopes": lambda held, given: given <= held,
        "allowed_models": lambda held, given: given is not None and given <= held,
        "allowed_addresses": lambda held, given: (
            given is not None and all(_is_within(each, held) for each in given)
        ),
        "expires_at": lambda held, given: given is not None and given <= held,
        "limits": lambda held, given: not any(_limits_beyond(held, given)),
    }
)
"""The fields that narrow a key, and whether a value is within the bound that is held.

In all fields but scopes, None means no bound. The same holds within limits, which are the effective
limits: the plan's limits apply where there are no own limits.
"""

_OF_TENANT: Final[Bounds] = MappingProxyType({"project_id": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The rights of a credential."""

    credential_id: str
    bounds: Bounds
    """All bounds of the credential."""
    is_operator: bool = False
    """Whether it manages every tenant. Its bounds then apply to the keys of operators only."""
    is_former_secret: bool = False
    """Whether it is the former secret of a rotated key."""

    @property
    def project_id(self) -> str | None:
        """The project outside of which nothing is visible; None: the whole tenant is visible."""
        project_id: str | None = self.bounds["project_id"]
        return project_id

    def sees(self, project_id: str | None) -> bool:
        """Whether the credential sees data of this project, or of no project."""
        return self.project_id in (None, project_id)

    def require(self, bounds: Bounds, *, of: str = "") -> None:
        """Raise PermissionDeniedError if something has more rights than the credential.

        Args:
            bounds: the bounds to compare.
            of: names a stored object, such as `the key "key_1"`; if empty, a request gives the
                bounds.
        """
        if self.is_operator and OPERATOR_SCOPES.isdisjoint(bounds.get("scopes", ())):
            return
        for name, given in bounds.items():
            held = self.bounds[name]
            if held is not None and not BOUNDS[name](held, given):
                excess = Excess(name, _listed(held), _listed(given))
                if name == "limits":
                    excess = next(_limits_beyond(held, given))
                raise _refusal(excess, of)

    def require_whole_tenant(self) -> None:
        """Raise PermissionDeniedError if the credential belongs to a project."""
        self.require(_OF_TENANT, of="data of the whole account")

    def require_another(self, key_id: str, changes: Iterable[str]) -> None:
        """Raise PermissionDeniedError if the change alters the bounds of the credential itself."""
        own = sorted(BOUNDS.keys() & changes)
        if key_id == self.credential_id and own:
            raise PermissionDeniedError(
                f"A key cannot change its own '{own[0]}': use another credential.", param=own[0]
            )

    def require_current_secret(self) -> None:
        """Raise PermissionDeniedError if a former secret asks for one that would outlive it."""
        if self.is_former_secret:
            raise PermissionDeniedError(
                "The key's former secret cannot rotate keys: use its current secret."
            )

    def inherit(self, options: Mapping[str, Any], defaults: LimitValues) -> dict[str, Any]:
        """Return the options of a new key, with the credential's bounds where none are given.

        Args:
            options: includes `scopes`, which are not inherited.
            defaults: the plan's limits of keys.
        """
        limits = options.get("limits", {})
        if self.is_operator and OPERATOR_SCOPES.isdisjoint(options["scopes"]):
            return {**options, "limits": limits}
        return {
            **{name: self.bounds[name] for name in BOUNDS.keys() - {"scopes", "limits"}},
            **options,
            "limits": self.inherit_limits(limits, defaults),
        }

    def inherit_limits(self, limits: LimitChanges, defaults: LimitValues) -> LimitChanges:
        """Return the limits of a new object, with the credential's limits where none are given.

        The plan's `defaults` stay in force where they are as narrow.
        """
        narrower = {
            name: held
            for name in LimitName
            if (held := self.bounds["limits"].get(name)) is not None
            and _is_more(defaults.get(name), held)
        }
        return {**narrower, **limits}


def defaults_of(plan: Plan | None, scope: LimitScope) -> LimitValues:
    """Return the limits of holders without their own limits."""
    return {} if plan is None else plan.limits[scope]


def bounds_of_key(key: KeyRecord, plan: Plan | None) -> Bounds:
    """Return the bounds of a key."""
    limits = Limits.from_values(key.limits, defaults_of(plan, LimitScope.KEY))
    return {**{name: getattr(key, name) for name in BOUNDS}, "limits": limits}


def bounds_of_project(project: Project, plan: Plan | None) -> Bounds:
    """Return the bounds of a project, which itself belongs to the whole tenant."""
    limits = Limits.from_values(project.limits, defaults_of(plan, LimitScope.PROJECT))
    return {**_OF_TENANT, "limits": limits}


def bounds_of_role(role: Role) -> Bounds:
    """Return the bounds of a role: only its scopes."""
    return {**dict.fromkeys(BOUNDS), "scopes": ROLE_SCOPES[role], "limits": Limits()}


def _refusal(excess: Excess, of: str) -> PermissionDeniedError:
    param, held, given = excess
    if of and param == "project_id":
        return PermissionDeniedError(
            f"This credential is limited to the project {held} and does not allow access to {of}."
        )
    if of:
        return PermissionDeniedError(
            f"This credential cannot manage {of}, which has more rights than the credential: "
            f"its '{param}' is {given}, that of the credential is {held}."
        )
    return PermissionDeniedError(
        f"'{param}' must not exceed that of this credential, {held}. Given: {given}.",
        param=param,
    )
