"""Are the version ceilings in pyproject.toml honest? What a library calls private may change with any minor release."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Private names that shardtune/ uses, by the library they belong to. A new one is added here, and its library pinned.
PRIVATE = {
    "torch": {
        "_C", "_all_gather_result", "_aot_autograd", "_apply", "_base", "_buffers", "_current_graph_task_id",
        "_distributed_c10d", "_dynamo", "_execution_engine", "_foreach_mul_", "_foreach_norm", "_fsdp_param_group",
        "_functorch", "_get_default_store", "_get_fsdp_state", "_inductor", "_local_tensor", "_module_info",
        "_non_persistent_buffers_set", "_ops", "_parameters", "_python_dispatch", "_pytree", "_scaled_grouped_mm",
        "_scaled_mm", "_sharded_param_data", "_spec", "_unsharded_param", "_utils",
    },
    "transformers": {
        "_attn_implementation", "_can_record_outputs", "_from_config", "_get_dtype_plan", "_init_weights",
        "_is_distributed_loading_by_transformers", "_is_hf_initialized", "_keys_to_ignore_on_load_unexpected",
        "_model_mapping", "_no_split_modules",
    },
    "peft": {
        "_active_adapter", "_check_forward_args", "_did_swap_in_out_features", "_disable_adapters", "_get_embed_scale",
        "_param_ndim",
    },
    "datasets": {"_fingerprint"},
}  # fmt: skip
STANDARD_LIBRARY = {"_current_frames", "_exit", "_run_exitfuncs"}
# Modules whose distribution has another name, or that come with a dependency.
DISTRIBUTIONS = {
    "lm_eval": "lm-eval",
    "websocket": "websocket-client",
    "yaml": "PyYAML",
    "jinja2": "Jinja2",
    "pynvml": "nvidia-ml-py",
}
BROUGHT = {
    "annotated_types": "pydantic", "fsspec": "datasets", "huggingface_hub": "transformers", "packaging": "transformers",
    "pyarrow": "datasets", "pydantic_core": "pydantic", "tokenizers": "transformers", "triton": "torch",
    "jsonschema": "kubernetes-validate", "referencing": "kubernetes-validate",
}  # fmt: skip


def test_whatever_is_imported_is_a_dependency() -> None:
    imported = {name for tree in _trees().values() for node in ast.walk(tree) for name in _names_imported(node)}
    foreign = imported - set(sys.stdlib_module_names) - {"shardtune"}
    extras = _extra("cluster") + _extra("eval") + _extra("gguf")
    wanted = {re.split(r"[<>=]", one)[0] for one in _dependencies() + extras}
    assert {name for name in foreign if _distribution(name) not in wanted} == set()


def test_what_belongs_to_an_extra_is_imported_only_where_it_is_used() -> None:
    extra = {re.split(r"[<>=]", one)[0] for one in _extra("cluster")}
    trees = _trees()
    at_the_top = {
        f"{name} in {path.relative_to(ROOT)}"
        for path, tree in trees.items()
        for node in tree.body
        for name in _names_imported(node)
        if _distribution(name) in extra
    }
    assert at_the_top == set()


def test_every_private_name_of_a_library_is_known() -> None:
    trees = _trees()
    own = {name for tree in trees.values() for name in _attributes_defined(tree)}
    known = own.union(STANDARD_LIBRARY, *PRIVATE.values())
    unknown = {
        f"{name} in {path.relative_to(ROOT)}"
        for path, tree in trees.items()
        for name in _private_names_used(tree)
        if name not in known
    }
    assert not unknown, "add them to PRIVATE, and pin their library to the tested minor"


@pytest.mark.parametrize("library", PRIVATE)
def test_a_library_whose_private_names_are_used_is_pinned_to_the_tested_minor(library: str) -> None:
    tested = re.search(rf"^{library}==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert tested is not None
    ceiling = f"<{tested[1]}.{int(tested[2]) + 1}"
    (requirement,) = [one for one in _dependencies() if re.match(rf"{library}\b", one)]
    assert requirement.endswith(ceiling)


def _dependencies() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])


def _extra(name: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"][name])


def _distribution(module: str) -> str:
    return BROUGHT.get(module, DISTRIBUTIONS.get(module, module))


@cache
def _trees() -> dict[Path, ast.Module]:
    """Every file of the package, parsed once."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "shardtune").rglob("*.py")}


def _names_imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").split(".")[0]


def _attributes_defined(tree: ast.Module) -> Iterator[str]:
    """Methods and class attributes, and what is assigned to `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield from (name.id for name in ast.walk(inner) if isinstance(name, ast.Name) and _is_stored(name))
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield inner.name
        elif isinstance(node, ast.Attribute) and _is_stored(node) and ast.unparse(node.value) == "self":
            yield node.attr


def _private_names_used(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("shardtune"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        yield from (name for name in names if re.match(r"_[^_]", name))


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)
