"""Which matrix products does the model compute? Hooks during the first micro-batch, removed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardtune.observe.flops import FlopFormula, Product, Scores, formula

_OUT_NAMES = ("o_proj", "dense", "out_proj")  # what attention modules call their last product
_VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
_SCALES = "_scale_inv"  # of float8 weights: how they are stored, no product


class FlopRecorder:
    """Watches a model through one forward and backward pass.

    Knows linear layers (also in float8), other modules with a matrix called `weight` (routers), fused 3-D experts,
    PEFT's adapters on all of them, and attention modules with a known head width. Works on a model sharded with FSDP2:
    while a layer runs, its weights are unsharded.

    Args:
        model: What the training loop calls, adapters on it.
        recomputed: Layers are computed again in the backward pass, in full. Only asked for where nothing can be
            watched. Layers that keep what is expensive say so themselves: their `recomputes_product` tells from the
            inner and outer width of a product whether it is made again.
    """

    def __init__(self, model: nn.Module, recomputed: bool = False) -> None:
        self.model, self._recomputed = model, recomputed
        self._hooks: list[RemovableHandle] = []
        self._products: list[Product] = []
        self._attention: list[Scores] = []
        self._head: Product | None = None
        self._tokens = 0
        self._forward_is_over = False
        self._makes_again = _selection(model)
        # Hooks would be compiled into the model, and taking them away would compile it again.
        self.watches = not any(_is_compiled(module) for module in model.modules())
        self._find()

    def _find(self) -> None:
        head = _output_layer(self.model)
        inside: set[int] = set()
        in_one: set[int] = set()  # parts of modules that compute them all in one operator
        self._hook(self.model.register_forward_pre_hook, self._on_begin, with_kwargs=True)
        self._hook(self.model.register_forward_hook, self._on_end)
        for module in self.model.modules():
            if id(module) in inside:
                continue
            if getattr(module, "calls_no_submodules", False):
                in_one |= {id(part) for part in module.modules()}
            if hasattr(module, "parameter_name") and hasattr(module, "lora_A"):  # PEFT's wrapper of a parameter
                inside |= {id(part) for part in module.modules()}
                self._take_wrapped(module)
            elif _fused(module):
                self._take_experts(module, module, {})
            elif (matrix := _matrix(module)) is not None:
                product = self._take_matrix(module, matrix, is_part=id(module) in in_one)
                if module is head or getattr(head, "base_layer", None) is module:
                    self._head = product
                    self._products.remove(product)
            if (scores := _scores(module)) is not None:
                self._take_attention(module, scores)

    def formula(self) -> FlopFormula | None:
        """None if nothing ran, or if there is no attention that can be counted."""
        if not self.watches:
            self._assume()
        if not self._tokens or not self._attention:
            return None
        return formula(self._tokens, self._products, self._head, self._attention)

    @property
    def is_complete(self) -> bool:
        """A forward pass is over, or nothing can be watched."""
        return self._forward_is_over or not self.watches

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, register: Callable[..., RemovableHandle], hook: Callable[..., None], **options: Any) -> None:
        if self.watches:
            self._hooks.append(register(hook, **options))

    def _on_begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._tokens = ids.numel() if isinstance(ids, Tensor) else 0

    def _on_end(self, *_: object) -> None:
        self._forward_is_over = True

    def _take_matrix(self, module: nn.Module, matrix: Tensor, *, is_part: bool) -> Product:
        width = int(getattr(module, "in_features", matrix.shape[-1]))
        kept = self._is_kept(width, matrix.numel() // width, is_part)
        product = Product(matrix.numel(), matrix.requires_grad, is_kept=kept)
        self._products.append(product)

        def ran(_: nn.Module, args: tuple[Any, ...], __: object) -> None:
            # After it, not before: recomputation stops within the last module of a layer, and does not finish it.
            if args and isinstance(args[0], Tensor):
                self._add(product, args[0].numel() / width, args[0].requires_grad)

        self._hook(module.register_forward_hook, ran)
        return product

    def _take_wrapped(self, outermost: nn.Module) -> None:
        """A nest of PEFT's wrappers, one for each adapted parameter of the module in its middle."""
        factors: dict[str, tuple[nn.Module, nn.Module]] = {}
        layer: Any = outermost
        while hasattr(layer, "parameter_name"):
            for name in layer.lora_A:
                factors[layer.parameter_name] = (layer.lora_A[name], layer.lora_B[name])
            layer = layer.base_layer
        self._take_experts(outermost, layer, factors)

    def _take_experts(
        self, called: nn.Module, holds: nn.Module, factors: dict[str, tuple[nn.Module, nn.Module]]
    ) -> None:
        """Weights of all experts, of which a token passes some; or one matrix that PEFT addresses by its name.

        Args:
            called: What the layer calls: the experts, or the outermost wrapper around them.
        """
        products: list[Product] = []
        upstream_trains = False
        for name, weight in _weights(holds):
            experts, behind = weight.shape[0] if weight.dim() == 3 else 1, "down" in name
            matrices = [weight, *(getattr(factor, "weight") for factor in factors.get(name, ()))]  # noqa: B009
            parts = [
                Product(
                    m.numel() / experts, m.requires_grad, experts, self._is_kept(inner, m.numel() // experts // inner)
                )
                for m, inner in zip(matrices, _inner_widths(matrices, experts), strict=True)
            ]
            for index, part in enumerate(parts):
                comes_out_of_a = index == 2 and parts[1].trains
                part.input_gradient = comes_out_of_a or (behind and upstream_trains)
            upstream_trains = upstream_trains or any(part.trains for part in parts)
            products += parts
        self._products += products

        def runs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            if not given or not isinstance(given[0], Tensor):
                return
            rows = given[0].numel() / given[0].shape[-1]
            for product in products:
                self._add(product, rows * _visited(given[1:], product.experts), given[0].requires_grad)

        # Before it: recomputation stops inside, behind the last product.
        self._hook(called.register_forward_pre_hook, runs, with_kwargs=True)

    def _take_attention(self, module: nn.Module, scores: Scores) -> None:
        self._attention.append(scores)

        def ran(*_: object) -> None:
            if not self._forward_is_over:
                scores.runs += 1
            elif self._makes_again is None:
                scores.runs_again += 1

        self._hook(module.register_forward_hook, ran)
        for name, child in module.named_children():
            letters = set(name.split("_")[0]) if "_" in name else set()
            if letters and letters <= {"q", "k", "v"}:
                self._hook(child.register_forward_hook, _note_gradient(scores, letters))

    def _add(self, product: Product, rows: float, needs_gradient: bool) -> None:
        if not self._forward_is_over:
            product.rows += rows
        elif not product.is_kept:
            product.rows_again += rows
        product.input_gradient = product.input_gradient or needs_gradient

    def _is_kept(self, inner: int, out: int, is_part: bool = False) -> bool:
        return self._makes_again is not None and (is_part or not self._makes_again(inner, out))

    def _assume(self) -> None:
        """A compiled model is not watched: every product once per token, and every input needs a gradient."""
        self._tokens = 1
        config = getattr(self.model, "config", None)
        visited = next((getattr(config, name) for name in _VISITED if getattr(config, name, None)), None)
        for product in self._products:
            product.rows = float(visited if visited and product.experts > 1 else product.experts)
            again = self._recomputed or (self._makes_again is not None and not product.is_kept)
            product.rows_again = product.rows if again else 0.0
            product.input_gradient = True
        if self._head is not None:
            self._head.rows, self._head.input_gradient = 1.0, True
        for scores in self._attention:
            scores.runs, scores.runs_again, scores.gradients = 1, int(self._recomputed), {"q", "k", "v"}


def _is_compiled(module: nn.Module) -> bool:
    """Or computes what its submodules hold without calling them, which comes to the same here."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_orig_mod")
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        or getattr(module, "calls_no_submodules", False)
    )


def _selection(model: nn.Module) -> Callable[[int, int], bool] | None:
    """Which products are made again, where layers are recomputed selectively."""
    asked = (getattr(module, "recomputes_product", None) for module in model.modules())
    return next((answer for answer in asked if answer is not None), None)


def _output_layer(model: nn.Module) -> nn.Module | None:
    base: Any = model
    if hasattr(model, "get_base_model"):  # PEFT's wrapper does not pass the question on
        base = cast(Any, model).get_base_model()
    return cast(nn.Module, base.get_output_embeddings()) if hasattr(base, "get_output_embeddings") else None


def _matrix(module: nn.Module) -> Tensor | None:
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding) else None


def _fused(module: nn.Module) -> bool:
    return not isinstance(module, nn.Conv1d) and any(_is_fused(*item) for item in module._parameters.items())


def _is_fused(name: str, weight: Tensor | None) -> bool:
    return weight is not None and weight.dim() == 3 and not name.endswith(_SCALES)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of fused experts in the order they are applied, or the one matrix of a module."""
    for name, weight in module._parameters.items():
        if weight is not None and (_is_fused(name, weight) or (name == "weight" and weight.dim() == 2)):
            yield name, weight


def _inner_widths(matrices: list[Tensor], experts: int) -> list[int]:
    """Of a weight, its A and its B (see PEFT: A holds the ranks of all experts in its rows, B in its columns)."""
    return [int(m.shape[-1]) // (experts if index == 2 else 1) for index, m in enumerate(matrices)]


def _visited(given: list[Any], experts: int) -> int:
    """How many experts a token visits: the width of the table of their numbers. All of them, if there is none."""
    if experts == 1:
        return 1
    tables = (x for x in given if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point())
    return next((min(table.shape[1], experts) for table in tables), experts)


def _scores(module: nn.Module) -> Scores | None:
    """An attention module says how wide its heads are and ends in a product that takes all of them."""
    width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    out = next((getattr(module, name) for name in _OUT_NAMES if hasattr(module, name)), None)
    if not isinstance(width, int) or not isinstance(getattr(out, "in_features", None), int):
        return None
    value_width = getattr(module, "v_head_dim", None) or width
    window = getattr(module, "sliding_window", None)
    if not hasattr(module, "sliding_window"):  # Mistral and its kin read it from the config in every forward pass
        window = getattr(getattr(module, "config", None), "sliding_window", None)
    heads = out.in_features // value_width  # type: ignore[union-attr]
    return Scores(heads, width, value_width, window if isinstance(window, int) else None)


def _note_gradient(scores: Scores, letters: set[str]) -> Callable[..., None]:
    def ran(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            scores.gradients |= letters

    return ran
