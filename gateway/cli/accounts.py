"""`sluice tenants`, `projects`, `members` and `keys`: who uses a deployment."""

from typing import Any, Final

import click

from contract.tier import REQUEST_TIERS
from gateway.accounts.keys.rules import MadeKeys
from gateway.auth.api_key import public_name
from gateway.cli.calls import PAGE, Calls, secret_of
from gateway.cli.client import AdminClient
from gateway.cli.terminal import (
    LIMITS_HELP,
    NONE,
    Duration,
    argument,
    choice,
    columns,
    dialect_option,
    from_now,
    limit_option,
    option,
    or_none,
    print_fields,
    seconds,
)
from gateway.records.records import Billing
from gateway.records.scopes import Role, Scope

# These are tables: a row is a command or an option.
# fmt: off
tenants = Calls(
    "tenants", "gateway.accounts.tenants.routes",
    "Create, change, list, show, suspend and activate tenants.",
    f"""\
  sluice tenants create "Acme" --id acme --weight 2 --plan starter
  sluice tenants set acme --dialect llamacpp --strict --default-model llama-8b
  sluice tenants set acme --limit requests_per_minute=600 --limit budget=500
  sluice tenants set acme --billing prepaid --service-tier priority --show-cost
  sluice tenants set acme --cors-origin https://app.example.com
  sluice tenants set acme --stripe-customer cus_NciAYcXfLnqBoz
  sluice tenants list
  sluice tenants show acme
  sluice tenants suspend acme

{LIMITS_HELP}""")
_TENANT: Final = columns(
    "ID=id NAME=name WEIGHT=weight STATUS=status DIALECT=dialect STRICT=strict_parameters "
    "DEFAULT_MODEL=default_model PLAN=plan_id BILLING=billing TIER=service_tier CREATED=created_at")
_OF_TENANT: Final = (
    option("--weight", "Share of the workers relative to other tenants with waiting jobs; "
           "initially 1.", type=float),
    option("--strict/--no-strict strict_parameters", "Reject parameters without effect, or list "
           "them in a header.", default=None),
    option("--default-model", "Model of requests that specify none; none removes it.",
           callback=or_none),
    option("--plan plan_id", "Plan whose limits apply where no own limit is set; none removes it.",
           callback=or_none),
    limit_option(),
    choice("--billing", Billing, "How the tenant pays."),
    choice("--service-tier", REQUEST_TIERS, "Service tier of requests that specify none."),
    option("--show-cost/--no-show-cost shows_cost", "Whether responses include their cost.",
           default=None),
    option("--cors-origin cors_origins ORIGIN", "Origin of web pages that may use the tenant's "
           "keys, repeatable; *: any; none: none.", multiple=True,
           callback=lambda _context, _param, given: [] if given == (NONE,) else given),
    option("--stripe-customer stripe_customer_id ID", "Customer in Stripe to whom the usage is "
           "exported; none removes it.", callback=or_none),
)
tenants.add(
    "create NAME", "POST /admin/tenants", _TENANT, "Create a tenant called NAME.",
    option("--id", "1 to 63 characters from a-z, 0-9 and '-'.  [default: random]"),
    dialect_option(is_new=True), *_OF_TENANT)
tenants.add(
    "set TENANT", "PATCH /admin/tenants/{tenant}", _TENANT,
    "Change the given settings of TENANT (its id) on every gateway within a second.",
    option("--name", "Display name."), dialect_option(is_new=False), *_OF_TENANT)
tenants.add("list", "GET /admin/tenants", _TENANT, "List all tenants.", pages=PAGE)
tenants.add("show TENANT", "GET /admin/tenants/{tenant}", print_fields,
            "Show all settings of TENANT (its id).")
tenants.add("suspend TENANT", "POST /admin/tenants/{tenant}:suspend", _TENANT,
            "Suspend TENANT (its id): reject all its requests from now on.")
tenants.add("activate TENANT", "POST /admin/tenants/{tenant}:activate", _TENANT,
            "Activate TENANT (its id): serve its requests again.")

