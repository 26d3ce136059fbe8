"""Which settings suit this model, data and hardware? What `shardtune init` writes, each with its reason. No torch."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardtune.config.reference import first_sentence
from shardtune.config.render import flow
from shardtune.config.schema import ATTENTION, MLP
from shardtune.config.suggestions import section_fields
from shardtune.errors import UserInputError
from shardtune.plan.page import verdict
from shardtune.terminal import clock, count, percent

if TYPE_CHECKING:
    from shardtune.plan.facts import Machine
    from shardtune.plan.report import Plan

Choice = tuple[str, Any, str]  # a setting's path, its value, why

_SHARE_THAT_FITS = 0.99  # of the rows that are not truncated
_SHORTEST, _LONGEST, _UNKNOWN_LENGTH = 512, 32768, 2048
_STEP_TOKENS = 65_536  # of an optimizer step: enough to average over, little enough for many steps
_FEWEST_STEPS, _SMALLEST_BATCH, _LARGEST_BATCH = 100, 8, 128
_EPOCHS = "train.num_train_epochs"
_LARGE_MODEL = 10e9  # parameters; larger ones train at a lower learning rate
_WIDTH = 110


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the model; nothing where it is not on this machine.

    Attributes:
        targets: For lora.target_modules.
        parameters: Of the text model.
        context: Tokens of the longest row that it was made for.
        has_experts: Routed experts.
    """

    targets: str | tuple[str, ...] = (ATTENTION, MLP)
    parameters: int | None = None
    context: int | None = None
    has_experts: bool = False


@dataclass(frozen=True)
class InitFacts:
    """What is known before anything is chosen; None where nothing is.

    Attributes:
        format: Of the rows, and why, for people.
        concatenated: Rows are joined and cut, so that their own lengths do not matter.
        rows, sequences: Of an epoch: as they are, and packed to max_length.
        val_split: One that the data has.
        given: Settings that the user has decided, by path.
        unread: Files of the data's folder that hold such rows, too, but are in no split.
    """

    model: ModelFacts
    format: str
    concatenated: bool
    rows: int | None
    sequences: int | None
    val_split: str | None
    machine: Machine
    given: Mapping[str, Any]
    unread: tuple[str, ...] = ()

    @property
    def hardware(self) -> str:
        machine = self.machine
        each = f"{machine.processes_here} × {machine.gpu}" if machine.gpu else "a CPU"
        return each if len(machine.nodes) == 1 else f"{len(machine.nodes)} nodes with {each} each"


@dataclass(frozen=True)
class PlanNotes:
    """What the plan says: in lines for the top of the file, and by path what each `auto` comes to."""

    head: tuple[str, ...] = ()
    resolved: Mapping[str, str] = field(default_factory=dict)


def plan_notes(plan: Plan) -> PlanNotes:
    """What a plan says of the config that is being written.

    Raises:
        UserInputError: it does not fit.
    """
    if not plan.fits:
        raise UserInputError(
            f"No settings were found with which this model trains there. It {verdict(plan)}.",
            fix="Name more or larger GPUs (--gpus, --nodes), or shorter rows: -o data.max_length=….",
            code="does-not-fit",
        )
    speed = f"{plan.time.tokens_per_second:,.0f} tokens/s"
    if plan.steps is not None and plan.total is not None:
        speed += f", about {clock(plan.total.seconds)} for {count(plan.steps, 'step')}"
    resolved = {
        path: f"auto = {flow(plan.run.settings.value(path))}: {why}."
        for path in plan.run.settings.origins
        if (why := plan.run.reason(path))
    }
    return PlanNotes((f"By its plan it {verdict(plan)}; {speed}.",), resolved)


def choose_max_length(lengths: Sequence[int], how: str, context: int | None, *, concatenated: bool) -> Choice:
    """A power of two that nearly all rows fit into, within what the model was made for."""
    path, most = "data.max_length", min(context or _LONGEST, _LONGEST)
    if concatenated or not lengths:
        why = "rows are concatenated and cut" if concatenated else "the lengths of the rows are not known here"
        return path, min(_UNKNOWN_LENGTH, most), why
    fits = sorted(lengths)[math.ceil(_SHARE_THAT_FITS * len(lengths)) - 1]
    chosen = min(max(_SHORTEST, 1 << (fits - 1).bit_length()), most)
    longer = sum(length > chosen for length in lengths) / len(lengths)
    why = f"{_SHARE_THAT_FITS:.0%} of the rows have at most {fits:,} tokens ({how})".replace("%", " %", 1)
    why += f"; {percent(longer)} are longer, and are truncated" if longer else ""
    return path, chosen, why + (f"; the model's context is {context:,}" if chosen == context else "")


