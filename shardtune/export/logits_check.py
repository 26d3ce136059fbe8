"""Does the merged model do what adapter and base do? The difference to the base, of every layer and of the logits.

Logits alone would say little: those of merged model and base are nearly the same. What is compared is what the
fine-tuning changed. Everything computes in float32 on weights as they are written, a layer at a time, so that what
remains is the rounding of the changed weights, whose size is known (`survival`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.checkpoint.adapter import load_adapter
from shardtune.config.schema import ModelSection
from shardtune.errors import ShardtuneError
from shardtune.export.layerwise import LayerwiseModel
from shardtune.export.samples import Samples
from shardtune.export.survival import Survival, together
from shardtune.inference.load import MetaAdapter, build_adapted, zero_added_rows
from shardtune.inference.source import TunedModel
from shardtune.machine import free_memory
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers
from shardtune.terminal import count, percent

_SLACK = 1.2  # activations, buffers of readers
_PASSES = 3  # tuned, base, merged
_NOTHING = 1e-6  # of a token's output: what the adapter moves less than this, it does not move
# Of a layer (on the inputs it has with the adapter), and of the logits, where the errors of all layers meet.
_LAYER_BARS, _LOGIT_BARS = (0.02, 4.0), (0.05, 6.0)
_MOST_SHARE_ERROR = 0.2
# How exactly float32 computes an output: adapter and merged weights sum in another order. A change that is not much
# larger cannot be compared any better.
_EXACT = 1e-6


@dataclass(frozen=True)
class Agreement:
    """(merged − base) against (tuned − base), medians over tokens.

    Attributes:
        share: Projection of the one on the other: 1 if they are the same.
        error: Size of their difference relative to the second.
        size: Of the second, relative to the base's output.
        tokens: That the adapter moves at all.
    """

    share: float
    error: float
    size: float
    tokens: int


@dataclass(frozen=True)
class LogitsCheck:
    """What was found; None of `logits`: the adapter does not move them on these samples."""

    logits: Agreement | None
    layers: Mapping[str, Agreement]
    source: str


def describe_check(found: LogitsCheck) -> tuple[str, dict[str, Any]]:
    """For people, and the figures."""
    layers = [agreement.share for agreement in found.layers.values()]
    figures: dict[str, Any] = {"samples": found.source}
    if found.logits is None:
        text = "the adapter does not move the logits of the samples, and neither do the merged weights"
    else:
        text = (
            f"the merged model reproduces {percent(found.logits.share)} of the adapter's effect on the logits "
            f"(error {percent(found.logits.error)} of its size)"
        )
        figures |= {"logits_share": found.logits.share, "logits_error": found.logits.error}
    if layers:
        low, high = percent(min(layers)), percent(max(layers))
        between = low if low == high else f"{low} to {high}"
        text += f", in the output of each of {count(len(layers), 'layer')} {between}"
        figures |= {"layers": len(layers), "layers_share": [min(layers), max(layers)]}
    return f"{text}; medians over {found.source}", figures


@dataclass(frozen=True)
class _LayerPass:
    """What a layer was given and made of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@dataclass(frozen=True)
class _TunedPass:
    """What is kept of base and adapter.

    Attributes:
        folder: Of the base model's files.
        names: Of its layers.
        rows: Of the embedding, with those of new tokens.
        stored_rows: That the base has.
    """

    folder: Path
    names: tuple[str, ...]
    rows: int
    stored_rows: int
    logits: Tensor
    turns: list[_LayerPass]


