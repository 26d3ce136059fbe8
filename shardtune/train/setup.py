"""How is a run brought to where its weights are read? Facts → choices → model → data → shards, to train or evaluate."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import enable_full_determinism, set_seed

from shardtune import terminal
from shardtune.config.references import put_back
from shardtune.data.checks import ModelLimits, enforce, model_positions, refusals_and_warnings
from shardtune.data.collate import Collator
from shardtune.data.estimate import DataSize
from shardtune.data.order import Documents
from shardtune.data.prepare import PreparedSet, prepare
from shardtune.model.load import tokenizer_and_new_tokens
from shardtune.model.meta_model import build_meta_model
from shardtune.observe.preparing import PreparingProgress
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.shard import can_split_adapters, shard_model
from shardtune.plan.choose import full_reshards
from shardtune.plan.expected import Expected, expected_of
from shardtune.plan.gather import gather_facts
from shardtune.plan.resolve import FLAT_ATTENTION, NEARLY_FULL, Notice, resolve
from shardtune.plan.steps import TrainingMath, training_math
from shardtune.plan.traffic import adapter_layout
from shardtune.run.watchdog import LOADING
from shardtune.train.account import report_loss, report_notices, report_plan, write_config
from shardtune.train.build import build_model
from shardtune.train.context import Data, RunContext, refuse_different_data
from shardtune.train.evaluation import GivenAdapter, read_given
from shardtune.train.facts import machine_of
from shardtune.train.traffic import Traffic, model_bytes, traffic_of
from shardtune.train.weights import find_checkpoint

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig, TrainSection
    from shardtune.data.prepared import Prepared
    from shardtune.model.meta_model import MetaModel
    from shardtune.parallel.processes import Processes
    from shardtune.parallel.shard import Sharding
    from shardtune.plan.facts import Machine
    from shardtune.plan.resolve import ResolvedRun
    from shardtune.run.evaluation import Evaluation
    from shardtune.run.watchdog import Watchdog
    from shardtune.train.build import BuiltModel
    from shardtune.train.losses import Loss
    from shardtune.train.weights import LoadStrategy


@dataclass(frozen=True)
class Setup:
    """What a run has built when only the weights are missing.

    Attributes:
        run: The config with nothing left open, and why.
        strategy: Who will read the weights.
        adapter: What to evaluate, if not the model as it is.
        expected: The peak and step time that the plan predicts.
    """

    run: ResolvedRun
    meta_model: MetaModel
    strategy: LoadStrategy
    tokenizer: PreTrainedTokenizerBase
    built: BuiltModel
    adapter: GivenAdapter | None
    prepared: PreparedSet
    data: Data
    math: TrainingMath
    sharding: Sharding
    traffic: Traffic
    expected: Expected

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def model(self) -> PeftModel:
        return self.built.model

    @property
    def loss(self) -> Loss:
        return self.built.loss


def set_up(context: RunContext, asked: ResolvedConfig, watchdog: Watchdog, evaluation: Evaluation | None) -> Setup:
    """Bring a run to where its weights are read.

    What needs neither weights nor rows comes first, so that a target that matches nothing is refused in seconds; data
    before weights; adapters before sharding, so that they are sharded too.

    Args:
        asked: The config as it was given.
        evaluation: What is to be evaluated, where nothing is trained.
    """
    processes = context.processes
    checkpoint = find_checkpoint(asked.config.model, processes)
    meta_model = build_meta_model(asked.config.model, checkpoint.folder, checkpoint.stored)
    tokenizer, named = tokenizer_and_new_tokens(asked.config.model, checkpoint.folder)
    prepared_data = cache(partial(_prepare_data, context, asked.config, tokenizer))
    length = asked.config.data.max_length
    facts = gather_facts(
        asked.config,
        meta_model.outline,
        machine_of_main(processes),
        lambda: prepared_data().train.counts.fill_share(length),
    )
    if evaluation is not None:  # what training would need is no obstacle
        asked = asked.with_auto("guards.memory_plan", "off", "nothing is trained")
    run = resolve(asked, facts)
    report_notices(context, run.notices)
    write_config(context, run.settings)

    built = build_model(run, meta_model, named, processes.device)
    report_loss(context, built.loss)
    report_notices(context, built.notices)
    adapter = None
    if evaluation is not None and evaluation.adapter is not None:
        adapter = read_given(processes, built.model, run.config.model.model_name_or_path, evaluation.adapter)
        report_notices(context, [Notice("adapter", text) for text in adapter.notices])

    prepared = prepared_data()
    watchdog.enter(LOADING)
    _check_data(context, meta_model, tokenizer, prepared, built)
    data = _lay_out(run.config, prepared, tokenizer)
    math = training_math(run.config.train, rows=len(data.train), tokens=data.tokens, processes=processes.world_size)
    set_numerics(run.config.train)
    sharding, traffic = _shard(
        run.config, built.model, meta_model, processes, full_reshards=full_reshards(run.config, facts)
    )
    counts = prepared.train.counts
    size = DataSize(counts.rows, counts.tokens, len(data.train), 0, exact=True, how="prepared")
    expected = expected_of(facts, run.config, size)
    setup = Setup(
        run,
        meta_model,
        checkpoint.strategy,
        tokenizer,
        built,
        adapter,
        prepared,
        data,
        math,
        sharding,
        traffic,
        expected,
    )
    if evaluation is None:
        report_plan(context, setup)
    return setup


def set_numerics(train: TrainSection) -> None:
    """Seed all generators, and choose between fast and exact kernels (`train.full_determinism`, `train.tf32`)."""
    (enable_full_determinism if train.full_determinism else set_seed)(train.seed)
    if train.tf32 is not None:
        torch.set_float32_matmul_precision("high" if train.tf32 else "highest")


def machine_of_main(processes: Processes) -> Machine:
    """Rank 0's machine with the least memory of all ranks, on every one: otherwise they would choose differently."""
    here, nodes = processes.nodes.count(processes.nodes[processes.rank]), Counter(processes.nodes)
    own = machine_of(processes.device, tuple(nodes[node] for node in sorted(nodes)), here)
    theirs: dict[str, Any] = processes.share_from_main(
        {"processes_here": own.processes_here, "gpu": own.gpu, "lacks_bf16": own.lacks_bf16}
    )
    memory, host_memory = (min(each) for each in zip(*processes.all_gather([own.memory, own.host_memory]), strict=True))
    return replace(own, memory=memory, host_memory=host_memory, **theirs)