def choices(facts: InitFacts, max_length: Choice) -> list[Choice]:
    """Everything that the config states, but what it is about: model and data."""
    val_split = _val_split(facts)
    batch, why = _effective_batch(facts, max_length[1])
    found = [
        *_model_and_adapters(facts),
        ("data.format", "auto", ""),
        max_length,
        val_split,
        ("train.output_dir", "runs", ""),
        *_epochs(facts, evaluates=val_split[1] is not None),
        *_batch(batch, why),
        _learning_rate(facts),
        ("train.packing", "auto", ""),
        *_intervals(facts, batch, evaluates=val_split[1] is not None),
        ("parallel.nproc", "auto", ""),
        ("parallel.shard", "auto", ""),
        ("parallel.reshard_after_forward", "auto", ""),
    ]
    if len(facts.machine.nodes) > 1:
        found.append(("cluster.nodes", len(facts.machine.nodes), ""))
        found.append(("cluster.gpus_per_node", facts.machine.nodes[0], ""))
        if facts.machine.gpu:
            found.append(("cluster.gpu", facts.machine.gpu, "what `plan` and `submit` check the memory for"))
    left = [choice for choice in found if choice[0] not in facts.given]
    return [*left, *((path, value, "as given") for path, value in facts.given.items())]


def _model_and_adapters(facts: InitFacts) -> Iterator[Choice]:
    if facts.machine.lacks_bf16:
        yield "model.torch_dtype", "float32", "this CPU has no bfloat16 units"
    yield "model.base_precision", "auto", ""
    yield "lora.r", 16, "enough for instruction data; raise it, with lora_alpha, for new knowledge"
    yield "lora.lora_alpha", 32, "twice r is usual"
    targets = facts.model.targets
    yield "lora.target_modules", targets if isinstance(targets, str) else list(targets), ""
    if facts.model.has_experts:
        yield "lora.experts", False, "the routed experts are most of the weights, and adapters on them most of the time"
        yield "lora.lora_dropout", 0.0, "some layers beside routed experts can only be adapted without dropout"


def _val_split(facts: InitFacts) -> Choice:
    path, rows = "data.val_split", facts.rows
    if path in facts.given:
        return path, facts.given[path], ""
    if facts.val_split is not None:
        return path, facts.val_split, "the data has this split"
    if rows is None:
        return path, 0.05, "the number of rows is not known here"
    if rows < 100:
        return path, None, f"{count(rows, 'row')} are too few to hold some out"
    share = 0.1 if rows < 2000 else 0.05 if rows < 20_000 else float(f"{1000 / rows:.1g}")
    return path, share, f"about {round(share * rows):,} of {rows:,} rows"


def _epochs(facts: InitFacts, *, evaluates: bool) -> Iterator[Choice]:
    """Nothing where the user has named the number of steps, which takes precedence."""
    if _max_steps(facts) is not None:
        return
    rows = facts.rows
    if rows is None or facts.concatenated:
        why = "more only if the validation loss still falls"
    else:
        why = f"usual for {count(rows, 'row')}"
        if _keeps_best(facts, evaluates=evaluates):
            why += "; load_best_model_at_end keeps the best weights"
    yield _EPOCHS, _number_of_epochs(facts), why


def _number_of_epochs(facts: InitFacts) -> float:
    rows = facts.rows
    usual = 1 if rows is None or facts.concatenated or rows >= 50_000 else 3 if rows < 5000 else 2
    epochs: float = facts.given.get(_EPOCHS, usual)
    return epochs


def _max_steps(facts: InitFacts) -> int | None:
    """Steps that the user has asked for; None where epochs decide."""
    given = facts.given.get("train.max_steps", -1)
    return int(given) if given > 0 else None


