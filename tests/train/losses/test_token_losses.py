"""What each loss means: both of its forms against the formula written out, and against TRL and transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor
from toys import toy_text_config, toy_tokenizer

from shardtune.config.schema import TrainSection
from shardtune.errors import UserInputError
from shardtune.kernels.cross_entropy import loss_and_gradient, loss_of_logits
from shardtune.model.families.registry import family_of
from shardtune.train.losses import build_loss
from shardtune.train.losses.loss import _token_loss

SETTINGS: dict[str, dict[str, object]] = {
    "nll": {},
    "dft": {"loss": "dft"},
    "smoothed": {"label_smoothing_factor": 0.3},
}


def written_out(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Token by token, in float64, from probabilities."""
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(logits.double(), labels.tolist(), strict=True):
        probabilities = row.softmax(dim=0)
        nll = -probabilities[label].log()
        if name == "smoothed":
            total = total + 0.7 * nll + 0.3 * -probabilities.log().mean()
        else:
            total = total + (nll * probabilities[label].item() if name == "dft" else nll)
    return total


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("name", SETTINGS)
def test_both_forms_give_the_loss_gradient_and_token_stats_of_the_formula(
    name: str, dtype: torch.dtype, allowed: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(20, 70, generator=generator) * 3).to(dtype)
    labels = torch.randint(70, (20,), generator=generator)
    labels[:5] = logits[:5].float().argmax(dim=-1)
    exact = logits.double().requires_grad_()
    meant = written_out(name, exact, labels)
    meant.backward()
    log_probs = logits.double().log_softmax(dim=-1)
    correct = float((logits.float().argmax(dim=-1) == labels).sum())
    stats = torch.tensor([-(log_probs.exp() * log_probs).sum(), correct]).float()

    token_loss = _token_loss(TrainSection(**SETTINGS[name]))  # type: ignore[arg-type]
    eager = logits.clone().requires_grad_()
    eager_loss, eager_stats = loss_of_logits(eager, labels, token_loss)
    eager_loss.backward()
    fused_loss, fused_stats, fused_gradient = loss_and_gradient(logits.clone(), labels, token_loss)
    for loss, token_stats, gradient in (
        (eager_loss, eager_stats, eager.grad),
        (fused_loss, fused_stats, fused_gradient),
    ):
        assert gradient is not None
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(meant.item(), rel=1e-5)
        torch.testing.assert_close(token_stats, stats, rtol=1e-5, atol=1e-5)
        assert gradient.dtype == dtype
        assert (gradient.double() - exact.grad).norm() / exact.grad.norm() < allowed


def test_smoothing_is_that_of_transformers_over_supervised_tokens() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 9, 30, generator=generator, requires_grad=True)
    labels = torch.randint(30, (2, 9), generator=generator)
    labels[0, :4] = labels[1, 7:] = -100
    (theirs,) = torch.autograd.grad(LabelSmoother(0.15)({"logits": logits}, labels, shift_labels=True), logits)
    where = (labels[:, 1:] != -100).nonzero(as_tuple=True)
    token_loss = _token_loss(TrainSection(label_smoothing_factor=0.15))
    summed, _ = loss_of_logits(logits[:, :-1][where], labels[:, 1:][where], token_loss)
    (ours,) = torch.autograd.grad(summed / len(where[0]), logits)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradients_of_a_model_are_those_of_trls_trainer(name: str, tmp_path: Path) -> None:
    from datasets import Dataset
    from support.twins import batch_of, documents
    from transformers import AutoTokenizer, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    batch = batch_of("padded", [[one] for one in documents()])
    supervised = len(batch["supervised"])
    toy_tokenizer(tmp_path / "tokenizer")
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = LlamaForCausalLM(toy_text_config("llama", initializer_range=0.3)).train()
        if ours:
            train = TrainSection(fused_loss=True, **SETTINGS[name])  # type: ignore[arg-type]
            model.lm_head.requires_grad_(False)
            loss = build_loss(train, model, family_of(model))(model, batch).loss / supervised
        else:
            settings = {"loss_type": "dft"} if name == "dft" else SETTINGS[name]
            trainer = SFTTrainer(
                model,
                SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
                          dataset_kwargs={"skip_prepare_dataset": True}, **settings),  # type: ignore[arg-type]
                train_dataset=Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[5, 6]]}),
                processing_class=AutoTokenizer.from_pretrained(tmp_path / "tokenizer"),
            )  # fmt: skip
            given = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
            loss = trainer.compute_loss(model, given, num_items_in_batch=torch.tensor(supervised))
        loss.backward()
        gradient = model.model.layers[0].self_attn.q_proj.weight.grad
        assert gradient is not None
        found.append(SimpleNamespace(loss=loss.item(), gradient=gradient))
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-5)
    torch.testing.assert_close(found[0].gradient, found[1].gradient, rtol=1e-4, atol=1e-7)


def test_every_name_in_the_config_has_its_file_and_a_smoothed_dft_is_refused() -> None:
    for name in get_args(TrainSection.model_fields["loss"].annotation):
        assert _token_loss(TrainSection(loss=name)).factor == 0.0
    with pytest.raises(UserInputError, match=r"label_smoothing_factor is 0\.1, but train\.loss is dft"):
        _token_loss(TrainSection(loss="dft", label_smoothing_factor=0.1))
