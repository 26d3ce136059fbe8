"""What does a decoder layer keep for its backward pass, and what does it need beside that? Read off its graphs.

One layer runs on the meta device: nothing is allocated or computed, and no GPU is needed. Compiled, it is split by
inductor's partitioner, and the two graphs are read: what passes from one to the other is kept; what is alive at each
kernel follows from their order, where intermediates that the compiler fuses away do not count. Uncompiled, every tensor
is counted while it is alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from shardtune.kernels import varlen
from shardtune.model.families.generic import decoder_of
from shardtune.parallel.activation_checkpointing import apply_selective_checkpointing
from shardtune.plan.activations import Mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = "shardtune_traced_rows"
_FUSIBLE = frozenset({torch.Tag.pointwise, torch.Tag.reduction})
# What inductor makes again wherever it is read.
_INLINED = ("_to_copy", "convert_element_type", "expand", "full", "iota", "arange", "scalar_tensor", "unsqueeze")


@dataclass(frozen=True)
class TensorSize:
    """Of one allocation."""

    numel: int
    itemsize: int


@dataclass(frozen=True)
class Moment:
    """An operator runs: the tensors that are alive then, and the frozen weight that it multiplies with (its numel)."""

    alive: tuple[TensorSize, ...]
    weight: int = 0


@dataclass(frozen=True)
class LayerTrace:
    """Of one layer and one micro-batch, without parameters and without what all layers share.

    Attributes:
        kept: Alive between the passes, the layer's input with it.
        moments: Of both passes, with what is kept as far as it is there (yet, or still).
    """

    kept: tuple[TensorSize, ...]
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class Kernels:
    """How the layer computes, beside what is in its modules already."""

    compiled: bool
    packed: bool
    mode: Mode


def trace_layer(model: PreTrainedModel, layer: nn.Module, kernels: Kernels, tokens: int) -> LayerTrace:
    """Run `layer` of a model on the meta device, with adapters, as it runs in training.

    Args:
        model: The base model with its adapters in place. Its other layers run too, uncompiled.
        layer: One of its decoder layers; its forward is replaced for good.
        tokens: Of the micro-batch, in one row.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:  # what FSDP2 hands to the layers
            parameter.data = parameter.data.to(model.dtype)
    AttentionInterface.register(ROWS, _rows_attention)
    varlen.register()
    model.set_attn_implementation(varlen.NAME if kernels.packed else ROWS)
    model.train(kernels.mode != "evaluation")
    if kernels.mode == "selective":
        apply_selective_checkpointing([layer])
    run = partial(_run, model, tokens, kernels.packed)
    with torch.set_grad_enabled(kernels.mode != "evaluation"):
        return _trace_compiled(layer, run) if kernels.compiled else trace_eager(layer, run)


def _trace_compiled(layer: nn.Module, run: Callable[[], Tensor]) -> LayerTrace:
    graphs = _Graphs()
    torch._dynamo.reset()  # limits on compiled versions are for models, not for us
    layer.forward = torch.compile(layer.forward, backend=graphs.backend, dynamic=False)
    run()
    return graphs.trace()


def trace_eager(module: nn.Module, run: Callable[[], Tensor]) -> LayerTrace:
    """Args: run: Calls the module, and returns what its backward pass starts from."""
    tracker = _LiveTensors(module)
    module.forward = tracker.around(module.forward)
    out = run()
    if not torch.is_grad_enabled():
        return LayerTrace((), tracker.moments())
    kept = tracker.kept()
    with tracker:
        out.backward(torch.empty_like(out))
    return LayerTrace(kept, tracker.moments())


def _run(model: PreTrainedModel, tokens: int, packed: bool) -> Tensor:
    decoder = decoder_of(model)
    hidden = torch.empty(1, tokens, model.config.hidden_size, dtype=model.dtype, device="meta", requires_grad=True)
    positions = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    documents: dict[str, Any] = {}
    if packed:
        bounds = torch.empty(3, dtype=torch.int32, device="meta")
        documents = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": tokens, "max_length_k": tokens}
    out: Tensor = decoder(inputs_embeds=hidden, position_ids=positions, use_cache=False, **documents).last_hidden_state
    return out


