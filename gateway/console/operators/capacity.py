"""What a load needs: the calculation of `sluice capacity` as a form."""

import shlex
from typing import Final

from fastapi import APIRouter, Response

from gateway.console.forms import Form, values_of
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.tables import Column, Field, Search
from gateway.records.capacity import MEASURED, Load, plan, rows_of
from gateway.records.errors import InvalidParameterError

FIELDS: Final = [
    Field(
        name,
        field.title or "",
        field.description or "",
        "number",
        is_required=field.is_required(),
        default="" if field.is_required() or field.default is None else f"{field.default:g}",
    )
    for name, field in Load.model_fields.items()
]
COLUMNS: Final = (
    Column("Figure", lambda row: row[0].replace("`", "")),
    Column("Value", lambda row: row[1], "num"),
)

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/capacity")
async def capacity(visitor: AnyVisitor) -> Response:
    """Show what the load of the query needs."""
    request, rows, text = visitor.request, list[tuple[str, str]](), ""
    form = Form.of({field.name: request.query_params.get(field.name, "") for field in FIELDS})
    if request.query_params:
        try:
            load = Load.read(values_of(FIELDS, form))
            rows = rows_of(load, plan(load, MEASURED))
        except InvalidParameterError as error:
            request.state.error = error
        options = [f"--{each.replace('_', '-')} {shlex.quote(form[each])}" for each in form]
        given = " ".join(each for each in options if not each.endswith(" ''"))
        text = f"sluice capacity {given} prints the same, and values for the chart."
    return visitor.list_page(
        "Capacity",
        COLUMNS,
        rows,
        "Enter the load of the busiest minute.",
        search=Search(FIELDS, form, "Compute"),
        text=text,
        is_log=True,
    )
