"""A toy of any family twice: as a run computes it, and as plain transformers and PEFT do, document by document."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from toys import toy_text_config

from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection
from shardtune.data.collate import REAL_TOKENS, SUPERVISED, TARGETS, Collator
from shardtune.model.families.registry import families, family_for
from shardtune.train.losses import Loss, nll

Document = tuple[np.ndarray, np.ndarray]
Numbers = dict[str, torch.Tensor]
FUSED = Loss(nll.LOSS, router_coefficient=0.0, fused=True)
TYPES = [model_type for family in families() for model_type in family.model_types]


def toy(model_type: str, **changes: Any) -> transformers.PreTrainedModel:
    """A random model whose layers move the residual stream: with transformers' spread of 0.02 an error in them hides."""
    family = family_for(model_type)
    model_class = getattr(transformers, family.causal_lm[model_type]) if family else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    build = model_class._from_config if family else model_class.from_config
    model = build(toy_text_config(model_type, **changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn * parameter.shape[-1] ** -0.5)
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(drawn * 0.3)
        embeddings = model.get_input_embeddings().weight
        embeddings.copy_(torch.randn(embeddings.shape, generator=generator) * 0.5)
    model.config.use_cache = False
    return model.requires_grad_(False)


def adapted(model: transformers.PreTrainedModel, *, experts: bool = False, targets: Any = "all-linear") -> PeftModel:
    """LoRA as a run puts it on, with factors that do something."""
    section = LoraSection(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, experts=experts)
    peft, _, _ = add_lora(model, section)
    return move(peft)


def move(peft: PeftModel) -> PeftModel:
    """Away from where training begins, where an adapter does nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(drawn if "lora_A" in name or "lora_B" in name else parameter + drawn)
    return peft


def as_peft_computes(peft: PeftModel) -> PeftModel:
    """Our ways of computing adapters on parameters taken back: `W + B A` written out, by PEFT."""
    for module in peft.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = ParamWrapper
    return peft


def documents(seed: int = 0, longest: int = 17) -> list[Document]:
    """Four of them, longer than the toys' windows and chunks; the first tokens of each carry no loss."""
    rng = np.random.default_rng(seed)
    made = []
    for length in (longest, 11, 5, 13):
        ids = rng.integers(3, 72, length)
        made.append((ids, np.where(np.arange(length) < length // 3, -100, ids)))
    return made


def batch_of(layout: str, rows: list[list[Document]], device: str = "cpu", **settings: Any) -> dict[str, Any]:
    made = Collator(0, layout, **settings)(rows)  # type: ignore[arg-type]
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in made.items() if k != REAL_TOKENS}


def loss_from_logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Summed over supervised tokens."""
    given = {k: v for k, v in batch.items() if k not in ("labels", SUPERVISED, TARGETS)}
    logits = model(**given, use_cache=False).logits.float()
    labels = batch["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="sum")


def loss_and_gradients(model: Any, *batches: dict[str, Any], fused: bool = False) -> Numbers:
    """Of all batches together."""
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        loss = FUSED(model, batch).loss if fused else loss_from_logits(model, batch)
        loss.backward()
        total = total + loss.detach().cpu()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": total, **{n: p.grad.clone() if p.grad is not None else torch.zeros(1) for n, p in trained.items()}}


def one_by_one(model: Any, device: str = "cpu") -> Numbers:
    """The reference: every document in a row of its own, without padding."""
    return loss_and_gradients(model, *(batch_of("padded", [[one]], device) for one in documents()))


def differences(ours: Numbers, meant: Numbers, allowed: float = 2e-4) -> dict[str, float]:
    """Relative errors of the loss and of each gradient that are larger than rounding."""
    assert ours.keys() == meant.keys() and len(meant) > 4
    assert all(float(value.norm()) > 0 for value in meant.values())
    found = {name: ((ours[name] - meant[name]).norm() / meant[name].norm()).item() for name in meant}
    return {name: error for name, error in found.items() if not error <= allowed}


@contextmanager
def attention(model: transformers.PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def any_config(folder: Path, *overrides: str) -> Any:
    """A resolved config whose model and data nobody reads."""
    from shardtune.config import load_config

    file = folder / "run.yaml"
    file.write_text(
        "model: {model_name_or_path: toy, torch_dtype: float32}\ndata: {dataset_name_or_path: rows}\n"
        "lora: {r: 2, target_modules: all-linear}\n"
    )
    return load_config(file, list(overrides))
