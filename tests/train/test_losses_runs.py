"""Every loss through whole runs: fused, eager, and plain transformers; the routers' part of it on by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from interrupted import run_on_ranks
from running import Command, events
from toys import mixtral_config, qwen3_moe_config, save_toy, toy_config

COEFFICIENT = 0.5  # large, so that nothing that leaves it out passes for rounding
OBJECTIVES = {
    "nll": ("mixtral", []),
    "dft": ("qwen3_moe", ["train.loss=dft"]),
    "smoothed": ("qwen3_moe", ["train.label_smoothing_factor=0.2"]),
}


def moe(kind: str, **changes: object) -> tuple[type, Any]:
    from transformers import MixtralForCausalLM, Qwen3MoeForCausalLM

    make, config = {"mixtral": (MixtralForCausalLM, mixtral_config), "qwen3_moe": (Qwen3MoeForCausalLM, qwen3_moe_config)}[kind]  # fmt: skip
    return make, config(router_aux_loss_coef=COEFFICIENT, **changes)


def summed_loss(objective: str, logits: torch.Tensor, labels: torch.Tensor) -> float:
    smoothing = 0.2 if objective == "smoothed" else 0.0
    each = torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=-100, reduction="none", label_smoothing=smoothing
    )
    return float((each * (-each).exp() if objective == "dft" else each).sum())


@pytest.fixture(scope="module", params=OBJECTIVES)
def runs(
    request: pytest.FixtureRequest,
    shared_environment: dict[str, str],
    toy_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """One micro-batch after the other on one process, or two at once on two: fused, and with its eager twin."""
    folder = tmp_path_factory.mktemp(request.param)
    kind, objective = OBJECTIVES[request.param]
    changes = {"mlp_only_layers": [0]} if kind == "qwen3_moe" else {}  # a layer without a router
    model = save_toy(*moe(kind, **changes), folder / "model")
    config = toy_config(
        folder, model, toy_data, data={"val_split": "validation"}, lora={"target_modules": "all-linear"},
        train={"max_steps": 3, "eval_steps": 3, "packing": False},
    )  # fmt: skip
    sessions = {
        nproc: [
            {"run_id": f"{kernels}-{nproc}",
             "overrides": [f"train.gradient_accumulation_steps={accumulation}", f"train.kernels={kernels}", *objective]}
            for kernels in ("auto", "eager")
        ]
        for nproc, accumulation in ((1, 2), (2, 1))
    }  # fmt: skip
    run_on_ranks(shared_environment, config, sessions)
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
    run, objective = runs / "runs" / "auto-1", runs.name.rstrip("0123456789")

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
        summed += summed_loss(objective, out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
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
        summed += summed_loss("nll", logits, labels[0, 1:])
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
