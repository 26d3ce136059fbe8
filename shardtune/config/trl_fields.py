"""Which settings does the installed TRL know, and which of them may be passed on through `train.extra`?

TRL's dataclass is read as source text: importing it imports torch (seconds), and a config check must answer at once.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardtune.config.problems import shown
from shardtune.config.suggestions import FOREIGN_KEYS, nearest, section_fields

_SIMPLE: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict, "list": list}
_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "dict": "a mapping",
          "list": "a list", "None": "null"}  # fmt: skip

_PREPARES_DATA = "shardtune tokenises the data itself, so TRL would never read it"
_SHARDS = "shardtune shards the model itself, before TRL sees it"
_STORES = "shardtune writes and restores checkpoints itself"

# Settings of TRL that shardtune decides: passing them on would do nothing, or undo what makes a sharded run right.
OWNED: dict[str, str] = {
    # The model arrives loaded, adapted and sharded.
    "model_init_kwargs": "shardtune loads the model; use the section `model`",
    "fsdp": f"{_SHARDS}; use the section `parallel`",
    "fsdp_config": f"{_SHARDS}; use the section `parallel`, or `parallel.accelerate_config` for an accelerate file",
    "deepspeed": "shardtune shards with FSDP2 only; use the section `parallel`",
    "parallelism_config": f"{_SHARDS}; use the section `parallel`",
    "accelerator_config": "it can change how batches are dealt out to ranks, which shardtune decides",
    "torch_compile": "accelerate would compile the whole model after it was sharded",
    "torch_compile_backend": "accelerate would compile the whole model after it was sharded",
    "torch_compile_mode": "accelerate would compile the whole model after it was sharded",
    "activation_offloading": "it moves whatever any layer saves; use `train.offload_activations`",
    "gradient_checkpointing_kwargs": "only the non-reentrant form works with FSDP2; `train.gradient_checkpointing` "
    "says what is recomputed",
    # It halves the batch and wraps the model a second time, which a sharded model does not survive.
    "auto_find_batch_size": "a batch size tried after sharding would differ between ranks; set "
    "`train.per_device_train_batch_size`",
    # They cast the parameters in place, float32 master weights of the adapters included.
    "bf16_full_eval": "it would cast the adapters' float32 weights; `train.bf16` covers evaluation",
    "fp16_full_eval": "it would cast the adapters' float32 weights; `train.bf16` covers evaluation",
    "optim_target_modules": "only GaLore and its kin read it, and they do not handle sharded tensors",
    # Without it the loss depends on how rows fall on ranks: 1 and 2 processes would train differently.
    "average_tokens_across_devices": "always on here: it makes one and many processes compute the same loss",
    # The rows arrive tokenised, cut and masked.
    "chat_template_path": _PREPARES_DATA,
    "dataset_text_field": f"{_PREPARES_DATA}; use `data.text_field`",
    "dataset_kwargs": _PREPARES_DATA,
    "dataset_num_proc": _PREPARES_DATA,
    "truncation_mode": f"{_PREPARES_DATA}; rows are cut at their end to `data.max_length`",
    "shuffle_dataset": "rows are already dealt out in an order given by `train.seed`",
    "eos_token": f"{_PREPARES_DATA}; `data.append_eos` ends rows with the tokenizer's own",
    "pad_token": f"{_PREPARES_DATA}; padding carries no loss whatever the token",
    "completion_only_loss": f"{_PREPARES_DATA}; use `data.train_on`",
    "assistant_only_loss": f"{_PREPARES_DATA}; use `data.train_on`",
    "packing_strategy": "rows are packed best-fit: set train.packing",
    "eval_packing": "validation is packed like training: set train.packing",
    "padding_free": "follows from train.packing and the attention code",
    "remove_unused_columns": "the rows hold exactly the columns the model takes",
    # Checkpoints are adapter-sized and written to a staging folder first.
    "save_only_model": f"{_STORES}: adapter, optimizer, scheduler and random state",
    "save_on_each_node": f"{_STORES}, once, on rank 0",
    "enable_jit_checkpoint": f"{_STORES}, also when the job is told to stop",
    "resume_from_checkpoint": _STORES,
    "ignore_data_skip": f"{_STORES}; a resumed run goes on with the rows it has not seen",
    "restore_callback_states_from_checkpoint": _STORES,
    "metric_for_best_model": "the best checkpoint is the one with the lowest validation loss",
    "greater_is_better": "the best checkpoint is the one with the lowest validation loss",
    # Processes and devices.
    "use_cpu": "use `parallel.device: cpu`",
    "local_rank": "the launcher gives each process its rank",
    "ddp_backend": "gloo on CPU and NCCL on GPUs; `parallel.device` chooses",
    "ddp_timeout": "use `parallel.step_timeout_minutes`",
    "ddp_bucket_cap_mb": "it belongs to DDP; sharding is FSDP2",
    "ddp_broadcast_buffers": "it belongs to DDP; sharding is FSDP2",
    "ddp_static_graph": "it belongs to DDP; sharding is FSDP2",
    # The command line decides what is done and how it is shown.
    "do_train": "`shardtune train` trains",
    "do_eval": "use `train.eval_strategy`",
    "do_predict": "`shardtune train` trains",
    "disable_tqdm": "shardtune draws its own progress, and plain lines where there is no terminal",
    # The resolved config is written to the run folder: a secret in it would be, too.
    "hub_token": "it would be written to the run folder in clear; set the environment variable HF_TOKEN",
}

# Settings that older versions had; people still copy them.
_REMOVED = {
    "logging_dir": "transformers no longer has it; trackers write to the run folder",
    "group_by_length": "transformers now calls it `train_sampling_strategy: group_by_length`",
    "overwrite_output_dir": "each run gets a folder of its own, nothing is overwritten",
    "save_safetensors": "transformers no longer has it; weights are always written as safetensors",
    "neftune_alpha": "TRL calls it `neftune_noise_alpha`",
    "torchdynamo": "transformers no longer has it",
    "include_tokens_per_second": "transformers no longer has it; shardtune always shows tokens per second",
}


class TrlSourceError(LookupError):
    """TRL's dataclass could not be read (not installed, or laid out differently)."""