def _rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What flash attention keeps and returns. torch's own choice for the meta device would keep all scores."""
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = nn.functional.pad(value, (0, query.shape[-1] - width))
    out = _attention(query, key, value)[0]
    return out[..., :width].transpose(1, 2).contiguous(), None


@torch.library.custom_op("shardtune_trace::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("for the meta device")


@_attention.register_fake
def _attention_like(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("shardtune_trace::attention_backward", mutates_args=())
def _attention_back(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("for the meta device")


@_attention_back.register_fake
def _attention_back_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_for_attention(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradient_of_attention(ctx: Any, grad: Tensor, _of_lse: Tensor) -> tuple[Tensor, ...]:
    of_inputs: tuple[Tensor, ...] = _attention_back(grad, *ctx.saved_tensors)
    return of_inputs


_attention.register_autograd(_gradient_of_attention, setup_context=_save_for_attention)


class _Graphs:
    """A backend for torch.compile that keeps the graphs it is given."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.parts: tuple[fx.GraphModule, fx.GraphModule, int] | None = None
        self.whole: fx.GraphModule | None = None

    def backend(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        if self.inputs:
            raise ValueError("The layer has a graph break.")
        self.inputs = list(inputs)
        compiler = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=lambda graph, _: graph,
            partition_fn=self._partition,
            decompositions=select_decomp_table,
        )
        return compiler(module, inputs)

    def _forward(self, graph: fx.GraphModule, _inputs: Any) -> Any:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        self.whole = graph
        results = [node.meta["val"] if isinstance(node, fx.Node) else node for node in _outputs(graph.graph)]
        # Not the graph itself: the meta device has no random state to save.
        return make_boxed_func(lambda *_: [_like(one) if isinstance(one, Tensor) else one for one in results])

    def _partition(self, joint: fx.GraphModule, inputs: Any, **given: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        # Not through inductor's passes for whole graphs: one takes what is on the meta device for something unneeded.
        forward, backward = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **given)
        self.parts = forward, backward, given["num_fwd_outputs"]
        return forward, backward

    def trace(self) -> LayerTrace:
        if self.parts is None:  # without gradients
            assert self.whole is not None, "nothing was compiled"
            places = [node.name for node in self.whole.graph.nodes if node.op == "placeholder"]
            named = dict(zip(places, self.inputs, strict=True))
            return LayerTrace((), tuple(_Liveness(self.whole.graph, named).moments()))
        forward, backward, results = self.parts
        named = {f"primals_{number}": value for number, value in enumerate(self.inputs, 1)}
        first, second = _Liveness(forward.graph, named), _Liveness(backward.graph, named)
        kept = first.sizes_of(_outputs(forward.graph)[results:])
        return LayerTrace(kept, (*first.moments(), *second.moments(frees_inputs=True)))


class _Liveness:
    """Which allocations are alive at each kernel of a graph.

    Args:
        inputs: What the layer was called with, and its parameters, by the names of placeholders. What has no gradient
            is shared by all layers (positions, rotary tables, bounds of documents); others are the layer's own.
    """

    def __init__(self, graph: fx.Graph, inputs: Mapping[str, Any]) -> None:
        self.graph = graph
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        given = {node: inputs[node.name] for node in self.nodes if node.op == "placeholder" and node.name in inputs}
        tensors = {node: value for node, value in given.items() if isinstance(value, Tensor)}
        self.frozen = {node for node, v in tensors.items() if isinstance(v, nn.Parameter) and not v.requires_grad}
        others = {node for node, v in tensors.items() if isinstance(v, nn.Parameter) or not v.requires_grad}
        self.left_out = {key for node in others for key in _storages(node)}
        self.sizes: dict[StorageWeakRef, TensorSize] = {}
        for node in self.nodes:
            for value in _tensors(node):
                self.sizes.setdefault(_key(value), _size(value))
        # How many kernels that cannot be fused lie before a node.
        self.level: dict[fx.Node, int] = {}
        for node in self.nodes:
            before = max((self.level[one] for one in node.all_input_nodes), default=0)
            self.level[node] = before + _is_extern(node)
        self.written = {node for node in self.nodes if self._is_written(node)}
        # What each node really reads: through what is computed again where it is read.
        self.reads: dict[fx.Node, set[StorageWeakRef]] = {}
        for node in self.nodes:
            found: set[StorageWeakRef] = set()
            for one in node.all_input_nodes:
                found |= set(_storages(one)) if one in self.written else self.reads[one]
            self.reads[node] = found

    def _is_written(self, node: fx.Node) -> bool:
        """Is its result in memory? Elementwise ones are made where they are read, unless a kernel wants them there."""
        if node.op == "placeholder" or _is_extern(node) or torch.Tag.reduction in getattr(node.target, "tags", ()):
            return True
        return any(_forces(user) for user in node.users)

    def sizes_of(self, nodes: Iterable[Any]) -> tuple[TensorSize, ...]:
        keys = dict.fromkeys(key for node in nodes if isinstance(node, fx.Node) for key in _storages(node))
        return tuple(self.sizes[key] for key in keys if key not in self.left_out)

    def moments(self, *, frees_inputs: bool = False) -> Iterator[Moment]:
        """One for each kernel.

        Args:
            frees_inputs: What the graph is given dies with its last use, as what was kept does.
        """
        kernels = self._kernels()
        given = {key for node in self.nodes if node.op == "placeholder" for key in _storages(node)}
        stays = {key for node in _outputs(self.graph) if isinstance(node, fx.Node) for key in _storages(node)}
        stays |= set() if frees_inputs else given
        last: dict[StorageWeakRef, int] = {}
        for place, kernel in enumerate(kernels):
            for node in kernel:
                last |= dict.fromkeys((*self.reads[node], *_storages(node)), place)
        alive = set(given)
        for place, kernel in enumerate(kernels):
            dying = {key for key in alive if last.get(key, -1) <= place and key not in stays}
            born = {key for node in kernel for key in _storages(node)} - alive
            extra = Counter(self.sizes[key] for key in born)
            if not _is_extern(kernel[0]):  # written over what it is the last to read
                extra -= Counter(self.sizes[key] for key in dying)
            else:
                extra.update(
                    _workspace(
                        _name(kernel[0]), [_tensors(one)[0] for one in kernel[0].all_input_nodes if _tensors(one)]
                    )
                )
            there = [self.sizes[key] for key in alive if key not in self.left_out]
            yield Moment((*there, *extra.elements()), self._weight(kernel[0]))
            alive = (alive | born) - dying

    def _kernels(self) -> list[list[fx.Node]]:
        """What is written, kernel by kernel: fusible nodes that read the same and can run together do."""
        todo = [
            node for node in self.nodes if node.op != "placeholder" and node in self.written and not _is_alias(node)
        ]
        kernels: list[list[fx.Node]] = []
        ready = {key for node in self.nodes if node.op == "placeholder" for key in _storages(node)}
        while todo:
            first = todo[0]
            kernel = [first]
            if not _is_extern(first):
                kernel += [node for node in todo[1:] if self._fuses(first, node, ready)]
            kernels.append(kernel)
            ready |= {key for node in kernel for key in _storages(node)}
            todo = [node for node in todo if node not in kernel]
        return kernels

    def _fuses(self, first: fx.Node, other: fx.Node, ready: set[StorageWeakRef]) -> bool:
        reads = self.reads[other]
        own = set(_storages(first))
        return (
            not _is_extern(other)
            and self.level[other] == self.level[first]
            and bool(reads & (self.reads[first] | own))
            and reads <= ready | own
        )

    def _weight(self, node: fx.Node) -> int:
        """Numel of the largest frozen matrix that an operator multiplies with."""
        if not _is_extern(node):
            return 0
        sources = {_source(one) for one in node.all_input_nodes} & self.frozen
        return max((one.meta["val"].numel() for one in sources if one.meta["val"].dim() > 1), default=0)


def _forces(user: fx.Node) -> bool:
    if _is_alias(user):
        return any(_forces(one) for one in user.users)
    return user.op == "output" or _is_extern(user)


def _workspace(operator: str, args: Sequence[Any]) -> list[TensorSize]:
    """What a kernel of attention's backward pass allocates for itself: the queries' gradient in float32 (flash
    attention 2)."""
    if "attention_backward" not in operator and "attn_backward" not in operator:
        return []
    return [TensorSize(args[1].numel(), 4)]


def _size(value: Tensor) -> TensorSize:
    total = value.untyped_storage().nbytes()
    # A random state has no known size on the meta device, and no size to speak of.
    return TensorSize(total // value.itemsize if isinstance(total, int) else 0, value.itemsize)


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _outputs(graph: fx.Graph) -> Sequence[Any]:
    (node,) = (node for node in graph.nodes if node.op == "output")
    return tree_leaves(node.args[0])


def _tensors(node: fx.Node) -> list[Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def _storages(node: fx.Node) -> list[StorageWeakRef]:
    return [_key(value) for value in _tensors(node)]


def _key(value: Tensor) -> StorageWeakRef:
    return StorageWeakRef(value.untyped_storage())


def _is_alias(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is getattr:
        return False
    inputs = {key for one in node.all_input_nodes for key in _storages(one)}
    own = _storages(node)
    return bool(own) and all(key in inputs for key in own)


def _source(node: fx.Node) -> fx.Node:
    while _is_alias(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _is_extern(node: fx.Node) -> bool:
    """Does inductor call a kernel for it, instead of writing one together with its neighbours?"""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase) or _is_alias(node):
        return False
    tags = set(getattr(node.target, "tags", ()))
    if tags & _FUSIBLE or _is_inlined(node):
        return False
    return _name(node) in _CALLED or not _name(node).startswith(("aten.", "prims."))


def _is_inlined(node: fx.Node) -> bool:
    return any(part == _name(node).split(".")[1] for part in _INLINED) if "." in _name(node) else False


def _name(node: fx.Node) -> str:
    return str(node.target)


_CALLED_NAMES = (
    "mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "sort", "topk", "index_put",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward", "convolution",
    "_flash_attention_forward", "_flash_attention_backward", "searchsorted", "convolution_backward",
)  # fmt: skip
_CALLED = frozenset(f"aten.{name}.{kind}" for name in _CALLED_NAMES for kind in ("default", "stable", "Tensor"))


class _LiveTensors(TorchDispatchMode):
    """Counts the storages that are alive while a module runs uncompiled, forward and backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = {_key(p) for p in module.parameters()}
        self._frozen = {_key(p): p.numel() for p in module.parameters() if p.dim() > 1 and not p.requires_grad}
        self._alive: dict[StorageWeakRef, TensorSize] = {}
        self._moments: list[Moment] = []
        self._returned: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {_key(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and _key(value) not in self._parameters | read | self._alive.keys():
                self._watch(value)
        weight = max((self._frozen.get(key, 0) for key in read), default=0)
        self._moments.append(Moment((*self._alive.values(), *_workspace(str(func), args)), weight))
        return out

    def _watch(self, value: Tensor) -> None:
        storage, key = value.untyped_storage(), _key(value)
        self._alive[key] = _size(value)
        finalize(storage, self._alive.pop, key, None)

    def around(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The module's forward, counted; its input counts as its own."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._alive, self._moments = {}, []
            self._watch(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
            with self:
                result = own(*args, **kwargs)
            self._returned = {_key(value) for value in tree_leaves(result) if isinstance(value, Tensor)}
            return result

        return forward

    def kept(self) -> tuple[TensorSize, ...]:
        """What is alive now, with the pass over; what the module returned belongs to whoever reads it."""
        return tuple(size for key, size in self._alive.items() if key not in self._returned)

    def moments(self) -> tuple[Moment, ...]:
        return tuple(self._moments)
