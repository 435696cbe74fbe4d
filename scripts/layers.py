"""A contract for import-linter: layers, in which a module that starts a program imports it.

`python -m NAME` needs the module's name as text, so a string that is the name of a module counts
as an import of it.
"""

import ast
from pathlib import Path

from grimp import ImportGraph
from importlinter.contracts.layers import LayersContract
from importlinter.domain.contract import ContractCheck
from typing_extensions import override


class LayersOfProcesses(LayersContract):
    """Layers of modules that import each other or start each other as programs."""

    @override
    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        for importer in list(graph.modules):
            for name, line in _named_modules(importer, graph):
                graph.add_import(
                    importer=importer, imported=name, line_number=line, line_contents=f'"{name}"'
                )
        return super().check(graph, verbose)


def _named_modules(importer: str, graph: ImportGraph) -> list[tuple[str, int]]:
    path = Path(*importer.split(".")).with_suffix(".py")
    if not path.is_file():
        return []
    return [
        (node.value, node.lineno)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "." in node.value
        and node.value in graph.modules
        and node.value != importer
    ]
