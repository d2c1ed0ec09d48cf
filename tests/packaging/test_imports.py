"""Who imports whom: the drawing in docs/architecture.md stays true because this reads the imports."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cache_server", "connector", "protos")

# A module may be imported, anywhere in a file, only by these files.
ONLY_IN = {
    "vllm": {"connector/plugin.py", "connector/metrics.py"},
    "torch": {"connector/kv_layout.py", "connector/transfer.py"},
    "redis": {"cache_server/redis_line.py"},
    "aiohttp": {"cache_server/status_http.py", "cache_server/commands/warm.py"},
    "prometheus_client": {"cache_server/exposition.py"},
    "grpc": {
        "cache_server/admission.py",
        "cache_server/commands/ask.py",
        "cache_server/server.py",
        "cache_server/service.py",
        "cache_server/transport.py",
        "connector/client.py",
        "protos/channel.py",
        "protos/kv_cache_pb2_grpc.py",
    },
}


def imports_of(source: str, package: tuple[str, ...]) -> set[str]:
    """The top-level names that a module of `package` imports at run time, those inside functions included."""
    found = set()
    for node in ast.walk(_without_type_checking(ast.parse(source))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            found.add(package[0] if node.level else (node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1]
            found.add(anchor[0] if anchor else (node.module or "").split(".")[0])
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value).split(".")[0])
    return found


class _Pruned(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name | ast.Attribute) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return node.orelse
        return self.generic_visit(node)


def _without_type_checking(tree: ast.Module) -> ast.Module:
    return _Pruned().visit(tree)


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports_by_file() -> dict[str, set[str]]:
    return {
        path.relative_to(ROOT).as_posix(): imports_of(path.read_text(), path.relative_to(ROOT).parent.parts)
        for path in sources()
    }


@pytest.mark.parametrize(("package", "other"), [("connector", "cache_server"), ("cache_server", "connector")])
def test_connector_and_cache_server_never_import_each_other(package: str, other: str) -> None:
    offenders = {file for file, names in imports_by_file().items() if file.startswith(f"{package}/") and other in names}

    assert offenders == set()


def test_protos_import_neither() -> None:
    offenders = {
        file
        for file, names in imports_by_file().items()
        if file.startswith("protos/") and names & {"connector", "cache_server"}
    }

    assert offenders == set()


@pytest.mark.parametrize("module", sorted(ONLY_IN))
def test_a_heavy_module_is_imported_only_where_it_belongs(module: str) -> None:
    offenders = {file for file, names in imports_by_file().items() if module in names} - ONLY_IN[module]

    assert offenders == set()


def test_the_packages_import_nothing_of_tests_benchmarks_or_scripts() -> None:
    offenders = {file for file, names in imports_by_file().items() if names & {"tests", "benchmarks", "scripts"}}

    assert offenders == set()


def test_the_reader_of_imports_sees_every_form() -> None:
    """Positive control: each way of importing is found, what only type checkers read is not."""
    source = """
from typing import TYPE_CHECKING
import torch.nn as nn
from . import sibling
from ..other import thing
def late():
    from vllm.config import VllmConfig
    importlib.import_module("redis.asyncio")
if TYPE_CHECKING:
    import grpc
else:
    import xxhash
"""

    assert imports_of(source, ("connector",)) == {"typing", "torch", "connector", "other", "vllm", "redis", "xxhash"}
    assert "grpc" in imports_of("import grpc.aio", ("connector",))
