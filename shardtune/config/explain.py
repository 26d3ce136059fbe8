"""What is there to say about a setting? All of it from the tables that also check, translate and document it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from shardtune.config.accelerate_keys import FROM_FILE, OTHER_SPELLINGS, SECTIONS, Key
from shardtune.config.cross_checks import REQUIREMENTS
from shardtune.config.expected import expected
from shardtune.config.fsdp2_effects import FSDP2_EFFECTS
from shardtune.config.refused import OTHER_NAMES, TRL_NAMES
from shardtune.config.render import flow
from shardtune.config.suggestions import FOREIGN_KEYS, close_words, section_fields

# The page that says more, by the longest beginning of the setting's path.
PAGES: dict[str, str] = {
    "model": "loading.md",
    "lora": "targets.md",
    "data": "data.md",
    "data.val_split": "data.md",
    "train.per_device_": "out-of-memory.md",
    "train.gradient_accumulation_steps": "parallel.md",
    "train.gradient_checkpointing": "activations.md",
    "train.offload_activations": "activations.md",
    "train.optim": "optimizers.md",
    "train.adam_": "optimizers.md",
    "train.lr_scheduler_": "optimizers.md",
    "train.warmup_": "optimizers.md",
    "train.early_stopping_": "optimizers.md",
    "train.loss": "losses.md",
    "train.label_smoothing_factor": "losses.md",
    "train.router_aux_loss_coef": "losses.md",
    "train.kernels": "speed.md",
    "train.fused_": "speed.md",
    "train.compile": "speed.md",
    "train.fp8_compute": "loading.md",
    "train.packing": "data.md",
    "train.save_": "checkpoints.md",
    "train.load_best_model_at_end": "checkpoints.md",
    "train.resume": "checkpoints.md",
    "train.grace_seconds": "exit-codes.md",
    "train.final_wait_minutes": "failures.md",
    "train.fallback_dir": "failures.md",
    "train.report_to": "callbacks.md",
    "train.callbacks": "callbacks.md",
    "train.debug_freq": "profiling.md",
    "parallel": "parallel.md",
    "parallel.accelerate_config": "accelerate-files.md",
    "parallel.load_timeout_minutes": "failures.md",
    "parallel.step_timeout_minutes": "failures.md",
    "parallel.checkpoint_timeout_minutes": "failures.md",
    "parallel.join_timeout_minutes": "failures.md",
    "parallel.node_timeout_seconds": "failures.md",
    "parallel.max_restarts": "multi-node.md",
    "guards": "guards.md",
}


@dataclass(frozen=True)
class SettingFacts:
    """Everything that is known of a setting, but whether it may change on resume (checkpoint/changes.py)."""

    path: str
    meaning: str
    values: str
    default: str
    fsdp2: str
    needs: tuple[str, ...]  # what is refused unless another setting is as it must be
    needed_by: tuple[str, ...]  # settings that depend on this one
    names: tuple[str, ...]  # of other tools
    page: str  # in docs/; "" where the reference says all


@dataclass(frozen=True)
class Answer:
    """What a word stands for: settings (several if it is ambiguous), a section, or what to use instead.

    Args:
        remark: How the word became that: "" where it is the setting's own name.
    """

    kind: Literal["settings", "section", "instead"]
    paths: tuple[str, ...] = ()
    remark: str = ""


def all_settings() -> list[str]:
    return [f"{section}.{key}" for section, fields in section_fields().items() for key in fields.model_fields]


def find(word: str) -> Answer | None:
    """What this name means: a setting's path or key, a section, a name of accelerate, TRL and other tools."""
    name = word.strip().rstrip(":").replace("-", "_")
    section, _, key = name.rpartition(".")
    settings = all_settings()
    if name in settings:
        return Answer("settings", (name,))
    if name in section_fields():
        return Answer("section", (name,))
    owners = tuple(path for path in settings if path.partition(".")[2] == name)
    if owners:
        return Answer("settings", owners, "" if len(owners) == 1 else f"`{name}` is a setting of several sections")
    return _of_other_tools(key.lower() if section.lower() in (*section_fields(), "fsdp_config", "") else name)


