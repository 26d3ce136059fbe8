"""Every `auto`, from facts alone: no weights, no device, no process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resolving import CPU, GPU, resolved_for
from support.twins import any_config, toy
from toys import toy_text_config

from shardtune.config import load_config, render_yaml
from shardtune.errors import UserInputError
from shardtune.model.new_tokens import NewTokens
from shardtune.plan.facts import Facts, LayerKind, Machine, Shape
from shardtune.plan.resolve import ResolvedRun, resolve
from shardtune.train.build import build_model
from shardtune.train.setup import machine_of_main

GIB = 1 << 30


def alike(count: int, shape: Shape, *, quantised: bool = False) -> tuple[LayerKind, ...]:
    return (
        LayerKind(count, {"mlp.up_proj.weight": shape}, frozenset({"mlp.up_proj.weight"} if quantised else ()), {}),
    )


LLAMA = Facts(
    machine=CPU, model_type="llama", model_class="LlamaForCausalLM", model={"hidden_size": 4096, "vocab_size": 32000},
    dtype="bfloat16", kinds=alike(32, (61440, 4096)), root={"model.embed_tokens.weight": (131072, 4096)},
    trained=40 << 20, layer_class="LlamaDecoderLayer", module_classes=frozenset({"LlamaDecoderLayer", "LlamaMLP"}),
    own_attention="sdpa", attention_dropout=False, full_attention=True, missing={}, unsupported={},
    loss_obstacle=None, router_coefficient=0.0, unused_router_loss=None, fill_share=lambda: 0.5,
)  # fmt: skip
MIXTURE = replace(LLAMA, kinds=(LayerKind(32, {"mlp.experts.up_proj": (15, 4096, 4096)}, frozenset(), {}),))
FP8 = alike(32, (61440, 4096), quantised=True)  # 8 Gi parameters with the embedding
LARGE = replace(
    LLAMA, kinds=alike(39, (262144, 4096), quantised=True), root={"model.embed_tokens.weight": (262144, 4096)}
)
ON_GPU = replace(LLAMA, machine=GPU)
Resolve = Callable[..., ResolvedRun]


@pytest.fixture
def resolved(tmp_path: Path) -> Resolve:
    """What a config of nothing but overrides comes to."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {model_name_or_path: m}\ndata: {dataset_name_or_path: d}\n")
    return lambda facts, *overrides: resolve(load_config(file, overrides, environ={}), facts)


def unread() -> float:
    raise AssertionError("the data was prepared for a choice that does not need it")