def _prepare_data(context: RunContext, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreparedSet:
    """Every process asks; one per disk does the work while the others wait for its file, not in a collective."""
    name = config.model.tokenizer_name_or_path or config.model.model_name_or_path
    with PreparingProgress(context.console) as progress:
        prepared = prepare(config.data, config.train.seed, tokenizer, name, progress=progress)
    context.processes.wait_for_all("data")
    refuse_different_data(context.processes, prepared.about["fingerprint"])
    context.events.write(
        "data",
        format=asdict(prepared.choice),
        folder=put_back(config, str(prepared.folder)),
        train=put_back(config, prepared.train.counts.as_dict()),
        validation=put_back(config, prepared.val.counts.as_dict()) if prepared.val else None,
    )
    return prepared


def _check_data(
    context: RunContext,
    meta_model: MetaModel,
    tokenizer: PreTrainedTokenizerBase,
    prepared: PreparedSet,
    built: BuiltModel,
) -> None:
    model = meta_model.model
    embeddings = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    limits = ModelLimits(embeddings, model_positions(model.config))
    learnt = built.new_tokens.numbers if built.new_tokens is not None else {}
    if context.temporary:
        prepared = replace(prepared, overlap=0)  # whoever evaluates on training rows means it
    for warning in enforce(refusals_and_warnings(prepared, tokenizer, limits, learnt)):
        text = " ".join(part for part in (warning.what, warning.why, warning.fix) if part)
        terminal.warn(context.console, context.events, "data", text)


def _lay_out(config: RunConfig, prepared: PreparedSet, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Rows as they are, or packed; and the batch layout that fits the attention code."""
    train, length = config.train, config.data.max_length
    layout: Literal["padded", "packed", "flat"] = "padded"
    if train.packing:
        layout = "flat" if config.model.attn_implementation in FLAT_ATTENTION else "packed"

    def documents(part: Prepared) -> Documents:
        return Documents(part, part.packs(length) if train.packing else None)

    full = train.packing or prepared.train.counts.fill_share(length) >= NEARLY_FULL
    return Data(
        train=documents(prepared.train),
        val=documents(prepared.val) if prepared.val is not None else None,
        collator=Collator(
            tokenizer.pad_token_id,
            layout,
            fill_to=length if train.compile is True and full else None,  # compiled code then sees one shape
        ),
    )


def _shard(
    config: RunConfig, model: PeftModel, meta_model: MetaModel, processes: Processes, *, full_reshards: bool
) -> tuple[Sharding, Traffic]:
    parallel, dtype = config.parallel, torch.bfloat16 if config.train.bf16 else None
    shards = {"full": processes.world_size, "hybrid": parallel.shard_size, "replicate": 1}[parallel.shard]
    sizes = model_bytes(model, config, meta_model.layer_class)
    split = shards == 1 and can_split_adapters(model, dtype, parallel, processes.device)
    if split:
        split = adapter_layout(sizes, processes.world_size).adapters == "sharded"
    mesh = build_mesh(processes, shards, shard_adapters=split)
    sharding = shard_model(
        model,
        parallel,
        mesh,
        dtype,
        meta_model.layer_class,
        selective=config.train.gradient_checkpointing == "selective",
        compiled=config.train.compile is True,
    )
    return sharding, traffic_of(sizes, config, mesh, full_reshards=full_reshards)
