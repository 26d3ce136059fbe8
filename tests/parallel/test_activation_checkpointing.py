"""Selective recomputation: the same numbers as keeping everything, no expensive operator twice, less memory."""

from __future__ import annotations

import gc
import importlib
import pkgutil
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from expert_toys import EXPERT_PARAMETERS, fp8_and_its_twin
from functorch.compile import make_boxed_func
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from toys import toy_text_config
from transformers import AutoModelForCausalLM, DynamicCache, Mistral4ForCausalLM

import shardtune.kernels
from shardtune.adapters.experts import use_grouped_products
from shardtune.adapters.fused import use_fused_lora
from shardtune.kernels.operators import OWN_KEPT, OWN_RECOMPUTED, is_kept, is_low_rank
from shardtune.model.families.registry import families
from shardtune.parallel import activation_checkpointing
from shardtune.parallel.activation_checkpointing import apply_selective_checkpointing

WAYS = ("none", "selective", "full")
ATTENTION = {"llama": ["q_proj", "v_proj", "o_proj", "down_proj"], "mistral4": ["q_a_proj", "kv_b_proj", "o_proj"]}
CASES = ("llama", "llama with PEFT's own forward", "mistral4", "mistral4 in FP8")
TYPES = [name for family in families() if "selective" not in family.unsupported for name in family.model_types]


def drawn(kind: str, **changes: object) -> Any:
    torch.manual_seed(0)
    config = toy_text_config(kind, **changes)
    # AutoModelForCausalLM does not know it.
    return Mistral4ForCausalLM(config) if kind == "mistral4" else AutoModelForCausalLM.from_config(config)


def layers_of(model: PeftModel) -> list[nn.Module]:
    return list(model.get_base_model().model.layers)


def adapted(base: Any, kind: str, *, dropout: float, fused: bool = True) -> PeftModel:
    parameters = EXPERT_PARAMETERS if kind == "mistral4" else []
    lora = LoraConfig(
        r=4, target_modules=ATTENTION[kind], target_parameters=parameters, lora_dropout=dropout, init_lora_weights=False
    )
    torch.manual_seed(1)
    model = get_peft_model(base, lora)
    if parameters:
        use_grouped_products(model)
    if fused:
        use_fused_lora(model)
    return model.train()


def toy(case: str, way: str) -> PeftModel:
    kind, dropout = case.split()[0], 0.0 if "mistral4" in case else 0.25  # experts take no dropout
    base = fp8_and_its_twin(kind, torch.float32)[0] if "FP8" in case else drawn(kind, num_hidden_layers=3)
    model = adapted(base, kind, dropout=dropout, fused="own forward" not in case)
    return recomputing(model, way)


def recomputing(model: PeftModel, way: str) -> PeftModel:
    if way == "selective":
        apply_selective_checkpointing(layers_of(model))
    elif way == "full":
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    return model


