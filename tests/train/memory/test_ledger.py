"""What was alive is counted where it is; the rest is told apart by when it came; the parts add up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from shardtune.adapters.initialization import init_adapters
from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection, ParallelSection
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import join
from shardtune.parallel.shard import shard_model
from shardtune.train.memory.allocator import Allocator, ran_out, wanted_in
from shardtune.train.memory.held import known_parts
from shardtune.train.memory.ledger import OPTIMIZER, Ledger

CPU = torch.device("cpu")
OTHER, ACTIVATIONS, LOSS = 1000, 70_000, 5_000


class Toy:
    """A sharded model and its optimizer; an allocator that has given out what they hold, and `extra` bytes."""

    def __init__(self, model: Any) -> None:
        self.model, self.extra = model, 0
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        self.ledger = Ledger(Allocator(CPU, self._allocated, lambda: 10**9, lambda: 77), CPU)
        self.ledger.watch(model)
        self.ledger.begin(self.optimizer)

    def _allocated(self) -> int:
        return sum(known_parts(self.model, self.optimizer, CPU).values()) + self.extra

    def forward(self, at_layer: Any = None) -> torch.Tensor:
        """As the loop does: what is alive grows in the layers (`ACTIVATIONS`), then in the loss (`LOSS`).

        `at_layer` is called at the end of each layer, while it is gathered.
        """
        self.extra = OTHER
        self.ledger.begin_step(5)

        def grow(module: Any, args: Any, output: Any) -> None:
            self.extra += ACTIVATIONS // 2
            if at_layer is not None:
                at_layer()

        hooks = [layer.mlp.register_forward_hook(grow) for layer in self.model.get_base_model().model.layers]
        ids = torch.arange(5, 25).view(1, 20)
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        for hook in hooks:
            hook.remove()
        self.extra += LOSS
        return loss


@pytest.fixture
def toy(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    # As with several ranks: one alone gathers nothing of what is frozen.
    monkeypatch.setattr("shardtune.parallel.shard._unsharded_params", lambda *_: None)
    model, *_ = add_lora(
        LlamaForCausalLM.from_pretrained(toy_model), LoraSection(target_modules="q_proj", lora_dropout=0)
    )
    init_adapters(model, 0)
    with join(ParallelSection(device="cpu")) as processes:
        shard_model(model, ParallelSection(device="cpu"), build_mesh(processes), None)
        yield Toy(model)


def sizes(model: Any, trained: bool) -> int:
    return sum(p.numel() * 4 for p in model.parameters() if p.requires_grad == trained)


def test_shards_gradients_and_optimizer_state_are_counted_where_they_are(toy: Toy) -> None:
    frozen, trained = sizes(toy.model, False), sizes(toy.model, True)
    before = known_parts(toy.model, toy.optimizer, CPU)
    rotary = sum(buffer.untyped_storage().nbytes() for buffer in toy.model.buffers())
    assert before["weights"] - frozen == pytest.approx(rotary, abs=rotary)
    assert {**before, "weights": 0} == {
        "weights": 0,
        "adapters": trained,
        "gradients": 0,
        "optimizer": 0,
        "gathered": 0,
    }
    toy.forward().backward()
    toy.optimizer.step()
    after = known_parts(toy.model, toy.optimizer, CPU)
    assert after["gradients"] == trained and after["gathered"] == 0
    assert 2 * trained < after["optimizer"] <= 2 * trained + 64  # and a step count for each tensor
    assert known_parts(toy.model, toy.optimizer, torch.device("meta")) == dict.fromkeys(after, 0)


def test_gathered_layers_are_seen_while_they_are_gathered(toy: Toy) -> None:
    seen: list[int] = []
    toy.forward(at_layer=lambda: seen.append(known_parts(toy.model, toy.optimizer, CPU)["gathered"]))
    layer = sum(p.numel() * 4 for p in toy.model.get_base_model().model.layers[0].parameters())
    root = sum(p.numel() * 4 for name, p in toy.model.named_parameters() if ".layers." not in name)
    assert root + layer <= seen[0] <= root + 2 * layer + 4096  # the next layer may be on its way
    assert sum(known_parts(toy.model, toy.optimizer, CPU).values()) < toy._allocated()


def test_a_failure_in_the_forward_pass_finds_activations(toy: Toy) -> None:
    noted: list[Any] = []
    toy.forward(at_layer=lambda: noted.append(toy.ledger.note(123)))
    first, second = noted
    assert (first.phase, first.step, first.wanted, first.free, first.capacity) == ("forward", 5, 123, 77, 10**9)
    assert first.held["activations"] == ACTIVATIONS // 2 and second.held["activations"] == ACTIVATIONS
    assert first.held["other"] == OTHER and first.held["loss"] == 0
    assert (first.layers_done, second.layers_done) == (0, 1)
    assert second.biggest in ("activations", "weights")


def test_a_failure_in_the_loss_finds_activations_and_loss(toy: Toy) -> None:
    toy.forward()
    noted = toy.ledger.note(1)
    assert noted.phase == "loss"
    assert (noted.held["activations"], noted.held["loss"], noted.held["other"]) == (ACTIVATIONS, LOSS, OTHER)
    assert sum(noted.held.values()) == toy._allocated()


def test_in_the_backward_pass_the_loss_is_there_until_the_last_layer_is_reached(toy: Toy) -> None:
    noted: list[Any] = []
    adapter = toy.model.get_base_model().model.layers[1].self_attn.q_proj.lora_B["default"]
    adapter.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda gradient: noted.append(toy.ledger.note(1))) and None
    )
    loss = toy.forward()
    toy.ledger.enter("backward")
    assert toy.ledger.note(1).held["loss"] == LOSS
    toy.extra -= LOSS
    loss.backward()
    (in_layers,) = noted
    assert in_layers.phase == "backward"
    assert (in_layers.held["loss"], in_layers.held["activations"]) == (0, ACTIVATIONS)
    assert sum(in_layers.held.values()) >= in_layers.held["activations"] + in_layers.held["weights"]


def test_what_comes_in_the_optimizer_is_the_optimizers(toy: Toy) -> None:
    toy.forward().backward()
    toy.ledger.enter(OPTIMIZER)
    toy.extra = OTHER + 400
    noted = toy.ledger.note(1)
    assert (noted.phase, noted.held["optimizer"], noted.held["activations"]) == ("optimizer", 400, 0)
    assert sum(noted.held.values()) == toy._allocated()


def test_the_shortage_is_found_behind_other_errors_and_its_size_in_the_message() -> None:
    text = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which"
    assert wanted_in(text) == 20 << 20 and wanted_in("no words about it") == 0
    shortage = torch.OutOfMemoryError(text)
    try:
        raise KeyError("while cleaning up") from shortage
    except KeyError as error:
        assert ran_out(error) is shortage
    assert ran_out(RuntimeError("CUDA error: out of memory")) is not None
    assert ran_out(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")) is not None
    assert ran_out(RuntimeError("shape mismatch")) is None and ran_out(None) is None