def _effective_batch(facts: InitFacts, max_length: int) -> tuple[int, str]:
    batch = _power_of_two(min(max(_STEP_TOKENS // max_length, _SMALLEST_BATCH), _LARGEST_BATCH))
    why = f"at most {batch * max_length:,} tokens a step"
    rows = None if facts.sequences is None else facts.sequences * _number_of_epochs(facts)
    steps = _max_steps(facts)
    usual = batch
    while rows is not None and batch > _SMALLEST_BATCH and rows / batch < (steps or _FEWEST_STEPS):
        batch //= 2
    if rows is not None and batch < usual:
        why = f"{usual} would leave only {count(max(1, round(rows / usual)), 'step')}"
        if steps is not None and facts.sequences:
            passes = round(usual * steps / facts.sequences)
            why = f"{usual} would read the data {passes:,} times in {count(steps, 'step')}"
    world = facts.machine.world_size
    if batch % world:
        batch = world * _power_of_two(max(1, batch // world))
        why += f"; a multiple of {count(world, 'process', 'es')}"
    return batch, why


def _batch(batch: int, why: str) -> Iterator[Choice]:
    yield "train.effective_batch_size", batch, f"{why}; it stays the same on other numbers of GPUs that divide it"
    yield "train.per_device_train_batch_size", "auto", ""
    yield "train.gradient_accumulation_steps", "auto", ""
    yield "train.gradient_checkpointing", "auto", ""


def _learning_rate(facts: InitFacts) -> Choice:
    size = facts.model.parameters
    if size is None or size >= _LARGE_MODEL:
        return "train.learning_rate", 1e-4, "usual for LoRA on large models, ten times that of full fine-tuning"
    return "train.learning_rate", 2e-4, f"usual for LoRA on models below {_LARGE_MODEL / 1e9:.0f}B parameters"


def _intervals(facts: InitFacts, batch: int, *, evaluates: bool) -> Iterator[Choice]:
    """How often the run logs, evaluates and saves; if one of eval_steps and save_steps is given, the other follows."""
    steps, why = 1000, ""
    if (asked := _max_steps(facts)) is not None:
        steps, why = asked, f"of {count(asked, 'step')}"
    elif facts.sequences is not None:
        steps = math.ceil(math.ceil(facts.sequences / batch) * _number_of_epochs(facts))
        why = f"of about {count(steps, 'step')}"
    yield "train.logging_steps", _round_number(steps // 50, most=25), ""
    every = _round_number(steps // 10, most=200)
    by_steps = [what for what in ("eval", "save") if _by_steps(facts, what) and (evaluates or what == "save")]
    for what, other, reason in (
        ("eval", "save", "as often as a checkpoint is saved"),
        ("save", "eval", "as often as the run is evaluated"),
    ):
        if what in by_steps:
            given = facts.given.get(f"train.{other}_steps") if other in by_steps else None
            yield f"train.{what}_steps", given or every, reason if given else why
    if _keeps_best(facts, evaluates=evaluates):
        yield "train.load_best_model_at_end", True, ""


def _by_steps(facts: InitFacts, what: str) -> bool:
    """The user has chosen no other strategy of evaluating or saving."""
    return facts.given.get(f"train.{what}_strategy", "steps") in ("steps", "auto")


def _keeps_best(facts: InitFacts, *, evaluates: bool) -> bool:
    """As the user says; otherwise where every checkpoint has a validation loss, so that the best one is known."""
    if (asked := facts.given.get("train.load_best_model_at_end")) is not None:
        return bool(asked)
    evaluated, saved = (facts.given.get(f"train.{what}_steps") for what in ("eval", "save"))
    fit = evaluated is None or saved is None or saved % evaluated == 0
    return evaluates and fit and _by_steps(facts, "eval") and _by_steps(facts, "save")


def _round_number(value: int, most: int) -> int:
    return max(number for number in (1, 2, 5, 10, 20, 25, 50, 100, 200) if number <= min(max(1, value), most))


def _power_of_two(value: int) -> int:
    """The largest that is not above it."""
    return 1 << (value.bit_length() - 1)


def render_config(found: Sequence[Choice], resolved: Mapping[str, str], head: Sequence[str]) -> str:
    """The YAML: above each setting what it does (from its description) and why it has this value.

    Args:
        resolved: What each `auto` comes to on the named hardware, and why, by path.
        head: Lines of the comment at the top.
    """
    lines = [f"# {line}".rstrip() for line in head]
    chosen = {path: (value, why) for path, value, why in found}
    for section, model in section_fields().items():
        keys = [key for key in model.model_fields if f"{section}.{key}" in chosen]
        if not keys:
            continue
        lines += ["", f"{section}:"]
        for key in keys:
            path = f"{section}.{key}"
            value, why = chosen[path]
            if not model.model_fields[key].is_required():  # what the file is about needs no explanation
                lines += _comments(_brief(model.model_fields[key].description or ""))
            lines += _comments(_sentence(why)) + _comments(resolved.get(path, ""))
            lines.append(f"  {key}: {flow(value)}")
    return "\n".join(lines) + "\n"


def _comments(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="  # ", subsequent_indent="  # ", break_long_words=False, break_on_hyphens=False
    )


def _brief(description: str) -> str:
    """What a setting does, in a line or two."""
    sentence = first_sentence(description)
    return sentence if len(sentence) <= 1.5 * _WIDTH else re.split(r"[:;] ", sentence, maxsplit=1)[0] + "."


def _sentence(why: str) -> str:
    return f"{why[0].upper()}{why[1:]}." if why else ""
