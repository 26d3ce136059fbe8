"""What trains is proven in the first steps; whatever should not happen stops the run and is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from running import Command, events
from toys import mistral4_config, toy_config, toy_mistral4
from transformers import LlamaForCausalLM, Mistral4ForCausalLM

from shardtune.adapters.initialization import init_adapters
from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection, ParallelSection
from shardtune.errors import ShardtuneError
from shardtune.observe.events import EventLog
from shardtune.parallel.processes import join
from shardtune.train.proof import ProofOfTraining, checksum

B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"


@pytest.fixture
def llama(toy_model: Path) -> Any:
    model, *_ = add_lora(
        LlamaForCausalLM.from_pretrained(toy_model), LoraSection(target_modules="q_proj", lora_dropout=0)
    )
    init_adapters(model, 0)
    return model


class Loop:
    """A training loop that calls the proof as the training loop does."""

    def __init__(self, model: Any, folder: Path, *, lr: float = 1e-2) -> None:
        self.model, self.state = model, SimpleNamespace(global_step=0)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0)
        self.console = Console(record=True, width=200)
        self.folder = folder
        self.proof: ProofOfTraining

    def run(self, steps: int, before: Any = lambda step: None, after: Any = lambda step: None) -> str:
        with join(ParallelSection(device="cpu")) as processes:
            self.proof = ProofOfTraining(self.console, EventLog(self.folder, 0), processes)
            self.proof.begin(self.model, self.state.global_step + 1)
            try:
                for step in range(steps):
                    ids = torch.arange(5, 25).view(1, 20) + step
                    self.model(input_ids=ids, labels=ids).loss.backward()
                    before(step)
                    self.proof.before_optimizer(step + 1)
                    self.optimizer.step()
                    after(step)
                    self.proof.after_optimizer(step + 1, self.optimizer)
                    self.optimizer.zero_grad()
                    self.state.global_step += 1
                self.proof.end(self.state.global_step)
            except ShardtuneError as error:
                return error.what
        return self.console.export_text()


def test_b_and_then_a_are_proven_and_said_in_one_line(llama: Any, tmp_path: Path) -> None:
    told = Loop(llama, tmp_path).run(4)
    assert told.count("checked") == 1
    assert "4 of 4 adapter shards got a gradient and changed; none of 21 frozen shards did (steps 1–2, 1 rank)" in told
    assert events(tmp_path, "proof") == [
        {**events(tmp_path, "proof")[0], "ok": True, "proven": 4, "shards": 4, "frozen": 21, "step": 2, "unproven": []}
    ]


def test_an_adapter_cut_off_from_the_loss_is_named(llama: Any, tmp_path: Path) -> None:
    parameter = llama.get_parameter(B)

    def cut(step: int) -> None:
        parameter.grad = None

    assert f"'{B}' received no gradient in step 1 (rank 0)" in Loop(llama, tmp_path).run(2, before=cut)
    assert not events(tmp_path, "proof")[0]["ok"]


def test_a_gradient_of_zeros_is_named(llama: Any, tmp_path: Path) -> None:
    def zero(step: int) -> None:
        llama.get_parameter(B).grad.zero_()

    assert f"the gradient of '{B}' is zero everywhere in step 1" in Loop(llama, tmp_path).run(2, before=zero)


def test_an_a_that_stays_without_gradient_once_b_has_moved_is_named(llama: Any, tmp_path: Path) -> None:
    a = B.replace("lora_B", "lora_A")

    def zero(step: int) -> None:
        llama.get_parameter(a).grad.zero_()

    assert f"the gradient of '{a}' is zero everywhere in step 2" in Loop(llama, tmp_path).run(3, before=zero)


def test_an_adapter_the_optimizer_does_not_know_is_named(llama: Any, tmp_path: Path) -> None:
    loop = Loop(llama, tmp_path)
    loop.optimizer = torch.optim.AdamW([p for n, p in llama.named_parameters() if "lora_" in n and n != B], lr=1e-2)
    assert f"'{B}' received a gradient and did not change in step 1" in loop.run(2)


@pytest.mark.parametrize("when", [0, 1])
def test_a_frozen_weight_that_changes_is_named(llama: Any, tmp_path: Path, when: int) -> None:
    def spoil(step: int) -> None:
        if step == when:
            llama.get_parameter("base_model.model.model.norm.weight").data[3] += 1e-6

    told = Loop(llama, tmp_path).run(3, after=spoil)
    assert f"'base_model.model.model.norm.weight' is frozen, and was changed in step {when + 1}" in told


def test_a_warm_up_that_begins_at_zero_is_waited_for(llama: Any, tmp_path: Path) -> None:
    loop = Loop(llama, tmp_path, lr=0.0)

    def warm(step: int) -> None:
        loop.optimizer.param_groups[0]["lr"] = 1e-3 * step

    assert "4 of 4 adapter shards" in loop.run(4, before=warm)
    assert events(tmp_path, "proof")[0]["step"] == 3


def make_a_large(model: Any) -> None:
    """So that an update has to be of some size to move it."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_A." in name:
                weight.fill_(0.5)


