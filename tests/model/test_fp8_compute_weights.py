"""Models held in FP8 that multiply their codes: losses and every adapter's gradient against the dequantised twin."""

from __future__ import annotations

import pytest
import torch
from expert_toys import distance, loss_and_gradients
from fp8_compute_toys import IDS, TARGETS, chosen_experts, held_toy, prepared

from shardtune.adapters.fused import FusedLoraLinear
from shardtune.model.quantized import Fp8Linear, enable_fp8_compute

pytestmark = pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TARGETS)
def test_loss_and_every_gradient_stay_near_the_dequantised_twin(kind: str, dtype: torch.dtype, fused: bool) -> None:
    results = []
    for codes_too in (True, False):
        model = prepared(kind, dtype, codes_too=codes_too, fused=fused)
        experts = chosen_experts(model)
        results.append((*loss_and_gradients(model, IDS), experts))
    (loss, gradients, experts), (twin_loss, twins, twin_experts) = results
    assert abs(loss - twin_loss) < 5e-2 * twin_loss
    assert set(gradients) == set(twins) and len(gradients) >= 16
    for name, gradient in twins.items():
        assert gradient.abs().max() > 0 and distance(gradients[name], gradient) < 5e-2, name
    assert max(distance(gradients[name], gradient) for name, gradient in twins.items()) > 1e-2  # it was rounded
    assert len(experts) == len(twin_experts) and all(map(torch.equal, experts, twin_experts))
    assert (len(experts) > 0) == (kind != "llama")


@pytest.mark.parametrize(
    ("kind", "backend", "codes_too"),
    [
        ("mistral4", "aot_eager", True),  # the heart: everything a llama has, and routed experts
        *(
            pytest.param(kind, backend, codes_too, marks=pytest.mark.slow)
            for kind in ("llama", "mistral4")
            for backend in ("aot_eager", "inductor")
            for codes_too in (True, False)
            if (kind, backend, codes_too) != ("mistral4", "aot_eager", True)
        ),
    ],
)
def test_compiled_layers_compute_the_same_and_are_compiled_once(kind: str, backend: str, codes_too: bool) -> None:
    torch._dynamo.utils.counters.clear()  # of the whole process
    dtype = torch.float32 if kind == "llama" else torch.bfloat16  # torch compiles grouped products of bfloat16 alone
    plain = prepared(kind, dtype, codes_too=codes_too)
    model = prepared(kind, dtype, codes_too=codes_too, compiled=backend)
    for step in range(3):  # other tokens go to other experts
        ids = IDS.roll(step, 0) + step
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            loss, gradients = loss_and_gradients(model, ids % 72)
        twin_loss, twins = loss_and_gradients(plain, ids % 72)
        assert abs(loss - twin_loss) < 1e-3
        for name, gradient in twins.items():
            assert distance(gradients[name], gradient) < (1e-2 if dtype == torch.float32 else 5e-2), name
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0


def test_layers_that_are_alike_are_compiled_once() -> None:
    model = prepared("mistral4", torch.bfloat16, codes_too=True)
    model.enable_input_require_grads()  # the first layer's input is like the others'
    torch._dynamo.reset()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    for layer in model.get_base_model().model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    model(input_ids=IDS, use_cache=False)
    assert len(graphs) == 1


def test_the_fused_operator_rounds_as_the_layer_alone_does() -> None:
    outputs = []
    for codes_too, fused in ((True, True), (True, False), (False, True)):
        model = prepared("llama", torch.float32, codes_too=codes_too, fused=fused)
        layer = model.get_base_model().model.layers[0].self_attn.q_proj
        outputs.append(layer(torch.linspace(-1, 1, 5 * 64).sin().view(5, 64)))
    assert torch.allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    assert distance(outputs[0], outputs[2]) > 1e-3


def test_a_step_of_training_leaves_every_code_and_scale_as_it_was() -> None:
    model = prepared("mistral4", torch.float32, codes_too=True)
    before = {n: p.detach().clone().view(torch.uint8) for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    first, _ = loss_and_gradients(model, IDS)
    optimizer.step()
    assert loss_and_gradients(model, IDS)[0] != first
    after = {n: p.detach().view(torch.uint8) for n, p in model.named_parameters() if not p.requires_grad}
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


def test_weights_with_finer_scales_are_counted_and_dequantised() -> None:
    model = held_toy("mistral4", torch.float32, fine=True)
    count, left = enable_fp8_compute(model)
    blocks = [block for module in model.modules() for block in getattr(module, "fp8_blocks", {}).values()]
    fine = blocks.count((12, 12))
    assert fine > 0 and left == {"scales for blocks of 12 × 12": fine}
    assert count == len(blocks) - fine
    assert torch.isfinite(model(input_ids=IDS, labels=IDS).loss)


def test_an_fp8_base_with_lora_takes_the_operator_and_still_switches_off() -> None:
    model = prepared("llama", torch.float32, codes_too=False)
    layers = [m for m in model.modules() if isinstance(m, FusedLoraLinear)]
    assert layers and all(isinstance(layer.base_layer, Fp8Linear) for layer in layers)
    bare = held_toy("llama", torch.float32)
    with torch.no_grad():
        with model.disable_adapter():
            assert torch.equal(model(IDS).logits, bare(IDS).logits)
        assert not torch.allclose(model(IDS).logits, bare(IDS).logits, atol=1e-2)
