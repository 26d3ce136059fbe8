"""The routers' auxiliary loss: the fused path trains what its eager twin and plain transformers train."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import free_ports, on_ranks
from running import Command, events
from toys import mixtral_config, qwen3_moe_config, save_toy, toy_config, toy_text_config

from shardtune.data.collate import SUPERVISED, TARGETS
from shardtune.errors import UserInputError
from shardtune.train import router_loss
from shardtune.train.fused_loss import use_fused_loss

RESUME_WORKER = Path(__file__).parent / "resume_worker.py"
COEFFICIENT = 0.5  # large, so that nothing that leaves it out passes for rounding


def moe(kind: str, **changes: object) -> tuple[type, Any]:
    from transformers import MixtralForCausalLM, Qwen3MoeForCausalLM

    make, config = {"mixtral": (MixtralForCausalLM, mixtral_config), "qwen3_moe": (Qwen3MoeForCausalLM, qwen3_moe_config)}[kind]  # fmt: skip
    return make, config(router_aux_loss_coef=COEFFICIENT, **changes)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def runs(
    request: pytest.FixtureRequest,
    shared_environment: dict[str, str],
    toy_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """One micro-batch after the other on one process, or two at once on two: fused, and with its eager twin."""
    folder = tmp_path_factory.mktemp(request.param)
    changes = {"mlp_only_layers": [0]} if request.param == "qwen3_moe" else {}  # a layer without a router
    model = save_toy(*moe(request.param, **changes), folder / "model")
    config = toy_config(
        folder, model, toy_data, data={"val_split": "validation"}, lora={"target_modules": "all-linear"},
        train={"max_steps": 3, "eval_steps": 3, "packing": False},
    )  # fmt: skip
    for nproc, accumulation in ((1, 2), (2, 1)):
        sessions = [
            {"run_id": f"{kernels}-{nproc}",
             "overrides": [f"train.gradient_accumulation_steps={accumulation}", f"train.kernels={kernels}"]}
            for kernels in ("auto", "eager")
        ]  # fmt: skip
        ports = json.dumps(free_ports(len(sessions)))
        on_ranks(shared_environment, RESUME_WORKER, nproc, config, ports, json.dumps(sessions), timeout=300)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("other", ["eager-1", "auto-2", "eager-2"])
def test_fused_and_eager_train_the_same_on_one_and_two_processes(runs: Path, other: str) -> None:
    settled = yaml.safe_load((runs / "runs" / other / "config.yaml").read_text())
    assert settled["train"]["fused_loss"] is other.startswith("auto")
    for kind, number in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss")):
        meant, found = ([e[number] for e in events(runs / "runs" / name, kind)] for name in ("auto-1", other))
        assert found == pytest.approx(meant, rel=2e-5), (kind, number)


@pytest.mark.slow
def test_the_first_loss_and_the_validation_loss_are_those_of_plain_transformers(runs: Path, toy_data: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(runs / "model")
    run = runs / "runs" / "auto-1"

    def tokens(row: dict[str, str]) -> tuple[list[int], list[int]]:
        prompt = tokenizer(row["question"] + " =>")["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        return prompt + answer, [-100] * len(prompt) + answer

    model = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    rows = [json.loads(line) for line in (toy_data / "train.jsonl").read_text().splitlines()]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42)).tolist()
    summed, supervised, auxiliary = 0.0, 0, 0.0
    for micro in (order[:2], order[2:4]):
        pairs = [tokens(rows[i]) for i in micro]
        width = max(len(ids) for ids, _ in pairs)
        ids, labels, mask = (
            torch.tensor([one + [blank] * (width - len(one)) for one in part])
            for part, blank in zip((*zip(*pairs, strict=True), [[1] * len(i) for i, _ in pairs]), (0, -100, 0), strict=True)
        )  # fmt: skip
        with torch.no_grad():
            out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        summed += torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        ).item()
        supervised += int((labels != -100).sum())
        auxiliary += out.aux_loss.item() / 2
    assert auxiliary > 1  # the loss without it would be another
    assert events(run, "step")[0]["loss"] == pytest.approx(summed / supervised + COEFFICIENT * auxiliary, rel=1e-5)

    trained = PeftModel.from_pretrained(model, run / "final").eval()
    summed, supervised = 0.0, 0
    for row in map(json.loads, (toy_data / "validation.jsonl").read_text().splitlines()):
        ids, labels = (torch.tensor([one]) for one in tokens(row))
        with torch.no_grad():
            logits = trained(input_ids=ids).logits[0, :-1]
        summed += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        supervised += int((labels != -100).sum())
    assert events(run, "eval")[-1]["loss"] == pytest.approx(summed / supervised, rel=1e-5)


@pytest.mark.slow
def test_a_run_says_what_it_adds_and_it_can_be_left_out(shardtune: Command, toy_data: Path, tmp_path: Path) -> None:
    model = save_toy(*moe("mixtral"), tmp_path / "model")
    config = toy_config(tmp_path, model, toy_data, train={"max_steps": 1, "packing": False})
    losses = {}
    for given in (None, 0):
        override = () if given is None else ("-o", f"train.router_aux_loss_coef={given}")
        done = shardtune("train", config, "--run-id", f"run-{given}", *override)
        assert done.returncode == 0, done.stderr
        assert ("0.5 × the routers' auxiliary loss" in done.stdout) is (given is None)
        losses[given] = events(tmp_path / "runs" / f"run-{given}", "step")[0]["loss"]
    assert losses[None] - losses[0] > 0.4


@pytest.mark.parametrize("recomputed", ["no", "full", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_and_recomputed_layers_give_the_same_loss_and_gradients(
    recomputed: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardtune.model.experts import use_grouped_experts
    from shardtune.parallel.recompute import apply_selective_checkpointing
    from shardtune.parallel.shard import compile_layers

    monkeypatch.setattr(torch, "compile", lambda f: COMPILE(f, backend="aot_eager"))
    found = {}
    for fused in (False, True):
        torch.manual_seed(0)
        kind, config = moe("mixtral")
        model = kind(config).train()
        use_grouped_experts(model)
        ids = torch.arange(5, 45)[None]
        where = torch.arange(0, 39)
        if not fused:
            out = model(input_ids=ids, output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(out.logits[0, where], ids[0, where + 1], reduction="sum")
        else:
            use_fused_loss(model, causal=True, router_coefficient=1.0)
            layers = list(model.model.layers)
            if recomputed == "selective":
                apply_selective_checkpointing(layers)
            if compiled:
                compile_layers(layers)
            if recomputed == "full":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            batch = {SUPERVISED: where, TARGETS: ids[0, where + 1]}
            out = model(input_ids=ids, output_router_logits=True, use_cache=False, **batch)
            loss = out.loss
        (loss + 10 * out.aux_loss).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[fused] = (loss.item(), out.aux_loss.item(), gradients["model.layers.0.mlp.gate.weight"])
        # What a layer computes again for its backward pass must not be held until the next step.
        assert all(getattr(layer.mlp.gate, "kept_logits", None) is None for layer in model.model.layers)
    assert found[True][:2] == pytest.approx(found[False][:2], rel=1e-5)
    torch.testing.assert_close(found[True][2], found[False][2], rtol=1e-4, atol=1e-6)


COMPILE: Callable[..., Any] = torch.compile


def test_where_a_model_has_a_way_of_its_own_or_none_it_is_said() -> None:
    from transformers import AutoModelForCausalLM

    doge = AutoModelForCausalLM.from_config(toy_text_config("doge", num_experts=4, is_moe=True))
    assert "in a way of its own" in (router_loss.why_not(doge) or "")
    llama = AutoModelForCausalLM.from_config(toy_text_config("llama"))
    assert router_loss.coefficient(llama, None) == 0
    with pytest.raises(UserInputError, match="has no auxiliary loss"):
        router_loss.coefficient(llama, 0.1)
    mixtral = AutoModelForCausalLM.from_config(mixtral_config(router_aux_loss_coef=0.25))
    assert router_loss.coefficient(mixtral, None) == 0.25 and router_loss.coefficient(mixtral, 0.0) == 0
    assert router_loss.unused_notice(mixtral) is None and router_loss.unused_notice(llama) is None


def test_a_config_with_a_coefficient_is_no_auxiliary_loss_where_the_forward_computes_none() -> None:
    from transformers import Llama4ForCausalLM

    model = Llama4ForCausalLM(toy_text_config("llama4_text"))
    assert model.config.router_aux_loss_coef > 0
    assert model(torch.arange(5, 15)[None], output_router_logits=True).get("aux_loss") is None
    assert router_loss.coefficient(model, None) == router_loss.coefficient(model, 0.0) == 0
    assert "Llama4ForCausalLM computes no auxiliary loss" in (router_loss.unused_notice(model) or "")
    with pytest.raises(UserInputError, match="has no auxiliary loss"):
        router_loss.coefficient(model, 0.1)
