"""The formula against torch's own counter, which sees every product as it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_toys import fp8_and_its_twin
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode
from toys import toy_text_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Mistral4ForCausalLM, MixtralForCausalLM

from shardtune.adapters.experts import use_grouped_products
from shardtune.adapters.fused import use_fused_lora
from shardtune.observe.batches import BatchCount, attended_pairs, count_batch
from shardtune.observe.chips import peak_tflops
from shardtune.observe.flop_recorder import FlopRecorder
from shardtune.observe.flops import Cost, FlopFormula
from shardtune.parallel.activation_checkpointing import apply_selective_checkpointing

CLASSES = {"llama": LlamaForCausalLM, "mistral4": Mistral4ForCausalLM, "mixtral": MixtralForCausalLM}
ROWS, LENGTH = 2, 40
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def toy(kind: str, **changes: object) -> Any:
    torch.manual_seed(0)
    # Eager attention is made of products the counter sees; it computes every pair of a row, causal or not.
    return CLASSES[kind](
        toy_text_config(kind, hidden_size=64, intermediate_size=96, attn_implementation="eager", **changes)
    )


def adapted(model: Any, modules: list[str], parameters: list[str] | None = None) -> PeftModel:
    config = LoraConfig(r=4, target_modules=modules, target_parameters=parameters or [], lora_dropout=0.0)
    peft = get_peft_model(model, config)
    if parameters:
        use_grouped_products(peft)
    return peft


def _by_experts(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """(n, k) with (E, m, k), or in backward (n, m) with it."""
    return 2 * rows[0] * weight[1] * weight[2]


def _for_experts(grad: tuple[int, ...], rows: tuple[int, ...], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """The weight's gradient, (n, m) with (n, k)."""
    return 2 * grad[0] * grad[1] * rows[1]