projects = Calls(
    "projects", "gateway.accounts.projects.routes",
    "Create, change, list, archive and activate projects.",
    f"""\
  sluice projects create --tenant acme "web shop" --limit tokens_per_day=1000000
  sluice projects set --tenant acme prj_0123456789abcdef --limit tokens_per_day=plan
  sluice projects list --tenant acme
  sluice projects archive --tenant acme prj_0123456789abcdef

{LIMITS_HELP}""")
_PROJECT: Final = columns("ID=id NAME=name STATUS=status LIMITS=limits CREATED=created_at")
_PROJECTS: Final = "/admin/tenants/{tenant}/projects"
projects.add("create --tenant NAME", f"POST {_PROJECTS}", _PROJECT,
             "Create a project called NAME for a tenant.", limit_option())
projects.add("set --tenant PROJECT", f"PATCH {_PROJECTS}/{{project}}", _PROJECT,
             "Change the given settings of PROJECT (its id) on every gateway within a second.",
             option("--name", "Display name."), limit_option())
projects.add("list --tenant", f"GET {_PROJECTS}", _PROJECT,
             "List the projects of a tenant, including archived ones.", pages=PAGE)
projects.add("archive --tenant PROJECT", f"POST {_PROJECTS}/{{project}}:archive", _PROJECT,
             "Archive PROJECT (its id): reject requests with its keys from now on.")
projects.add("activate --tenant PROJECT", f"POST {_PROJECTS}/{{project}}:activate", _PROJECT,
             "Activate the archived PROJECT (its id): its keys work again.")

members = Calls(
    "members", "gateway.accounts.members",
    "Add, change, list and remove the members of a tenant.",
    """\
  sluice members add --tenant acme --email ada@acme.example --role owner
  sluice members add --tenant acme "auth0|0123" --role owner --name "Ada Lovelace"
  sluice members set --tenant acme "auth0|0123" --role developer
  sluice members list --tenant acme
  sluice members remove --tenant acme "auth0|0123"
""")
_MEMBER: Final = columns("ID=id SUBJECT=person NAME=name ROLE=role ADDED=created_at",
                         person=lambda member: member["subject"] or member["email"])
_MEMBERS: Final = "/admin/tenants/{tenant}/members"
_ROLE: Final = choice("--role", Role, "Role of the member.", required=True)
members.add(
    "add --tenant [SUBJECT]", f"POST {_MEMBERS}", _MEMBER,
    """Add the person whose tokens have SUBJECT as their `sub` claim as a member.

    With --email, the member is the person who first logs in to the console with this address,
    verified by the identity provider.
    """,
    option("--email", "E-mail of the person, instead of SUBJECT."), _ROLE,
    option("--name", "Display name.  [default: the subject or e-mail]"))
members.add("set --tenant MEMBER", f"PATCH {_MEMBERS}/{{member}}", _MEMBER,
            "Change the role of MEMBER (id, subject or e-mail); the last owner keeps its role.",
            _ROLE)
members.add("list --tenant", f"GET {_MEMBERS}", _MEMBER, "List the members of a tenant.",
            pages=PAGE)


async def _remove_member(client: AdminClient, **given: Any) -> dict[str, str]:
    found = await client.send(f"GET {_MEMBERS}/{{member}}", given)
    await client.send(f"DELETE {_MEMBERS}/{{member}}", {**given, "member": found["id"]})
    return {"id": found["id"], "person": found["subject"] or found["email"]}


members.add_call("remove --tenant MEMBER", _remove_member, "Removed {id} ({person}).",
                 "Remove MEMBER (id, subject or e-mail) from the tenant; the last owner stays.")

