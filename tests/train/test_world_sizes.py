"""The same config on 1, 2 and 3 processes: same curve, really sharded, an adapter anybody can load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from running import Command, events
from toys import plain_eval_loss, toy_config

# (per-device batch, accumulation) that make 6 rows a step; 50 rows leave a last step of 2, fewer than there are ranks
SHAPES = {1: (2, 3), 2: (3, 1), 3: (1, 2)}


@pytest.fixture(scope="module")
def runs(
    shared_shardtune: Command, toy_model: Path, toy_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """One run per world size, everything else alike: two epochs with evaluation, checkpoints and the best at the end."""
    folder = tmp_path_factory.mktemp("worlds")
    config = toy_config(
        folder, toy_model, toy_data,
        data={"val_split": "validation"},
        train={
            "num_train_epochs": 2, "max_steps": -1, "eval_steps": 6, "save_strategy": "steps", "save_steps": 6,
            "save_total_limit": 2, "load_best_model_at_end": True, "gradient_checkpointing": True, "packing": False,
        },
    )  # fmt: skip
    for nproc, (batch, accumulation) in SHAPES.items():
        result = shared_shardtune(
            "train", config, "--nproc", nproc, "--run-id", f"world{nproc}",
            "-o", f"train.per_device_train_batch_size={batch}", "-o", f"train.gradient_accumulation_steps={accumulation}",
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
    return {nproc: folder / "runs" / f"world{nproc}" for nproc in SHAPES}


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("number", ["loss", "grad_norm", "learning_rate"])
def test_the_curve_does_not_depend_on_the_number_of_processes(runs: dict[int, Path], nproc: int, number: str) -> None:
    alone = [event[number] for event in events(runs[1], "step")]
    shared = [event[number] for event in events(runs[nproc], "step")]
    assert len(alone) == 18  # 2 epochs × ceil(50 / 6)
    assert shared == pytest.approx(alone, rel=2e-5)


@pytest.mark.parametrize("nproc", [2, 3])
def test_evaluation_does_not_depend_on_the_number_of_processes(runs: dict[int, Path], nproc: int) -> None:
    alone, shared = events(runs[1], "eval"), events(runs[nproc], "eval")
    assert [event["step"] for event in shared] == [6, 12, 18]
    assert [event["tokens"] for event in shared] == [event["tokens"] for event in alone]
    assert [event["loss"] for event in shared] == pytest.approx([event["loss"] for event in alone], rel=1e-5)


def test_the_curve_is_that_of_a_plain_loop_written_out_here(
    runs: dict[int, Path], toy_model: Path, toy_data: Path
) -> None:
    """Loss normalisation, checked against nothing but torch, transformers and peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardtune.adapters.initialization import init_adapters

    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    init_adapters(model, 42)
    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    rows = [json.loads(line) for line in (toy_data / "train.jsonl").read_text().splitlines()]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42)).tolist()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.01)
    steps = events(runs[3], "step")
    for number in range(9):
        optimizer.param_groups[0]["lr"] = steps[number]["learning_rate"]
        summed, tokens = torch.zeros(()), 0
        for row in (rows[i] for i in order[number * 6 : number * 6 + 6]):
            prompt = tokenizer(row["question"] + " =>")["input_ids"]
            answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            summed = summed + torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
            tokens += len(answer)
        loss = summed / tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
        optimizer.step()
        assert steps[number]["loss"] == pytest.approx(loss.item(), rel=2e-5)
        assert steps[number]["grad_norm"] == pytest.approx(norm.item(), rel=2e-4)


def test_every_rank_holds_its_share_and_no_more(runs: dict[int, Path]) -> None:
    for nproc, run in runs.items():
        shares = [events(run, "plan", rank)[0]["sharding"] for rank in range(nproc)]
        total = shares[0]["total_bytes"]
        assert sum(share["local_bytes"] for share in shares) == total
        # rows are dealt whole, so small tensors do not divide evenly
        assert max(share["local_bytes"] for share in shares) <= 1.1 * total / nproc


