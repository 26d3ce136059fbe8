"""CONTRIBUTING's table of packages is true: nobody imports what its row does not allow, and no two rows form a cycle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from running import REPOSITORY

SOURCE = REPOSITORY / "shardtune"
ENTRY = "__main__.py"  # starts the command line, so it counts as part of cli/


def allowed() -> dict[str, tuple[set[str], set[str]]]:
    """By package: what its row allows to import, and (after "types of") what under TYPE_CHECKING alone."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:`(\w+)/`|\(top\)[^|]*) \|[^|]*\| ([^|]*) \|$", text, flags=re.MULTILINE)
    names = {package or "(top)": imports.partition("types of") for package, imports in rows}
    return {
        package: (set(re.findall(r"`([\w.]+)`", runtime)), set(re.findall(r"`([\w.]+)`", types)))
        for package, (runtime, _, types) in names.items()
    }


def package_of(file: Path) -> str:
    if file.name == ENTRY:
        return "cli"
    folder, *rest = file.relative_to(SOURCE).parts
    return folder if rest else "(top)"


def imports(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, module (without `shardtune.`) and whether it is for types alone, of every import of ours in `file`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    typing_only = {id(node) for guard in guards for child in guard.body for node in ast.walk(child)}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            if name.startswith("shardtune."):
                yield node.lineno, name.removeprefix("shardtune."), id(node) in typing_only


def test_every_package_imports_only_what_its_row_in_contributing_allows() -> None:
    table, violations = allowed(), []
    for file in sorted(SOURCE.rglob("*.py")):
        package = package_of(file)
        runtime, types = table[package]
        for line, module, is_typing_only in imports(file):
            target = module.partition(".")[0]
            if target == package or not (SOURCE / target).is_dir():  # its own, or a module at the top
                continue
            if not any(f"{module}.".startswith(f"{name}.") for name in runtime | (types if is_typing_only else set())):
                violations.append(f"{file.relative_to(REPOSITORY)}:{line}: {package} imports {module}")
    assert not violations, "\n".join(["not in the table of CONTRIBUTING.md:", *violations])


def test_the_table_has_every_package_and_no_cycle() -> None:
    table = allowed()
    assert set(table) == {"(top)", *(init.parent.name for init in SOURCE.glob("*/__init__.py"))}
    TopologicalSorter(
        {package: {name.partition(".")[0] for name in row[0]} for package, row in table.items()}
    ).prepare()
