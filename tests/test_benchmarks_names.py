"""Benchmarks run rarely and import from each other inside functions, so a renamed function is noticed here and not weeks later."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEIGHBOURS = {path.stem: path for folder in ("benchmarks", "tests", "tools") for path in (ROOT / folder).glob("*.py")}


def defined_in(path: Path) -> set[str]:
    """The names that a file defines or imports at its top level, also under an `if` or `try`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_from_this_project_exists(path: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        wanted = {alias.name for alias in node.names}
        if node.module.split(".")[0] == "rlx":
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{name}" for name in wanted if not hasattr(module, name) and not _is_module(node.module, name)]
        elif node.module in NEIGHBOURS:
            missing += [f"{node.module}.{name}" for name in wanted - defined_in(NEIGHBOURS[node.module])]
    assert missing == []


def _is_module(package: str, name: str) -> bool:
    return (ROOT / package.replace(".", "/") / f"{name}.py").exists()