def _grouped(a: tuple[int, ...], b: tuple[int, ...], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """transformers' own experts: (n, k) with (E, k, m)."""
    return 2 * a[0] * a[1] * b[-1]


UNKNOWN_TO_TORCH = {
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.shardtune.grouped_linear: _by_experts,
    torch.ops.shardtune.grouped_linear_backward: _by_experts,
    torch.ops.shardtune.grouped_linear_weight_backward: _for_experts,
}


def watched(model: Any, **batch: Tensor) -> tuple[FlopFormula, int]:
    """The formula from one micro-batch, and what torch counted in it."""
    recorder = FlopRecorder(model)
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter:
        model(**batch, use_cache=False).loss.backward()
    recorder.close()
    found = recorder.formula()
    assert found is not None
    return found, counter.get_total_flops()


def as_eager_computes(formula: FlopFormula, tokens: int, pairs: int) -> float:
    """Like with like: logits for every token, attention over every pair of a row."""
    attention = sum(cost.executed for cost in formula.pairs.values()) * pairs
    return formula.token.executed * tokens + formula.head.executed * tokens + attention


CASES = [
    ("llama", ["q_proj", "v_proj"], None),
    ("llama", ["o_proj", "down_proj"], None),
    ("mistral4", ["q_a_proj", "kv_b_proj", "o_proj"], None),
    ("mistral4", ["o_proj"], EXPERTS),
    ("mixtral", ["q_proj", "k_proj"], EXPERTS[:1]),
    ("mixtral", ["v_proj"], EXPERTS),
]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(("kind", "modules", "parameters"), CASES)
def test_the_formula_agrees_with_torchs_counter(
    kind: str, modules: list[str], parameters: list[str] | None, checkpointing: str
) -> None:
    model = adapted(toy(kind), modules, parameters)
    if checkpointing == "selective":
        apply_selective_checkpointing(list(model.get_base_model().model.layers))
    if checkpointing == "full":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    ids = torch.randint(3, 70, (ROWS, LENGTH))
    formula, counted = watched(model, input_ids=ids, labels=ids.clone())
    assert as_eager_computes(formula, ROWS * LENGTH, ROWS * LENGTH**2) == pytest.approx(counted, rel=0.02)
    frozen = sum(p.numel() for n, p in model.named_parameters() if "layers" in n and not p.requires_grad)
    again = formula.token.again
    assert {"none": again == 0, "selective": again < 0.1 * frozen, "full": again > 0.5 * frozen}[checkpointing]


def test_packed_documents_cost_attention_within_themselves_alone() -> None:
    model = adapted(toy("llama"), ["q_proj", "k_proj", "v_proj"])
    ids = torch.randint(3, 70, (1, 60))
    lengths = [25, 20, 15]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    formula, counted = watched(model, input_ids=ids, labels=ids.clone(), position_ids=positions)
    # The mask hides other documents, but eager attention multiplies all 60 × 60 pairs.
    assert as_eager_computes(formula, 60, 60 * 60) == pytest.approx(counted, rel=0.02)
    batch = count_batch({"input_ids": ids, "labels": ids, "position_ids": positions})
    assert batch is not None and list(batch.lengths) == lengths
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    expected = formula.token.needed * 60 + formula.head.needed * 59 + formula.pairs[None].needed * pairs
    assert formula.needed(batch) == pytest.approx(expected)


def test_frozen_weights_cost_four_per_token_and_adapters_six() -> None:
    """In a layer above the first adapter: forward and the gradient of the input, and for adapters that of the weight."""
    one, two = (adapted(toy("llama", num_hidden_layers=n), ["q_proj"]) for n in (2, 3))
    ids = torch.randint(3, 70, (1, LENGTH))
    costs = [watched(model, input_ids=ids, labels=ids.clone())[0].token.needed for model in (one, two)]
    layer = two.get_base_model().model.layers[2]
    matrices = {name: p for name, p in layer.named_parameters() if p.dim() == 2}
    frozen = sum(p.numel() for p in matrices.values() if not p.requires_grad)
    trained = sum(p.numel() for p in matrices.values() if p.requires_grad)
    assert trained and costs[1] - costs[0] == pytest.approx(4 * frozen + 6 * trained)


def test_nothing_below_the_first_adapter_needs_a_gradient() -> None:
    low = adapted(toy("llama"), ["layers.0.self_attn.q_proj"])
    high = adapted(toy("llama"), ["layers.1.self_attn.q_proj"])
    ids = torch.randint(3, 70, (1, LENGTH))
    (of_low, counted_low), (of_high, counted_high) = (
        watched(m, input_ids=ids, labels=ids.clone()) for m in (low, high)
    )
    assert of_high.token.backward < of_low.token.backward and of_high.token.forward == of_low.token.forward
    assert counted_high < counted_low


def test_a_token_pays_for_the_experts_it_visits() -> None:
    ids = torch.randint(3, 70, (1, LENGTH))
    costs = []
    for visited in (1, 2):
        model = adapted(toy("mixtral", num_experts_per_tok=visited), ["q_proj"])
        costs.append(watched(model, input_ids=ids, labels=ids.clone())[0].token)
    layers, one_expert = 2, 64 * 2 * 96 + 96 * 64
    assert costs[1].forward - costs[0].forward == pytest.approx(2 * layers * one_expert)


def test_weights_held_in_float8_cost_what_their_twins_cost() -> None:
    ids = torch.randint(3, 70, (2, 20))
    forwards = []
    for model in fp8_and_its_twin("mistral4", torch.float32):
        peft = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"], lora_dropout=0.0))
        forwards.append(watched(peft, input_ids=ids, labels=ids.clone())[0].token)
    assert forwards[0] == forwards[1]


def test_a_sharded_model_costs_what_it_costs_whole() -> None:
    ids = torch.randint(3, 70, (1, LENGTH))
    models = [adapted(toy("mistral4"), ["o_proj"], EXPERTS) for _ in range(2)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in models[1].get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(models[1], mesh=mesh)
        assert any(isinstance(parameter, DTensor) for parameter in models[1].parameters())
        whole, sharded = (watched(model, input_ids=ids, labels=ids.clone())[0] for model in models)
    finally:
        dist.destroy_process_group()
    assert whole == sharded


def test_padding_and_recomputation_count_as_executed_only() -> None:
    formula = FlopFormula(Cost(2, 2, 1), Cost(20, 20, 0), {None: Cost(1, 2, 1)}, head_scores_all=True)
    batch = BatchCount((2, 10), supervised=5, real=14, lengths=(10, 4))
    pairs = 55 + 10
    assert formula.needed(batch) == 4 * 14 + 40 * 5 + 3 * pairs
    assert formula.executed(batch) == 5 * 20 + 40 * 20 + 4 * pairs


@pytest.mark.parametrize(
    ("lengths", "window", "pairs"), [((4,), None, 10), ((4, 2), None, 13), ((6,), 2, 11), ((3,), 9, 6)]
)
def test_pairs_are_counted_as_a_mask_shows_them(lengths: tuple[int, ...], window: int | None, pairs: int) -> None:
    seen = 0
    for length in lengths:
        i, j = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
        seen += int(((j <= i) & (i - j < (window or length))).sum())
    assert attended_pairs(lengths, window) == seen == pairs


def test_each_layer_has_its_own_window() -> None:
    config = toy_text_config(
        "gemma3_text",
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation="eager",
    )
    model = adapted(AutoModelForCausalLM.from_config(config), ["q_proj"])
    ids = torch.randint(3, 70, (1, LENGTH))
    assert set(watched(model, input_ids=ids, labels=ids.clone())[0].pairs) == {8, None}


def test_a_compiled_model_is_not_touched_and_still_counted() -> None:
    ids = torch.randint(3, 70, (1, LENGTH))
    for kind in ("llama", "mixtral"):
        model = adapted(toy(kind), ["q_proj", "k_proj", "v_proj"])
        plain = watched(model, input_ids=ids, labels=ids.clone())[0]
        for layer in model.get_base_model().model.layers:
            layer.compile()
        recorder = FlopRecorder(model)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assumed = recorder.formula()
        assert assumed is not None and assumed.token.forward == pytest.approx(plain.token.forward)
        assert assumed.token.backward > plain.token.backward  # also below the first adapter


@pytest.mark.parametrize("fused", [True, False])
def test_of_a_compiled_model_that_keeps_its_products_low_rank_alone_is_counted_again(fused: bool) -> None:
    model = adapted(toy("mixtral"), ["q_proj"], EXPERTS)
    layers = model.get_base_model().model.layers
    if fused:
        use_fused_lora(model)
    apply_selective_checkpointing(list(layers))
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
    found = FlopRecorder(model).formula()
    assert found is not None and all(cost.again == 0 for cost in found.pairs.values())
    rank, visited, outs = 4, 2, 2 * 96 + 64
    expected = 2 * len(layers) * rank * (visited * outs + (0 if fused else 64))
    assert found.token.again == pytest.approx(expected)


def test_no_hook_is_left_behind() -> None:
    model = adapted(toy("mistral4"), ["o_proj"], EXPERTS)
    before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    ids = torch.randint(3, 70, (1, LENGTH))
    watched(model, input_ids=ids, labels=ids.clone())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == before


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_chip_is_known_by_its_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