keys = Calls(
    "keys", "gateway.accounts.keys.routes", "Create, change, list, rotate and revoke API keys.",
    f"""\
  sluice keys create --tenant acme --name "web site"
  sluice keys create --tenant acme --name trial --expires-in 30d --model llama-8b
  sluice keys create --tenant acme --name shop --project prj_0123456789abcdef \\
      --address 192.0.2.0/24 --limit requests_per_minute=60
  sluice keys set --tenant acme --dialect vllm key_0123456789abcdef
  sluice keys list --tenant acme
  sluice keys rotate --tenant acme --grace 12h key_0123456789abcdef
  sluice keys rotate --tenant acme --grace 0 --made-keys all key_0123456789abcdef
  sluice keys revoke --tenant acme key_0123456789abcdef

{LIMITS_HELP}""")
_KEY: Final = columns(
    "ID=id PREFIX=prefix NAME=name SCOPES=scopes MODELS=models DIALECT=dialect PROJECT=project_id "
    "EXPIRES=expires_at REVOKED=revoked_at:no",
    models=lambda key: "all" if key["allowed_models"] is None else key["allowed_models"])
_KEYS: Final = "/admin/tenants/{tenant}/keys"
_SECRET: Final = secret_of("key", "This is the key {id} of tenant {tenant_id}.")
# A whole key must not be part of a URL, which servers log.
_BY_NAME: Final = argument("key", callback=lambda _context, _param, key: public_name(key))
_MADE_KEYS: Final = choice(
    "--made-keys", MadeKeys, "Keys to revoke too: all that KEY made; those made with its former "
    "secret in a grace period; or none.", default=MadeKeys.IN_GRACE.value, show_default=True)


def _bounds(*, is_new: bool) -> tuple[click.Option, ...]:
    """Return the options of a key that narrow it."""
    every, any_ = ("  [default: all]", "  [default: any]") if is_new else ("; none: all.",
                                                                          "; none: any.")
    return (
        choice("--scope scopes", Scope, "Scope of the key; repeatable.", multiple=True,
               default=(Scope.COMPLETIONS.value,) if is_new else None, show_default=is_new),
        option("--model allowed_models", f"Model that the key may use; repeatable{every}",
               multiple=True, callback=or_none),
        option("--address allowed_addresses CIDR", "Address or network that may use the key; "
               f"repeatable{any_}", multiple=True, callback=or_none),
        option("--expires-in expires_at", "Lifetime of the key from now, such as 90m, 12h or 30d"
               f"{'.  [default: unlimited]' if is_new else '; none: unlimited.'}",
               type=Duration(also="" if is_new else NONE), callback=from_now),
        limit_option(),
        dialect_option(is_new=is_new),
    )


keys.add("create --tenant", f"POST {_KEYS}", _SECRET, "Create an API key. It is shown only once.",
         option("--name", "Name of the key.", required=True),
         option("--project project_id", "Id of the project of the key."), *_bounds(is_new=True))
keys.add("list --tenant", f"GET {_KEYS}", _KEY,
         "List the keys of a tenant, including revoked ones.", pages=PAGE)
keys.add("show --tenant", f"GET {_KEYS}/{{key}}", print_fields,
         "Show all settings of KEY (its id or public prefix).", _BY_NAME)
keys.add(
    "set --tenant", f"PATCH {_KEYS}/{{key}}", _KEY,
    "Change given settings of KEY (its id or public prefix) on every gateway within a second.",
    _BY_NAME, option("--name", "Name of the key."), *_bounds(is_new=False))
keys.add(
    "rotate --tenant", f"POST {_KEYS}/{{key}}:rotate", _SECRET,
    """Give KEY (its id or public prefix) a new secret, which is shown once.

    Id, limits and usage remain. Any secret older than the current one stops working at once.
    """,
    _BY_NAME,
    option("--grace grace_seconds", "How long the current secret remains valid, such as 90m or "
           "12h, at most 30d; 0: it ends at once.", type=Duration(also="0"), default="1d",
           show_default=True, callback=seconds),
    _MADE_KEYS)


async def _revoke(client: AdminClient, **given: Any) -> dict[str, str]:
    revoked = await client.send(f"DELETE {_KEYS}/{{key}}", given)
    made = (f"\nRevoked {each}, which it made." for each in revoked.get("made_keys", ()))
    return {"key": given["key"], "made": "".join(made)}


keys.add_call(
    "revoke --tenant", _revoke, "Revoked {key}.{made}",
    "Revoke KEY (its id or public prefix) on every gateway within a second.", _BY_NAME, _MADE_KEYS)