@dataclass(frozen=True)
class TrlField:
    """A setting of SFTConfig: its simple types (empty = unknown, anything goes) and its choices, if it has any."""

    name: str
    kinds: tuple[str, ...]
    choices: tuple[str, ...] = ()

    def fits(self, value: Any) -> bool:
        if value is None:
            return not self.kinds or "None" in self.kinds
        if self.choices and isinstance(value, str):
            return value in self.choices
        return not self.kinds or any(_is(value, kind) for kind in self.kinds)

    def words(self) -> str:
        if self.choices:
            return "one of: " + ", ".join(self.choices)
        return ", or ".join(_WORDS[kind] for kind in self.kinds)


def check_extra(name: str, value: Any, fields: Mapping[str, TrlField]) -> tuple[str, str] | None:
    """What is wrong with `train.extra.<name>: value`?

    Returns:
        (what, fix), or None when TRL can have it.
    """
    owners = [section for section, model in section_fields().items() if name in model.model_fields]
    if owners and name in fields:
        return "shardtune has a setting of its own for this", f"set `{owners[0]}.{name}`"
    if name in OWNED:
        return "this setting cannot be passed on", OWNED[name]
    if name not in fields:
        return "TRL's SFTConfig has no such setting", _meant(name, fields)
    field = fields[name]
    if field.fits(value):
        return None
    close = nearest(value, field.choices) if isinstance(value, str) else None
    return f"expected {field.words()}; got {shown(value)}", f"did you mean `{close}`?" if close else ""


def _meant(name: str, fields: Mapping[str, TrlField]) -> str:
    if name in _REMOVED:
        return _REMOVED[name]
    own = [f"{section}.{name}" for section, model in section_fields().items() if name in model.model_fields]
    if own or name in FOREIGN_KEYS:
        return f"set `{own[0] if own else FOREIGN_KEYS[name]}`"
    close = nearest(name, fields)
    return f"did you mean `{close}`?" if close else "see the documentation of trl.SFTConfig for the names it has"


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # Python's True is an int; YAML's true is not a number.
        return kind == "bool"
    if kind == "float":
        return isinstance(value, int | float)
    return kind in _SIMPLE and isinstance(value, _SIMPLE[kind])


@cache
def trl_fields() -> dict[str, TrlField]:
    """The settings of the installed `trl.SFTConfig`, those of its base classes included.

    Raises:
        TrlSourceError: TRL is not installed, or its source is not laid out as expected.
    """
    return _class_fields(_package("trl") / "trainer" / "sft_config.py", "SFTConfig")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # finds the folder; imports nothing
    if spec is None or spec.origin is None:
        raise TrlSourceError(f"the package {name} is not installed")
    return Path(spec.origin).parent


def _class_fields(path: Path, name: str) -> dict[str, TrlField]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise TrlSourceError(f"{path} cannot be read: {error}") from error
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        raise TrlSourceError(f"{path} has no class {name}")
    fields: dict[str, TrlField] = {}
    for base in reversed(found.bases):
        fields.update(_class_fields(*_base(ast.unparse(base), tree, path)))
    for statement in found.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields[statement.target.id] = _field(statement, statement.target.id)
    return fields


def _base(name: str, tree: ast.Module, path: Path) -> tuple[Path, str]:
    """Where is a base class written? In this file, in a module beside it, or it is transformers' own."""
    if name.rpartition(".")[2] == "TrainingArguments":
        return _package("transformers") / "training_args.py", "TrainingArguments"
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
        return path, name
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    folder = path.parents[node.level - 1]
                    return folder.joinpath(*node.module.split(".")).with_suffix(".py"), alias.name
    raise TrlSourceError(f"the base class {name} in {path} is not understood")


def _field(statement: ast.AnnAssign, name: str) -> TrlField:
    kinds = tuple(dict.fromkeys(_kinds(statement.annotation)))
    # An enum beside `str` adds nothing YAML can say; an annotation of nothing but unknown names says nothing.
    known = tuple(kind for kind in kinds if kind in _WORDS)
    return TrlField(name, known if set(known) - {"None"} else (), _choices(statement.value))


def _kinds(annotation: ast.expr) -> list[str]:
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _kinds(left) + _kinds(right)
        case ast.Constant(value=None):
            return ["None"]
        case ast.Name(id="Any"):
            return []
        case ast.Name(id=name):
            return [name]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return [*_kinds(inner), "None"]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            return [kind for part in parts for kind in _kinds(part)]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            words = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [type(word.value).__name__ for word in words if isinstance(word, ast.Constant)]
        case ast.Subscript(value=container):
            return _kinds(container)
    return []


def _choices(value: ast.expr | None) -> tuple[str, ...]:
    """The `choices` a dataclass field names in its metadata."""
    if not isinstance(value, ast.Call):
        return ()
    for keyword in value.keywords:
        if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
            for key, choices in zip(keyword.value.keys, keyword.value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(choices, ast.List):
                    return tuple(str(word.value) for word in choices.elts if isinstance(word, ast.Constant))
    return ()