@pytest.mark.parametrize(
    ("facts", "overrides", "path", "value", "why"),
    [
        (LLAMA, [], "parallel.device", "cpu", "torch sees no CUDA device"),
        (ON_GPU, [], "parallel.device", "cuda", "torch sees a CUDA device"),
        (replace(LLAMA, machine=Machine("cpu", 16 * GIB, 2, (2, 2))), [], "parallel.nproc", 2, "processes on this machine"),
        (LLAMA, [], "train.eval_strategy", "no", "data.val_split is null"),
        (LLAMA, ["data.val_split=v"], "train.eval_strategy", "steps", "data.val_split is given"),
        (LLAMA, ["model.torch_dtype=auto"], "model.torch_dtype", "bfloat16", "the checkpoint's own dtype"),
        (LLAMA, ["model.torch_dtype=auto"], "train.bf16", True, "the model is held in bfloat16"),
        (replace(LLAMA, dtype="float32"), ["model.torch_dtype=auto"], "train.bf16", False, "held in float32"),
        (LLAMA, [], "model.base_precision", "bf16", "the checkpoint is not quantised"),
        (replace(ON_GPU, kinds=FP8), [], "model.base_precision", "bf16", "GiB usable; fp8: "),
        (replace(LARGE, machine=GPU), [], "model.base_precision", "fp8", "; bf16: "),
        (
            replace(LARGE, machine=replace(GPU, nodes=(2,))),
            [], "model.base_precision", "fp8", "bf16: as fast",
        ),
        (replace(LLAMA, router_coefficient=0.02), [], "train.router_aux_loss_coef", 0.02, "as in the model's config"),
        (LLAMA, [], "train.fp8_compute", False, "the base is bf16"),
        (LLAMA, ["model.base_precision=fp8"], "train.fp8_compute", False, "it is opt-in"),
        (LLAMA, [], "train.fused_lora", True, "supported by this machine and model"),
        (LLAMA, ["train.kernels=eager"], "train.fused_lora", False, "train.kernels is eager"),
        (LLAMA, ["train.bf16=false"], "train.fused_lora", False, "float32 adapters meet activations in bfloat16"),
        (replace(LLAMA, dtype="float32"), ["train.bf16=false"], "train.fused_lora", True, "supported by"),
        (replace(MIXTURE, missing={"fused_experts": "biases"}), [], "train.fused_experts", False, "bia"),
        (replace(LLAMA, loss_obstacle="a scale"), [], "train.fused_loss", False, "a scale"),
        (LLAMA, [], "train.compile", False, "on a GPU in half precision"),
        (ON_GPU, [], "train.compile", True, "supported by this machine and model"),
        (ON_GPU, ["model.base_precision=fp8"], "train.compile", True, "supported by this machine and model"),
        (replace(ON_GPU, dtype="float32"), [], "train.compile", False, "in half precision"),
        (replace(ON_GPU, dtype="float32"), ["train.bf16=true"], "train.compile", True, "supported by"),
        (ON_GPU, ["train.kernels=eager"], "train.compile", False, "train.kernels is eager"),
        (replace(ON_GPU, missing={"compile": "unknown"}), [], "train.compile", False, "unknown"),
        (replace(LLAMA, fill_share=unread), [], "train.packing", True, "attention keeps packed documents apart"),
        (ON_GPU, [], "train.packing", True, "attention keeps packed documents apart"),
        (replace(ON_GPU, fill_share=lambda: 0.99), [], "train.packing", False, "rows nearly fill data.max_length"),
        (
            replace(ON_GPU, fill_share=unread), ["model.attn_implementation=flash_attention_2"],
            "train.packing", True, "attention keeps packed documents apart",
        ),
        (
            replace(ON_GPU, fill_share=unread, missing={"packing": "a state of its own"}),
            [], "train.packing", False, "a state of its own",
        ),
        (
            ON_GPU, ["model.attn_implementation=shardtune_whole_rows"],
            "train.packing", False, "model.attn_implementation is shardtune_whole_rows",
        ),
        (LLAMA, [], "model.attn_implementation", "sdpa", "torch's fused attention"),
        (replace(LLAMA, own_attention="eager"), [], "model.attn_implementation", "eager", "has no sdpa"),
        (ON_GPU, [], "model.attn_implementation", "shardtune_varlen", "packed rows on a GPU"),
        (ON_GPU, ["train.packing=false"], "model.attn_implementation", "shardtune_whole_rows", "unpacked rows on a GPU"),
        (ON_GPU, ["train.kernels=eager"], "model.attn_implementation", "sdpa", "train.kernels is eager"),
        (replace(ON_GPU, attention_dropout=True), [], "model.attn_implementation", "sdpa", "attention has dropout"),
        (replace(ON_GPU, missing={"varlen": "sinks"}), [], "model.attn_implementation", "sdpa", "sinks"),
        (
            replace(ON_GPU, full_attention=False), ["train.packing=false"],
            "model.attn_implementation", "sdpa", "not every layer has full causal attention",
        ),
    ],
)  # fmt: skip
def test_an_auto_becomes_a_value_with_its_reason(
    resolved: Resolve, facts: Facts, overrides: list[str], path: str, value: Any, why: str
) -> None:
    run = resolved(facts, *overrides)
    section, _, key = path.partition(".")
    assert getattr(getattr(run.config, section), key) == value
    assert why in (run.reason(path) or "")