def forward(model: PeftModel) -> Tensor:
    """The loss of two packed rows (positions that begin again keep documents apart), with the same dropout each time."""
    ids = torch.randint(3, 70, (2, 24), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    torch.manual_seed(3)
    loss: Tensor = model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
    return loss


def numbers(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = forward(model)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


class Watch(TorchDispatchMode):
    """Counts operators, and knows which storages they made are still alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.name().partition(".")[0]] += 1
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._weights:
                made = StorageWeakRef(tensor.untyped_storage())
                self._made[made.cdata] = (made, tensor.untyped_storage().nbytes())
        return out

    def held(self) -> int:
        gc.collect()
        return sum(size for made, size in self._made.values() if not made.expired())


@cache
def cost(case: str, way: str) -> tuple[Counter[str], Counter[str], int]:
    """Operators of the forward pass, those of the backward pass, and bytes held between them."""
    model = toy(case, way)
    with Watch(model) as there:
        loss = forward(model)
    held = there.held()
    with Watch(model) as back:
        loss.backward()
    return there.ran, back.ran, held


def expensive(ran: Counter[str]) -> Counter[str]:
    names = ("aten::mm", "aten::bmm", "aten::addmm", "aten::_grouped_mm", "aten::sort")
    return Counter(
        {n: c for n, c in ran.items() if n in (*names, *OWN_KEPT) or ("attention" in n and "backward" not in n)}
    )


@pytest.mark.parametrize("way", ["selective", "full"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_bit_for_bit_those_of_keeping_everything(case: str, way: str) -> None:
    assert same(numbers(toy(case, way)), numbers(toy(case, "none")))


@pytest.mark.parametrize("kind", [*TYPES, "qwen2"])
def test_every_architecture_that_is_not_refused_can_be_recomputed_selectively(kind: str) -> None:
    def model(way: str) -> PeftModel:
        # Where routers may divide by the sum of what they chose, they do so in place.
        base = drawn(kind, **({"norm_topk_prob": True} if kind == "qwen3_moe" else {}))
        peft = get_peft_model(
            base, LoraConfig(r=4, target_modules=["o_proj", "self_attn.out_proj", "dense"], lora_dropout=0.2)
        )
        torch.manual_seed(1)
        for parameter in (p for p in peft.parameters() if p.requires_grad):
            nn.init.normal_(parameter, std=0.1)
        return recomputing(peft.train(), way)

    assert same(numbers(model("selective")), numbers(model("none")))


@pytest.mark.parametrize("case", CASES)
def test_what_is_expensive_is_computed_once_and_what_is_cheap_again(case: str) -> None:
    first, kept, _ = cost(case, "none")
    _, selective, _ = cost(case, "selective")
    _, full, _ = cost(case, "full")
    again = expensive(selective) - expensive(kept)
    # Only products of low rank are made twice: (x Aᵀ) Bᵀ where it is not part of one operator.
    low_rank = {
        "llama": {},
        "llama with PEFT's own forward": {"aten::mm": 12},
        "mistral4": {"shardtune::grouped_linear": 6},
        "mistral4 in FP8": {"shardtune::grouped_linear": 4, "aten::mm": 6},
    }
    assert again <= Counter(low_rank[case])
    assert (expensive(full) - expensive(kept)).total() > 0.6 * expensive(first).total()
    assert selective["aten::rsqrt"] > kept["aten::rsqrt"] and selective["aten::silu"] > kept["aten::silu"]


@pytest.mark.parametrize("case", CASES)
def test_it_holds_less_than_keeping_everything_and_more_than_full(case: str) -> None:
    none, selective, full = (cost(case, way)[2] for way in WAYS)
    assert full < 0.75 * selective and selective < 0.8 * none


@pytest.mark.parametrize("without", ["evaluation", "no gradient"])
def test_where_no_gradient_is_wanted_nothing_is_checkpointed(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        activation_checkpointing, "checkpoint", lambda *args, **kwargs: calls.append(1) or checkpoint(*args, **kwargs)
    )
    model = toy("llama", "selective")
    if without == "evaluation":
        model.eval()
        forward(model)
    else:
        with torch.no_grad():
            forward(model)
    assert not calls
    forward(model.train())
    assert len(calls) == len(layers_of(model))


def test_a_cache_of_keys_is_not_written_twice() -> None:
    ids = torch.randint(3, 70, (1, 12), generator=torch.Generator().manual_seed(2))
    losses = []
    for way in ("none", "selective"):
        model = toy("llama", way)
        torch.manual_seed(3)
        kept = DynamicCache()
        loss = model(input_ids=ids, labels=ids, past_key_values=kept, use_cache=True).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses) and kept.get_seq_length() == 0


def test_a_kept_result_that_is_overwritten_is_refused_not_used() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.one(x).mul_(2.0)) * x

    layer = Overwrites()
    apply_selective_checkpointing([layer])
    with pytest.raises(RuntimeError, match="has been mutated"):
        layer(torch.randn(3, 8, requires_grad=True)).sum().backward()


def test_low_rank_is_next_to_the_width_it_is_spread_to() -> None:
    assert is_low_rank(16, 4096) and not is_low_rank(4096, 16) and not is_low_rank(4096, 14336)
    a, b = torch.empty(5, 16), torch.empty(16, 4096)
    assert not is_kept(torch.ops.aten.mm.default, (a, b)) and is_kept(torch.ops.aten.mm.default, (b, b.t()))
    assert not is_kept(torch.ops.aten.addmm.default, (torch.empty(4096), a, b))
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
    ):
        assert is_kept(getattr(torch.ops.aten, name).default)
    assert not is_kept(torch.ops.aten.silu.default) and not is_kept(torch.ops.aten.mul.Tensor)


def test_variable_length_attention_is_kept() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    assert is_kept(torch.ops.torch_attn._varlen_attn.default)


def test_every_operator_of_ours_is_either_kept_or_not() -> None:
    for module in pkgutil.iter_modules(shardtune.kernels.__path__):
        if not module.name.endswith(("_pass", "_passes")):  # Triton, which is where a GPU is; they make no operators
            importlib.import_module(f"shardtune.kernels.{module.name}")
    ours = {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("shardtune::")}
    assert ours == OWN_KEPT | OWN_RECOMPUTED and not OWN_KEPT & OWN_RECOMPUTED


# Compiled.


class Graphs:
    """A compiler that only looks at what it is to compile."""

    def __init__(self) -> None:
        self.forward: list[Any] = []
        self.backward: list[Any] = []
        self.backend = aot_autograd(
            fw_compiler=lambda graph, _: self._take(self.forward, graph),
            bw_compiler=lambda graph, _: self._take(self.backward, graph),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _take(self, place: list[Any], graph: Any) -> Any:
        place.append(graph)
        return make_boxed_func(graph.forward)

    def saved(self) -> int:
        """Bytes the last layer hands from forward to backward, views of its inputs left out."""
        (output,) = (node for node in self.forward[-1].graph.nodes if node.op == "output")
        kept = [n for n in output.args[0][1:] if n is not None and n.op != "placeholder"]
        values = [n.meta["val"] for n in kept if isinstance(n.meta.get("val"), Tensor)]
        return sum(
            v.numel() * v.element_size() for v in values if v.dim() != 3 or v.shape[0] != 4
        )  # 4 experts' weights

    def ran(self, graph: Any) -> Counter[str]:
        return Counter(
            n.target.name().partition(".")[0] for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
        )


def compiled(case: str, way: str) -> tuple[PeftModel, Graphs]:
    torch._dynamo.reset()
    counters.clear()
    graphs = Graphs()
    model = toy(case, way)
    if case == "mistral4":  # torch knows grouped products without a GPU in bfloat16 alone
        model = model.to(torch.bfloat16)
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, backend=graphs.backend, fullgraph=True)
    return model, graphs


@pytest.mark.parametrize("case", ["llama", pytest.param("mistral4", marks=pytest.mark.slow)])
def test_the_compiler_sees_what_is_kept(case: str, caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    for way in ("none", "selective"):
        model, graphs = compiled(case, way)
        found[way] = (numbers(model), graphs.saved(), graphs.ran(graphs.backward[-1]))
        assert counters["stats"]["unique_graphs"] == 2  # the first layer, and all others
        numbers(model)
        assert counters["stats"]["unique_graphs"] == 2
    (meant, all_of_it, once), (got, kept, again) = found["none"], found["selective"]
    assert same(got, meant)  # with dropout: the same numbers are drawn again
    assert kept < 0.9 * all_of_it
    assert (expensive(again) - expensive(once)).total() <= (2 if case == "mistral4" else 0)  # of low rank
    assert again["aten::rsqrt"] > once["aten::rsqrt"]
    # torch's warning for its own developers is not shown.
    assert not [record for record in caplog.records if "context_fn" in record.getMessage()]


def test_keywords_get_through_to_compiled_code() -> None:
    """As attention over flat rows gets them: a pair of tensors, bounds of documents, and a length that changes."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(
            self, x: Tensor, *, pair: tuple[Tensor, Tensor], bounds: Tensor, longest: int, **rest: Any
        ) -> Tensor:
            assert rest == {"word": None}
            return torch.sin(self.one(x) * pair[0] + pair[1]) * bounds.sum() / longest

    found = []
    for way in ("none", "selective"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer, x, pair = Takes(), torch.randn(3, 8), (torch.randn(8, requires_grad=True), torch.randn(8))
        if way == "selective":
            apply_selective_checkpointing([layer])
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        for longest in (5, 6, 7):
            layer(x, pair=pair, bounds=torch.tensor([0, longest]), longest=longest, word=None).sum().backward()
        found.append([pair[0].grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_code_for_evaluation_recomputes_nothing() -> None:
    model, graphs = compiled("llama", "selective")
    model.eval()
    with torch.no_grad():
        forward(model)
    assert graphs.forward and not graphs.backward
    assert not any("checkpoint" in str(node.target) for node in graphs.forward[-1].graph.nodes)


def test_compiled_code_that_writes_in_place_is_right() -> None:
    """torch warns of it; what our layers do (router weights, orders, dequantised blocks) has to come out right."""

    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(self.one(x)).mul_(3.0)
            z = torch.zeros_like(y)
            z[1:] = y[:-1]
            z[0].add_(self.two(x).mul_(2.0)[0])
            return self.two(torch.cos(z.div_(1.5))) * x

    x = torch.randn(3, 8)
    found = []
    for way in ("none", "selective"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = Overwrites()
        if way == "selective":
            apply_selective_checkpointing([layer])
        layer.forward = torch.compile(layer.forward, backend=Graphs().backend, fullgraph=True)
        own = x.clone().requires_grad_()
        layer(own).sum().backward()
        found.append([own.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_inductor_draws_the_same_dropout_again() -> None:
    found = []
    for way in ("none", "selective"):
        torch._dynamo.reset()
        model = toy("llama", way)
        for layer in layers_of(model):
            layer.forward = torch.compile(layer.forward)
        found.append(numbers(model))
    (loss, gradients), (own_loss, own) = found
    assert torch.allclose(loss, own_loss, rtol=1e-6)
    for name, gradient in gradients.items():
        assert (own[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