def test_a_learning_rate_too_small_to_move_a_is_waited_out(llama: Any, tmp_path: Path) -> None:
    make_a_large(llama)
    loop = Loop(llama, tmp_path, lr=1e-9)

    def grow(step: int) -> None:
        loop.optimizer.param_groups[0]["lr"] = 1e-9 if step < 3 else 1e-3

    assert "4 of 4 adapter shards" in loop.run(6, before=grow)
    assert events(tmp_path, "proof")[0]["step"] == 4


def test_a_learning_rate_that_stays_too_small_is_said(llama: Any, tmp_path: Path) -> None:
    make_a_large(llama)
    told = Loop(llama, tmp_path, lr=1e-9).run(22)
    assert "2 of 4 adapter shards" in told and "an update too small to see" in told


@pytest.mark.parametrize(
    ("kind", "lr", "proven"), [(torch.optim.SGD, 1e-4, 2), (torch.optim.SGD, 10.0, 4), (torch.optim.Adadelta, 1e-3, 2)]
)
def test_an_update_of_another_optimizer_that_is_too_small_for_a_is_not_taken_for_a_fault(
    llama: Any, tmp_path: Path, kind: Any, lr: float, proven: int
) -> None:
    make_a_large(llama)
    loop = Loop(llama, tmp_path)
    loop.optimizer = kind([p for p in llama.parameters() if p.requires_grad], lr=lr)
    assert f"{proven} of 4 adapter shards" in loop.run(5)


def test_an_sgd_that_does_not_step_is_named(llama: Any, tmp_path: Path) -> None:
    loop = Loop(llama, tmp_path)
    loop.optimizer = torch.optim.SGD([p for p in llama.parameters() if p.requires_grad], lr=1.0)
    loop.optimizer.step = lambda: None  # type: ignore[assignment]
    assert "received a gradient and did not change in step 1" in loop.run(2)


def test_a_run_of_one_step_says_what_is_not_proven_yet(llama: Any, tmp_path: Path) -> None:
    told = Loop(llama, tmp_path).run(1)
    assert "2 of 4 adapter shards got a gradient" in told and "(step 1, 1 rank)" in told
    assert len(events(tmp_path, "proof")[0]["unproven"]) == 2


def test_experts_without_a_token_are_waited_for_and_then_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Mistral4ForCausalLM(mistral4_config())
    model, *_ = add_lora(base, LoraSection(target_modules=["experts", "attention"], lora_dropout=0))
    init_adapters(model, 0)

    def no_tokens(step: int) -> None:
        for name, parameter in model.named_parameters():
            if "layers.1.mlp.experts" in name and "lora_" in name:
                parameter.grad.zero_()

    told = Loop(model, tmp_path).run(21, before=no_tokens)
    assert "24 of 28 adapter shards" in told
    assert "the rest received no gradient yet" in told
    assert all("layers.1.mlp.experts" in name for name in events(tmp_path, "proof")[0]["unproven"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_checksum_sees_one_value_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(24, dtype=torch.float32).to(dtype)[1:]  # not where a 64-bit integer may begin
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    for place in (0, 5, 22):
        changed = tensor.clone()
        changed[place] = -1.0
        assert checksum(changed) != before


def test_changes_up_and_down_do_not_cancel_out_in_a_checksum() -> None:
    tensor = torch.full((8,), 0.75)
    before = checksum(tensor)
    tensor[1] += 2**-20
    tensor[5] -= 2**-20
    assert checksum(tensor) != before


@pytest.mark.slow
def test_a_sharded_run_proves_every_rank(
    shardtune: Command, toy_data: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    model = toy_mistral4(tmp_path / "model")
    lora = {"target_modules": ["attention", "mlp"], "experts": True}
    result = shardtune("train", toy_config(tmp_path, model, toy_data, lora=lora), "--nproc", 3)
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    proof = events(run, "proof")[0]
    assert (proof["ok"], proof["proven"]) == (True, proof["shards"])
    owned = sum(sum(numel > 0 for numel in _shards(shape)) for shape in _adapter_shapes(model, lora))
    assert proof["shards"] == owned  # of all three ranks


def _adapter_shapes(model: Path, lora: dict) -> list[torch.Size]:
    base = Mistral4ForCausalLM.from_pretrained(model)
    adapted, *_ = add_lora(base, LoraSection(**{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **lora}))
    return [p.shape for p in adapted.parameters() if p.requires_grad]


def _shards(shape: torch.Size) -> list[int]:
    step = -(-shape[0] // 3)
    return [max(0, min(shape[0], (rank + 1) * step) - rank * step) for rank in range(3)]
