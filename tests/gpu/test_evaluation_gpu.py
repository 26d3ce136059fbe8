"""An evaluation on a GPU finds what one on a CPU does: the loss of each row, and answers, alone and together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_inference_gpu import CASES, base, tuned_toy

from shardtune.data.tokens import IGNORED
from shardtune.evaluation.answers import greedy_answers
from shardtune.evaluation.likelihood import row_losses
from shardtune.inference.load import load_tuned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = (5, 17, 9, 30)


class Rows:
    lengths = np.array(LENGTHS)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.random.default_rng(number).integers(4, 72, size=LENGTHS[number]).astype(np.int32)
        return ids, np.where(np.arange(len(ids)) < 3, IGNORED, ids).astype(np.int32)


@pytest.mark.parametrize("kind", CASES)
def test_losses_and_answers_are_those_of_a_cpu(kind: str, tmp_path: Path) -> None:
    tuned = tuned_toy(kind, tmp_path)
    section = tuned.base.model_copy(update={"torch_dtype": "float32"})
    rows: Any = Rows()
    prompts = [rows.row(number)[0].tolist() for number in range(len(LENGTHS))]
    losses, answers = {}, {}
    for device in ("cpu", "cuda"):
        loaded = load_tuned(replace(tuned, base=section), torch.device(device))
        for side in (True, False):
            with loaded.side(tuned=side) as model:
                for tokens in (1, 4096):
                    found = row_losses(
                        model, rows, range(4), 0, vocabulary=72, batch_tokens=tokens, done=lambda done: None
                    )
                    losses[device, side, tokens] = found
                for size in (1, 4):
                    found_answers = greedy_answers(model, prompts, max_new_tokens=6, ends=[2], batch_size=size)
                    answers[device, side, size] = [answer.ids for answer in found_answers]
    for side in (True, False):
        wanted = losses["cpu", side, 1]
        for tokens in (1, 4096):
            np.testing.assert_allclose(losses["cuda", side, tokens], wanted, rtol=5e-3)  # TF32 in grouped products
        assert answers["cuda", side, 1] == answers["cuda", side, 4]
    assert np.abs(losses["cpu", True, 1] - losses["cpu", False, 1]).max() > 1e-2


def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtune.evaluation import answers, likelihood

    for module, name, wide in ((answers, "_batch", 1), (likelihood, "_batch_losses", 2)):
        real = getattr(module, name)

        def limited(model: Any, *given: Any, real: Any = real, wide: int = wide) -> Any:
            rows = len(given[0]) if wide == 1 else given[1]
            if rows > 1:
                torch.empty(1 << 45, dtype=torch.uint8, device="cuda")  # a real one
            return real(model, *given)

        monkeypatch.setattr(module, name, limited)
    folder = base("llama", tmp_path / "base")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    model.get_base_model = lambda: model
    rows: Any = Rows()
    found = row_losses(model, rows, range(4), 0, vocabulary=72, batch_tokens=4096, done=lambda done: None)
    assert np.isfinite(found).all() and (found > 0).all()
    prompts = [rows.row(number)[0].tolist() for number in range(len(LENGTHS))]
    assert len(greedy_answers(model, prompts, max_new_tokens=3, ends=[2], batch_size=4)) == 4