def guess(word: str) -> tuple[str, ...]:
    """Settings with a similar name, the best first."""
    name = word.strip().lower().replace("-", "_").rpartition(".")[2]
    parts = set(name.split("_"))
    settings = all_settings()
    close = [path for path in settings if parts <= set(path.partition(".")[2].split("_"))]
    by_key = {path.partition(".")[2]: path for path in reversed(settings)}
    close += [by_key[key] for key in close_words(name, by_key)]
    return tuple(dict.fromkeys(close))[:6]


def setting_facts(path: str) -> SettingFacts:
    section, _, key = path.partition(".")
    field = section_fields()[section].model_fields[key]
    default = "required" if field.is_required() else flow(field.get_default(call_default_factory=True))
    return SettingFacts(
        path=path,
        meaning=field.description or "",
        values=expected(field),
        default=default,
        fsdp2=FSDP2_EFFECTS.get(path, ""),
        needs=tuple(
            f'{_with(requirement.values)}"{_unfilled(requirement.what)}"; {requirement.fix} '
            f"(depends on {', '.join(requirement.decided_by)})"
            for requirement in REQUIREMENTS
            if path in requirement.settings
        ),
        needed_by=tuple(
            dict.fromkeys(name for need in REQUIREMENTS if path in need.decided_by for name in need.settings)
        ),
        names=tuple(_names_elsewhere(path)),
        page=page_of(path),
    )


def page_of(path: str) -> str:
    """The page in docs/ that says more about a setting or section."""
    return PAGES.get(max((start for start in PAGES if path.startswith(start)), key=len, default=""), "")


def _of_other_tools(name: str) -> Answer | None:
    accelerate = next(
        (keys[key] for keys in SECTIONS.values() if (key := OTHER_SPELLINGS.get(name, name)) in keys), None
    )
    if accelerate is not None:
        return Answer("settings", _paths_of(accelerate), "\n".join(_translation(accelerate)))
    if name in FOREIGN_KEYS:
        return Answer("settings", (FOREIGN_KEYS[name],), f"`{name}` of other tools is `{FOREIGN_KEYS[name]}` here")
    instead = TRL_NAMES.get(name) or OTHER_NAMES.get(name, "")
    if instead:
        named = dict.fromkeys(re.findall(r"`(\w+\.\w+)", instead))
        paths = tuple(path for path in named if path in all_settings())
        return Answer("instead", paths, f"`{name}` is not a setting here: {instead}")
    return None


def _paths_of(key: Key) -> tuple[str, ...]:
    found = [meaning.path for meaning in key.values.values() if meaning.path]
    return tuple(dict.fromkeys([*found, *(meaning.also[0] for meaning in key.values.values() if meaning.also)]))


def _translation(key: Key) -> list[str]:
    """A line for each value of accelerate's key."""
    lines = [f"`{key.name}` of accelerate:"]
    for value, meaning in key.values.items():
        set_to = [(meaning.path, meaning.value)] if meaning.path else []
        set_to += [meaning.also] if meaning.also else []
        ours = ", ".join(f"{path}: {'the same' if to is FROM_FILE else flow(to)}" for path, to in set_to)
        lines.append(f"  {value} → {ours or meaning.verdict.replace('problem', 'refused')}. {meaning.why}")
    return lines


def _names_elsewhere(path: str) -> list[str]:
    keys = [key.name for keys in SECTIONS.values() for key in keys.values() if path in _paths_of(key)]
    others = [name for name, ours in FOREIGN_KEYS.items() if ours == path]
    trl = [name for name, instead in TRL_NAMES.items() if f"`{path}" in instead]
    return list(dict.fromkeys([*keys, *others, *trl]))


def _with(values: tuple[object, ...]) -> str:
    return f"{', '.join(flow(value) for value in values)}: " if values else ""


def _unfilled(what: str) -> str:
    """The sentence of a check without the values of a config."""
    return re.sub(r"\{[\w.]+\}", "…", what)