def test_the_final_adapter_scores_with_plain_peft_what_the_run_reported(
    runs: dict[int, Path], toy_model: Path, toy_data: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for run in runs.values():
        base = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, run / "final").eval()
        tokenizer = AutoTokenizer.from_pretrained(run / "final")
        best = min(event["loss"] for event in events(run, "eval"))
        assert plain_eval_loss(model, tokenizer, toy_data) == pytest.approx(best, rel=1e-5)
        assert best < events(run, "eval")[0]["loss"]  # it is not the first checkpoint, and something was learnt


def test_all_world_sizes_end_with_the_same_adapter(runs: dict[int, Path]) -> None:
    from safetensors.torch import load_file

    alone = load_file(runs[1] / "final" / "adapter_model.safetensors")
    for nproc in (2, 3):
        shared = load_file(runs[nproc] / "final" / "adapter_model.safetensors")
        assert shared.keys() == alone.keys()
        for name, tensor in alone.items():
            assert tensor.abs().max() > 0  # lora_B starts at zero: a slice that never trained would stay there
            assert (tensor.abs().sum(dim=1) > 0).all()
            torch.testing.assert_close(shared[name], tensor, rtol=1e-3, atol=2e-5)


def test_a_run_leaves_what_it_promises(runs: dict[int, Path]) -> None:
    run = runs[2]
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "environment.json", "events-rank0.jsonl", "events-rank1.jsonl", "checkpoints", "final",
        "run.json",
    }  # fmt: skip
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "best",
        "latest",
        "step-000012",
        "step-000018",
    ]
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        p.name for p in (run / "final").iterdir()
    }
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"].startswith("2.")
    assert events(run, "run_end")[0]["status"] == "done"


def test_the_written_config_is_the_resolved_one_and_trains_again(runs: dict[int, Path], shardtune: Command) -> None:
    path = runs[1] / "config.yaml"
    written = yaml.safe_load(path.read_text())
    assert written["parallel"]["nproc"] == 1 and written["train"]["eval_strategy"] == "steps"
    text = path.read_text()
    assert (
        "# auto: data.val_split is given" in text and "# override: -o parallel.nproc=1" in text and "# default" in text
    )
    result = shardtune("config", "validate", path)
    assert result.returncode == 0, result.stderr


def test_only_adapter_sized_files_are_written(runs: dict[int, Path], toy_model: Path) -> None:
    weights = (toy_model / "model.safetensors").stat().st_size
    written = [path for path in runs[3].rglob("*") if path.is_file() and path.suffix == ".safetensors"]
    assert written and all(path.stat().st_size < weights / 5 for path in written)


@pytest.mark.slow
def test_packed_rows_give_the_same_curve_on_one_and_two_processes(
    shardtune: Command, toy_model: Path, toy_data: Path, tmp_path: Path
) -> None:
    config = toy_config(
        tmp_path, toy_model, toy_data,
        data={"val_split": "validation", "max_length": 40},
        train={"num_train_epochs": 2, "max_steps": -1, "eval_strategy": "epoch", "packing": True},
    )  # fmt: skip
    for nproc, batch in ((1, 2), (2, 1)):
        result = shardtune(
            "train",
            config,
            "--nproc",
            nproc,
            "--run-id",
            f"world{nproc}",
            "-o",
            f"train.per_device_train_batch_size={batch}",
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "sequences of 40" in result.stdout
    alone, shared = (tmp_path / "runs" / f"world{nproc}" for nproc in (1, 2))
    for number in ("loss", "grad_norm", "tokens"):
        assert [e[number] for e in events(shared, "step")] == pytest.approx(
            [e[number] for e in events(alone, "step")], rel=2e-5
        )
    assert [e["loss"] for e in events(shared, "eval")] == pytest.approx(
        [e["loss"] for e in events(alone, "eval")], rel=1e-5
    )
    # every token of the data is trained on once per epoch, padding is not counted
    assert events(alone, "step")[-1]["tokens"] == 2 * events(alone, "data")[0]["train"]["tokens"]