class LogitsComparison:
    """Compares a merged checkpoint with the adapter and base it was made of.

    Args:
        rounded_to: By parameter, the dtype it is written in.
        survival: By changed parameter: how large the errors of rounding may be.
        progress: Gets the bytes of weights that have been computed with, and how many there will be.
    """

    def __init__(
        self,
        tuned: TunedModel,
        rounded_to: Mapping[str, torch.dtype],
        survival: Mapping[str, Survival],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        settings = {"torch_dtype": "float32", "base_precision": "bf16", "attn_implementation": "auto"}
        exact = tuned.base.model_copy(update=settings)
        self.tuned = replace(tuned, base=exact)
        self.rounded_to, self.survival, self.progress = rounded_to, survival, progress
        self._done = 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def needs(self) -> int:
        """Bytes of memory."""
        return round(self._layerwise(build_adapted(self.tuned, fp8=False)).nbytes * _SLACK)

    def free(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else free_memory()

    def check(self, merged: Path, samples: Samples) -> LogitsCheck:
        """Raises:
        ShardtuneError: the merged model is not what adapter and base are.
        """
        # Each pass forgets its model: embedding and head of three would be in memory at the end.
        tuned = self._tuned_pass(samples)
        base_logits, base_outputs = self._replay(tuned.folder, self.tuned.base, tuned, tuned.stored_rows, samples)
        section = self.tuned.base.model_copy(update={"model_name_or_path": str(merged), "revision": None})
        merged_logits, merged_outputs = self._replay(merged, section, tuned, tuned.rows, samples)
        layers = {}
        for name, turn, before, after in zip(tuned.names, tuned.turns, base_outputs, merged_outputs, strict=True):
            found = _agreement(before, turn.output, after, samples.real)
            self._judge_layer(name, found, before, after, samples.real)
            if found is not None:
                layers[name] = found
        logits = _agreement(base_logits, tuned.logits, merged_logits, samples.real)
        if logits is not None:
            self._judge("the logits", logits, dict(self.survival), _LOGIT_BARS)
        return LogitsCheck(logits, layers, samples.source)

    def _layerwise(self, adapted: MetaAdapter) -> LayerwiseModel:
        meta = adapted.meta_model
        return LayerwiseModel(adapted.model, meta.model, meta.mapping, self.device, self.rounded_to)

    def _tuned_pass(self, samples: Samples) -> _TunedPass:
        adapted = build_adapted(self.tuned, fp8=False)
        model = self._layerwise(adapted)
        turns: list[_LayerPass] = []

        def record(number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            turns.append(_LayerPass(args, kwargs, _first(output).clone()))
            self._report(number, model)

        model.load()
        zero_added_rows(adapted.meta_model.model, adapted.stored_rows)
        load_adapter(adapted.model, adapted.tensors)
        rows = len(adapted.meta_model.model.get_input_embeddings().weight)  # type: ignore[arg-type]
        return _TunedPass(
            folder=adapted.folder,
            names=tuple(name for name, _ in model.layers),
            rows=rows,
            stored_rows=adapted.stored_rows,
            logits=model.logits(samples.ids, record),
            turns=turns,
        )

    def _replay(
        self, folder: Path, section: ModelSection, tuned: _TunedPass, stored_rows: int, samples: Samples
    ) -> tuple[Tensor, list[Tensor]]:
        """Another model's logits, and what its layers make of the inputs that they have with the adapter."""
        meta = build_meta_model(section, folder, read_headers(folder))
        if tuned.rows > stored_rows:
            meta.model.resize_token_embeddings(tuned.rows, mean_resizing=False)
        outputs: list[Tensor] = []

        def replay(number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            turn = tuned.turns[number]
            outputs.append(_first(layer.forward(*turn.args, **turn.kwargs)).clone())
            self._report(number, model)

        model = LayerwiseModel(meta.model, meta.model, meta.mapping, self.device, self.rounded_to)
        model.load()
        zero_added_rows(meta.model, stored_rows)
        return model.logits(samples.ids, replay), outputs

    def _report(self, number: int, model: LayerwiseModel) -> None:
        self._done += model.layer_bytes[number]
        self.progress(self._done, _PASSES * sum(model.layer_bytes))

    def _judge_layer(self, name: str, found: Agreement | None, before: Tensor, after: Tensor, real: Tensor) -> None:
        own = {parameter: part for parameter, part in self.survival.items() if parameter.startswith(f"{name}.")}
        if found is not None:
            self._judge(f"layer {name}", found, own, _LAYER_BARS)
            return
        moved = (after - before)[real.to(after.device)]
        if moved.norm() > 1e-5 * before.norm():
            raise _differs(f"layer {name}", "The adapter does not change what it computes, and the merged weights do.")

    def _judge(self, what: str, found: Agreement, parts: dict[str, Survival], bars: tuple[float, float]) -> None:
        floor, factor = bars
        shares = [part.share for part in parts.values() if part.delta] or [1.0]
        noise = together(parts).noise + _EXACT / found.size
        slack = floor + min(_MOST_SHARE_ERROR, noise)
        low, high = min(shares) - slack, max(shares) + slack
        most = floor + factor * noise
        if not (low <= found.share <= high) or not found.error <= most:
            raise _differs(
                what,
                f"Of the change that adapter and base make, the merged model makes {percent(found.share)} "
                f"(expected {low:.2f} to {high:.2f}), with an error of {percent(found.error)} of its size "
                f"(at most {percent(most)}, by the rounding of its weights).",
            )


def _differs(what: str, why: str) -> ShardtuneError:
    return ShardtuneError(
        f"The merged model does not do what adapter and base do: {what} differs.",
        why=why,
        fix="Nothing was published. Please report this with the model's name; the adapter itself can be served.",
    )


def _agreement(base: Tensor, tuned: Tensor, merged: Tensor, real: Tensor) -> Agreement | None:
    """Medians over tokens: a token that another expert takes after rounding says nothing about the others."""
    keep = real.to(base.device)
    change, made = (tuned - base)[keep].float(), (merged - base)[keep].float()
    size, whole = change.norm(dim=-1), base[keep].float().norm(dim=-1)
    moved = size > _NOTHING * whole
    if not bool(moved.any()):
        return None
    change, made, size, whole = change[moved], made[moved], size[moved], whole[moved]
    share = (made * change).sum(-1) / size.square()
    error = (made - change).norm(dim=-1) / size
    relative = size / whole.clamp(min=torch.finfo(whole.dtype).tiny)
    return Agreement(float(share.median()), float(error.median()), float(relative.median()), int(moved.sum()))


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
