"""What would a run choose here? The facts and the resolver of `train`, in one process, without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from shardtune.config.redact import redacted
from shardtune.data.prepare import prepare
from shardtune.model.load import load_tokenizer, model_folder
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers
from shardtune.observe.preparing import PreparingProgress
from shardtune.parallel.processes import device_type
from shardtune.plan.gather import gather_facts
from shardtune.plan.resolve import resolve
from shardtune.train.callbacks import check_callbacks
from shardtune.train.facts import machine_of

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig


def resolve_here(asked: ResolvedConfig, *, processes_here: int, world_size: int) -> ResolvedConfig:
    """The config as a run started here would write it down, with all its notices.

    The data is prepared, into the cache, where a choice depends on it (packing on a GPU); progress goes to stderr.

    Raises:
        UserInputError: as `train` would.
    """
    config = asked.config
    check_callbacks(config.train)
    device = torch.device(device_type(config.parallel))
    folder = model_folder(config.model)
    stored = read_headers(folder) if config.model.weights == "checkpoint" else {}
    meta_model = build_meta_model(config.model, folder, stored)

    def fill_share() -> float:
        tokenizer = load_tokenizer(config.model, folder)
        name = config.model.tokenizer_name_or_path or config.model.model_name_or_path
        with PreparingProgress(Console(stderr=True)) as progress:
            prepared = prepare(config.data, config.train.seed, tokenizer, name, progress=progress)
        return prepared.train.counts.fill_share(config.data.max_length)

    nodes = (processes_here,) * (world_size // processes_here) or (processes_here,)
    facts = gather_facts(config, meta_model.outline, machine_of(device, nodes, processes_here), fill_share)
    run = resolve(asked.on_device(device.type), facts)
    notices = (*run.settings.notices, *(notice.text for notice in run.notices))
    return redacted(replace(run.settings, notices=notices))
