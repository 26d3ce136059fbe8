from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent


def test_what_journeys_are_checked_by_imports_nothing_of_ours() -> None:
    for path in HERE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "shardtune"], f"{path.name}:{node.lineno}"