@pytest.mark.parametrize("facts", [LLAMA, ON_GPU, replace(MIXTURE, machine=GPU, router_coefficient=0.01)])
def test_nothing_is_left_open_and_the_result_resolves_to_itself(resolved: Resolve, facts: Facts) -> None:
    run = resolved(facts)
    values = run.config.model_dump()
    left = [
        key for section in ("model", "train", "parallel") for key, value in values[section].items() if value == "auto"
    ]
    assert left == [
        "load",
        "kernels",
        "resume",
        "reshard_after_forward",
    ]  # the last has no meaning without sharding  # what a rank finds, a switch for others, and what a launcher finds
    assert resolve(run.settings, facts).settings == run.settings


def test_what_was_given_stays_and_has_no_reason(resolved: Resolve) -> None:
    run = resolved(ON_GPU, "train.packing=false", "train.compile=false", "train.bf16=true")
    assert (run.config.train.packing, run.config.train.compile) == (False, False)
    assert run.reason("train.packing") is run.reason("train.bf16") is None


@pytest.mark.parametrize(
    ("facts", "overrides", "what"),
    [
        (LLAMA, ["train.bf16=false", "lora.bias=all"], "train.bf16 is false with weights in bfloat16"),
        (LLAMA, ["train.bf16=false", "train.fused_lora=true"], "train.fused_lora is true"),
        (LLAMA, ["train.fp8_compute=true"], "no weight is held in FP8"),
        (replace(LLAMA, loss_obstacle="a scale"), ["train.fused_loss=true"], "train.fused_loss is true"),
        (replace(LLAMA, unsupported={"fused_experts": "b"}), ["train.fused_experts=true"], "train.fused_experts is true"),
        (
            replace(LLAMA, missing={"selective": "b"}), ["train.gradient_checkpointing=selective"],
            "train.gradient_checkpointing is selective",
        ),
        (replace(LLAMA, missing={"packing": "b"}), ["train.packing=true"], "keep the documents of a row apart"),
        (LLAMA, ["model.attn_implementation=shardtune_varlen"], "which this run cannot use"),
        (ON_GPU, ["model.attn_implementation=shardtune_varlen", "train.packing=false"], "which this run cannot use"),
        (ON_GPU, ["model.attn_implementation=shardtune_whole_rows", "train.packing=true"], "which this run cannot use"),
        (LLAMA, ["parallel.transformer_layer_cls_to_wrap=MyBlock"], "no module of class MyBlock"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_before_the_data_is_prepared(
    resolved: Resolve, facts: Facts, overrides: list[str], what: str
) -> None:
    with pytest.raises(UserInputError, match=what):
        resolved(replace(facts, fill_share=unread), *overrides)


def test_a_copied_layer_class_is_understood_of_a_model_that_was_not_built(resolved: Resolve) -> None:
    from_files = replace(LLAMA, module_classes=frozenset())
    key = "parallel.transformer_layer_cls_to_wrap"
    assert (
        resolved(from_files, f"{key}=MistralDecoderLayer").config.parallel
        == resolved(LLAMA, f"{key}=MistralDecoderLayer").config.parallel
    )
    for own in ("LlamaDecoderLayer", "LlamaMLP"):  # whether there is another class, only the model could tell
        run = resolved(from_files, f"{key}={own}")
        assert run.config.parallel.transformer_layer_cls_to_wrap == own and not run.notices


def test_bfloat16_on_a_cpu_without_units_for_it_is_a_notice(resolved: Resolve) -> None:
    slow = replace(LLAMA, machine=replace(CPU, lacks_bf16=True))
    assert ["no bfloat16 units" in notice.text for notice in resolved(slow).notices] == [True]
    assert resolved(LLAMA).notices == ()


@pytest.mark.parametrize(("gib", "notices"), [(16, 1), (999, 0)])
def test_comparing_replicas_where_auto_came_to_one_is_a_notice(resolved: Resolve, gib: int, notices: int) -> None:
    two_nodes = replace(LLAMA, machine=Machine("cpu", gib * GIB, 1, (1, 1)))
    found = resolved(two_nodes, "guards.replica_check_steps=5").notices
    assert ["guards.replica_check_steps has no effect" in notice.text for notice in found] == [True] * notices


@pytest.mark.parametrize(
    ("kind", "asked", "why"),
    [
        ("gpt_oss", "train.gradient_checkpointing=selective", "Its experts add biases in place"),
        ("gpt_oss", "train.fused_experts=true", "Experts have biases"),
        ("starcoder2", "train.gradient_checkpointing=selective", "There is no family file for starcoder2"),
        ("gemma2", "train.fused_loss=true", "Gemma2ForCausalLM has final_logit_softcapping"),
    ],
)
def test_code_that_does_not_compute_a_model_is_refused(tmp_path: Path, kind: str, asked: str, why: str) -> None:
    with pytest.raises(UserInputError, match="cannot have") as refused:
        resolved_for(any_config(tmp_path, asked), toy(kind))
    assert refused.value.why.startswith(why)


def test_ranks_choose_by_the_rank_with_the_least_memory() -> None:
    processes: Any = SimpleNamespace(
        device=torch.device("cpu"), rank=2, nodes=(0, 0, 1), share_from_main=lambda mine: {**mine, "processes_here": 2},
        all_gather=lambda mine: [mine, [7, 20], mine],
    )  # fmt: skip
    machine = machine_of_main(processes)
    assert (machine.memory, machine.host_memory, machine.processes_here, machine.nodes) == (7, 20, 2, (2, 1))


def test_nothing_fused_is_chosen_for_an_architecture_without_a_file(tmp_path: Path) -> None:
    run = resolved_for(any_config(tmp_path, "train.bf16=true"), toy("olmoe", num_experts=4), GPU)
    for key in ("fused_loss", "fused_experts", "compile"):
        assert getattr(run.config.train, key) is False
        assert "no family file for olmoe" in (run.reason(f"train.{key}") or "")
    assert run.config.train.fused_lora is True  # known layer by layer


def test_a_head_that_trains_keeps_its_own_loss(tmp_path: Path) -> None:
    run = resolved_for(any_config(tmp_path, "lora.modules_to_save=[lm_head]"), toy("llama"))
    assert run.config.train.fused_loss is False and run.reason("train.fused_loss") == "the head itself is trained"


@pytest.mark.parametrize("name", ["shardtune_varlen", "shardtune_whole_rows"])
def test_a_saved_config_that_names_our_attention_is_applied_again(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    from shardtune.model.families.registry import family_of
    from shardtune.model.meta_model import MetaModel
    from shardtune.model.weight_mapping import WeightMapping

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(toy_text_config("llama"), dtype=torch.bfloat16)
    run = resolved_for(any_config(tmp_path, f"model.attn_implementation={name}"), model, GPU)
    assert run.config.train.packing is (name == "shardtune_varlen")
    build_model(run, MetaModel(model, family_of(model), None, WeightMapping({})), NewTokens({}), torch.device("cpu"))
    assert model.config._attn_implementation == run.config.model.attn_implementation == name


@pytest.mark.parametrize(
    ("nodes", "memory", "asked"),
    [
        ((1,), 80, ["parallel.reshard_after_forward=true"]),
        ((2,), 80, ["parallel.reshard_after_forward=false", "guards.replica_check_steps=5"]),
        ((2,), 14, ["guards.replica_check_steps=5"]),  # too little for a replica on each
        ((4, 4), 24, ["parallel.reshard_after_forward=true"]),
        ((2,), 80, ["parallel.shard=hybrid"]),
        ((2,), 80, ["parallel.offload_params=true", "parallel.reshard_after_forward=false"]),
    ],
)
def test_a_runs_own_config_is_one_that_can_be_run_and_comes_to_the_same(
    resolved: Resolve, tmp_path: Path, nodes: tuple[int, ...], memory: int, asked: list[str]
) -> None:
    facts = replace(LLAMA, machine=Machine("cuda", memory * GIB, nodes[0], nodes))
    first = resolved(facts, *asked)
    file = tmp_path / "own.yaml"
    file.write_text(render_yaml(first.settings), encoding="utf-8")
    again = resolve(load_config(file, [], environ={}), facts)
    assert again.config.parallel == first.config.parallel
    assert again.config.guards == first.config.guards
