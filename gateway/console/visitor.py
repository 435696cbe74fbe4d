"""Who is logged in, and the pages that are tables of fields: lists, forms and confirmations."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from fastapi import Request, Response

from gateway.accounts.routes_common import Caller
from gateway.auth.sessions import Audience, PersonLogin, Session
from gateway.console.forms import Form
from gateway.console.lists import arranged, cursor_of
from gateway.console.rendering import page
from gateway.console.tables import Action, Adding, Column, Field, Group, Search, Step, Table
from gateway.http.services import services_of
from gateway.platform.database.paging import Page
from gateway.records.errors import ApiError
from gateway.records.principal import Principal
from gateway.records.records import Tenant
from gateway.records.scopes import Scope

TENANT_PAGES: Final = "/console/tenants/{tenant_id}"
FIND: Final = Field("find", "Contains", type="search")
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

T = TypeVar("T")


def tenant_path(tenant_id: str) -> str:
    """Return the path of the pages of a tenant for operators."""
    return TENANT_PAGES.format(tenant_id=quote(tenant_id, safe=""))


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who is logged in and requests a page, with the credential's rights at this moment."""

    principal: Principal
    session: Session
    request: Request
    tenant: Tenant | None = None
    """The tenant whose page an operator sees."""

    @property
    def tenant_id(self) -> str:
        """The tenant of the page; without one, that of the credential."""
        return self.principal.tenant_id if self.tenant is None else self.tenant.id

    @property
    def home(self) -> str:
        """The path of the tenant's pages."""
        return "/console" if self.tenant is None else tenant_path(self.tenant.id)

    @property
    def of_tenant(self) -> str:
        """The filter of the tenant in the query of a page of all tenants, with its separator."""
        return "" if self.tenant is None else f"{urlencode({'tenant': self.tenant.id})}&"

    @property
    def caller(self) -> Caller:
        """The rights with which the visitor manages the tenant."""
        return Caller(self.principal, self.tenant_id)

    @property
    def csrf(self) -> str:
        """The token for forms."""
        return self.session.csrf

    @property
    def name(self) -> str:
        """The person's e-mail or subject, or the id of the key."""
        login = self.session.login
        return login.name if isinstance(login, PersonLogin) else self.principal.credential_id

    @property
    def is_person(self) -> bool:
        """Whether this is a person, not a key."""
        return isinstance(self.session.login, PersonLogin)

    @property
    def is_operator(self) -> bool:
        """Whether this is the operators' console."""
        return self.session.audience is Audience.OPERATORS

    def has(self, *scopes: str) -> bool:
        """Whether the credential has one of these scopes."""
        return not self.principal.scopes.isdisjoint(scopes)

    @property
    def may_change(self) -> bool:
        """Whether the pages show forms: not to operators with only `admin:read`."""
        return not self.is_operator or self.has(Scope.ADMIN)

    def require_whole(self) -> None:
        """Raise PermissionDeniedError for a customer's credential of a project."""
        if not self.is_operator:
            self.principal.grant.require_whole_tenant()

    @property
    def form(self) -> Form:
        """The form that was sent; empty for GET."""
        return Form.of_request(self.request)

    def make(self, make: Callable[..., T]) -> T:
        """Return what `Services.make` returns."""
        return services_of(self.request).make(make)

    def page(self, template: str, /, **values: Any) -> Response:
        """Return a page; see `gateway.console.rendering.page`."""
        return page(self.request, template, **values)

    def list_page(
        self,
        title: str,
        columns: Iterable[Column],
        found: Page[Any] | Sequence[Any],
        empty: str,
        *,
        label: str = "",
        text: str = "",
        action: Action | None = None,
        search: Search | None = None,
        adding: Adding | None = None,
        missing: tuple[str, Sequence[Step]] = ("", ()),
        after: object = None,
        is_log: bool = False,
        notices: Mapping[str, str] = NOTHING,
    ) -> Response:
        """Return a page with a table, by default labelled with the title; `empty` has no rows.

        Rows are sorted by a column and searched, unless they are those of a log. The link to the
        next page has the filters of the `search`. It starts after the cursor `after`, by default
        after the last entry of a page that has more. The page above the table may have steps with
        a title: what is `missing`.
        """
        columns, is_part = [*columns], False
        if isinstance(found, Page):
            after, is_part, found = cursor_of(found), found.has_more, found.entries
        rows: Sequence[Any] = found
        form = {} if search is None else search.form
        following, table = (
            self.following(after, **form),
            Table(label or title, columns, rows, empty),
        )
        if not is_log:
            shown = arranged(self.request, columns, rows)
            table = table._replace(rows=shown.rows, sorts=shown.sorts if len(rows) > 1 else {})
            if shown.is_arranged:
                following = shown.following
                if is_part:
                    text = f"Only the newest {len(rows):,} are sorted and searched. {text}"
            if (is_part or shown.find) and "search" not in form:
                fields, button = ([*search.fields], search.button) if search else ([], "Search")
                search = Search([*fields, FIND], {**form, "find": shown.find}, button)
        return self.page(
            "list.html",
            title=title,
            table=table,
            text=text,
            action=action,
            search=search,
            adding=adding,
            missing=missing,
            following=following,
            notices=notices,
        )

    def following(self, after: object, **filters: str) -> str | None:
        """Return the link to the next page of a list, which starts after a cursor, if any."""
        query = {name: text for name, text in filters.items() if text}
        return f"{self._path}?{urlencode(query | {'after': after})}" if after else None

    def form_page(
        self,
        title: str,
        fields: Sequence[Field],
        button: str,
        *,
        values: Mapping[str, str] = NOTHING,
        text: str = "",
        warning: str = "",
        facts: Mapping[str, str] = NOTHING,
        groups: Sequence[Group] = (),
        hidden: Mapping[str, str] = NOTHING,
        back: str = "",
        is_danger: bool = False,
        error: ApiError | None = None,
    ) -> Response:
        """Return a page with a form that POSTs to its own address.

        It has the values of the form that was sent, else these, and also sends the `hidden` ones.
        Visitors who do not send it return to `back`, by default the page above.
        """
        return self.page(
            "form.html",
            title=title,
            fields=fields,
            form=defaultdict(str, self.form or values),
            action=self._address,
            button=button,
            text=text,
            warning=warning,
            facts=facts,
            groups=groups,
            hidden=hidden,
            back=back or self._path.rpartition("/")[0],
            is_danger=is_danger,
            error=error,
        )

    def confirmation(
        self,
        button: str,
        *,
        of: str = "",
        title: str = "",
        text: str = "",
        warning: str = "",
        facts: Mapping[str, str] = NOTHING,
        fields: Mapping[str, str] = NOTHING,
        options: Mapping[str, str] = NOTHING,
        back: str = "",
    ) -> Response:
        """Return a page that asks before it sends a form to its own address.

        The title is what the button does, with the name `of` the object. The form has the fields
        of the one that was sent, which it confirms, and these. `options` are the labels of boxes
        that the visitor may tick, by the names of their fields. Raises the error of the form that
        was sent.
        """
        if (error := getattr(self.request.state, "error", None)) is not None:
            raise error
        return self.form_page(
            title or f"{button}{f' “{of}”' if of else ''}?",
            [Field(name, label, type="checkbox") for name, label in options.items()],
            button,
            text=text,
            warning=warning,
            facts=facts,
            hidden={**self.form.confirmed(), **fields},
            back=back,
            is_danger=True,
        )

    @property
    def _path(self) -> str:
        return quote(self.request.url.path)

    @property
    def _address(self) -> str:
        query = self.request.url.query
        return f"{self._path}?{query}" if query else self._path
