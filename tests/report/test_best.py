"""The best checkpoint follows from evaluations that count and weights that are there; what is not known is not claimed."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from fake_run import FakeRun
from rich.console import Console
from safetensors.numpy import save_file

from shardtune.checkpoint.final import FINAL, FinalSource, write_source
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import UserInputError
from shardtune.report.best import METRICS, Best, best_of, metric_named
from shardtune.report.best_text import as_json, curve, final_line, lines, noise_line, show
from shardtune.report.history import RunHistory

WEIGHTS = "adapter_model.safetensors"
TOKENS = [100, 90, 110, 100]
HARD = [0.3, -0.2, 0.1, -0.21]  # how much harder than the mean each group is


class Evaluated(FakeRun):
    """A run of two ranks with evaluations and checkpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begin()
        self.store = CheckpointStore(folder / "checkpoints", keep=None)

    def evaluate(
        self, step: int, loss: float, *, wobble: Sequence[float] = (0, 0, 0, 0), saved: bool = True,
        train: float | None = None, **more: object,
    ) -> None:  # fmt: skip
        """`wobble`: by how much the loss of each group lies off what it would be at any other step."""
        if train is not None:
            self.everywhere("step", step=step, loss=train)
        losses = [loss + hard + own for hard, own in zip(HARD, wobble, strict=True)]
        accuracy = [0.5 - 0.1 * value for value in losses]
        groups = {"tokens": TOKENS, "loss": losses, "token_accuracy": accuracy}
        self.everywhere("eval", step=step, loss=loss, tokens=400, **{"groups": groups, "token_accuracy": 0.5} | more)
        if saved:
            self.save(step, loss)

    def save(self, step: int, loss: float) -> None:
        path = self.store.write(step, lambda folder: fill(folder, step), {"eval_loss": loss})
        self.write("checkpoint", step=step, path=str(path), bytes=1, seconds=0.1, background_seconds=0.1)

    def best(self, metric: str = "loss", **options: bool) -> Best:
        history = RunHistory(self.folder, lowest_rank_alone=True)
        history.update()
        return best_of(history, metric_named(metric), **options)


def fill(folder: Path, step: int) -> None:
    save_file({"lora_A": np.array([step])}, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text("{}")


def texts(best: Best) -> dict[str, str]:
    return dict(lines(best))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return Evaluated(tmp_path / "run")


def test_it_is_the_lowest_loss_and_its_folder_is_named(run: Evaluated) -> None:
    for step, loss in ((10, 2.0), (20, 1.5), (30, 1.7)):
        run.evaluate(step, loss)
    best = run.best()
    assert best.chosen is not None and best.chosen.step == 20
    assert best.path == run.store.path(20)
    assert texts(best)["why"] == "the lowest eval loss of 3 evaluations whose weights are there; every checksum matches"


def test_steps_that_cannot_be_told_apart_from_it_are_ties_and_the_earliest_can_be_asked_for(run: Evaluated) -> None:
    run.evaluate(10, 2.0)
    run.evaluate(20, 1.51, wobble=(0.1, -0.1, 0.1, -0.1))
    run.evaluate(30, 1.5)
    run.evaluate(40, 1.505, wobble=(0.1, 0.1, -0.1, -0.1))
    run.evaluate(50, 1.6)
    best = run.best()
    assert best.chosen is not None and best.chosen.step == 30
    assert [tie.step for tie in best.ties] == [20, 40]
    assert texts(best)["ties"] == "the evaluation cannot tell step 30 apart from 20, 40; --earliest-tie takes step 20"
    earliest = run.best(earliest_tie=True)
    assert earliest.chosen is not None and earliest.chosen.step == 20 and earliest.is_tie
    assert [tie.step for tie in earliest.ties] == [20, 40], "compared with the best still, not with the tie"
    assert texts(earliest)["why"].startswith("the earliest that cannot be told apart from step 30, the lowest")


def test_a_lower_loss_that_was_not_saved_is_told_with_what_to_change(run: Evaluated) -> None:
    run.evaluate(10, 1.6)
    run.evaluate(15, 1.5, saved=False)
    run.evaluate(20, 1.7)
    best = run.best()
    assert best.chosen is not None and (best.chosen.step, best.lowest.step) == (10, 15)
    assert texts(best)["unsaved"] == (
        "Step 15 was better by 0.1000, more than the noise, and its checkpoint was not saved. Set train.save_steps equal "
        "to train.eval_steps, so that every evaluated step is saved."
    )
    assert run.best("token_accuracy").chosen is not None


def test_one_that_was_deleted_is_told_apart_from_one_that_was_never_saved(run: Evaluated) -> None:
    run.evaluate(10, 1.5)
    run.evaluate(20, 1.7)
    run.store.path(10).rename(run.folder / "elsewhere")
    best = run.best()
    assert best.chosen is not None and best.chosen.step == 20
    assert "was deleted" in texts(best)["unsaved"] and "save_total_limit" in texts(best)["unsaved"]


def test_a_damaged_checkpoint_is_left_out_with_a_warning_and_the_next_best_is_taken(run: Evaluated) -> None:
    for step, loss in ((10, 1.7), (20, 1.5)):
        run.evaluate(step, loss)
    fill(run.store.path(20), 99)
    best = run.best()
    assert best.chosen is not None and best.chosen.step == 10
    assert "step-000020: adapter_model.safetensors: changed" in texts(best)["warning"]
    assert [one.weights for one in best.evaluations] == ["checkpoint", "damaged"]
    assert "unsaved" not in texts(best)


def test_evaluations_that_a_resumed_run_or_a_rollback_undid_do_not_count(run: Evaluated) -> None:
    run.evaluate(10, 1.8)
    run.evaluate(20, 1.0, saved=False)
    run.everywhere("run_start", run="run", world_size=2, environment={})
    run.everywhere("resume", step=10, path="x", world_size=2, random_state="restored", changes=[], damaged=[])
    run.evaluate(20, 1.9)
    run.evaluate(30, 0.5, saved=False)
    run.write("guard", guard="nan", step=31, action="rollback", text="back", to_step=20)
    best = run.best()
    assert [(one.step, one.value) for one in best.evaluations] == [(10, 1.8), (20, 1.9)]


def test_overfitting_begins_where_every_later_evaluation_is_worse_beyond_the_noise(run: Evaluated) -> None:
    for step, loss, train in ((10, 2.0, 2.0), (20, 1.5, 1.4), (30, 1.501, 1.2), (40, 1.6, 1.0), (50, 1.8, 0.8)):
        run.evaluate(step, loss, train=train, wobble=(0.1, -0.1, 0, 0) if step == 30 else (0, 0, 0, 0))
    found = run.best().overfitting
    assert found is not None
    assert (found.onset, found.evaluations, found.train_before) == (40, 2, 1.4)
    assert found.train_after == pytest.approx(0.9)
    assert "from step 40 on: 2 evaluations worse than step 20 beyond the noise" in texts(run.best())["overfits"]


@pytest.mark.parametrize(
    ("last", "train"),
    [((1.6, 1.5), (1.4, 1.3)), ((1.6, 1.7), (1.6, 1.7)), ((1.6, math.nan), (1.4, 1.3))],
    ids=["eval loss recovers", "training loss rises too", "it diverges"],
)
def test_what_is_not_overfitting(run: Evaluated, last: tuple[float, float], train: tuple[float, float]) -> None:
    run.evaluate(10, 1.5, train=1.5)
    for step, loss, trained in zip((20, 30), last, train, strict=True):
        run.evaluate(step, loss, train=trained)
    assert run.best().overfitting is None


def test_without_recorded_groups_nothing_is_called_a_tie_and_the_reason_is_given(run: Evaluated) -> None:
    for step, loss, train in ((10, 1.5, 1.5), (20, 1.5001, 1.4), (30, 1.6, 1.3)):
        run.evaluate(step, loss, groups={}, train=train)
    best = run.best()
    assert best.ties == () and best.chosen is not None and best.chosen.interval is None
    assert noise_line(best).startswith("not recorded")
    assert best.overfitting is None, "every later value is worse than the best, whatever happens"


def test_one_batch_of_rows_gives_no_estimate_and_says_what_would(run: Evaluated) -> None:
    run.evaluate(10, 1.5, groups={"tokens": [400], "loss": [1.5]})
    assert "per_device_eval_batch_size" in noise_line(run.best())


def test_weights_that_are_in_final_alone_count(run: Evaluated) -> None:
    run.evaluate(10, 1.5)
    run.evaluate(15, 1.2, saved=False)
    (run.folder / FINAL).mkdir()
    fill(run.folder / FINAL, 15)
    write_source(run.folder / FINAL, FinalSource(15, 1.2))
    best = run.best()
    assert best.chosen is not None and (best.chosen.step, best.chosen.weights) == (15, "final")
    assert best.path == run.folder / FINAL


def damage_the_best_that_final_has(run: Evaluated) -> None:
    """Two evaluated checkpoints; that of step 10 is better, in `final/` too, and damaged."""
    run.evaluate(10, 1.5)
    run.evaluate(20, 1.7)
    (run.folder / FINAL).mkdir()
    fill(run.folder / FINAL, 10)
    write_source(run.folder / FINAL, FinalSource(10, 1.5))
    fill(run.store.path(10), 99)


def test_weights_whose_checkpoint_is_damaged_or_deleted_count_where_final_has_them(run: Evaluated) -> None:
    damage_the_best_that_final_has(run)
    best = run.best()
    assert best.chosen is not None and (best.chosen.step, best.chosen.weights) == (10, "final")
    assert [one.weights for one in best.evaluations] == ["final", "checkpoint"]
    assert best.path == run.folder / FINAL and "step-000010" in texts(best)["warning"]
    assert best.saved is not None and best.saved.step == 20
    run.store.path(10).rename(run.folder / "elsewhere")
    assert run.best().chosen == best.chosen and run.best().damaged == ()
    (run.folder / FINAL / "adapter_model.safetensors").unlink()
    assert (run.best().chosen or best.chosen).step == 20


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("spoil", [cut, flip, Path.unlink])
def test_a_damaged_final_is_no_weights_where_the_checkpoint_of_its_step_is_damaged_too(
    run: Evaluated, spoil: Callable[[Path], None]
) -> None:
    damage_the_best_that_final_has(run)
    assert (run.best().chosen or run.best().lowest).weights == "final"
    spoil(run.folder / FINAL / WEIGHTS)
    best = run.best()
    assert best.chosen is not None and (best.chosen.step, best.chosen.weights) == (20, "checkpoint")
    assert [one.weights for one in best.evaluations] == ["damaged", "checkpoint"]
    assert f"damaged, and left out: final/: {WEIGHTS}: " in texts(best)["warning"]
    assert final_line(best) == "final/ is damaged; --to-final writes it again, from the best checkpoint"
    final = as_json(best)["final"]
    assert (final["step"], final["intact"]) == (10, False) and WEIGHTS in final["damages"][0]


def test_where_the_checkpoints_were_deleted_nobody_is_told_to_save_more_often(run: Evaluated) -> None:
    run.evaluate(10, 1.5)
    shutil.rmtree(run.folder / "checkpoints")
    assert texts(run.best())["best"].endswith("Its checkpoint is deleted.")


def test_a_damaged_final_without_a_checkpoint_of_its_step_is_found_by_its_header(run: Evaluated) -> None:
    run.evaluate(10, 1.5)
    run.evaluate(15, 1.2, saved=False)
    (run.folder / FINAL).mkdir()
    fill(run.folder / FINAL, 15)
    write_source(run.folder / FINAL, FinalSource(15, 1.2))
    assert as_json(run.best())["final"]["intact"]
    cut(run.folder / FINAL / WEIGHTS)
    best = run.best()
    assert best.chosen is not None and best.chosen.step == 10
    assert best.evaluations[1].weights == "not saved" and "truncated" in texts(best)["warning"]


def test_only_the_form_of_final_for_another_class_is_damaged(run: Evaluated) -> None:
    run.evaluate(15, 1.2, saved=False)
    (run.folder / FINAL / "on-wrapper").mkdir(parents=True)
    for folder in (run.folder / FINAL, run.folder / FINAL / "on-wrapper"):
        fill(folder, 15)
    write_source(run.folder / FINAL, FinalSource(15, 1.2))
    cut(run.folder / FINAL / "on-wrapper" / WEIGHTS)
    best = run.best()
    assert best.chosen is not None and best.chosen.weights == "final"
    assert texts(best)["warning"].startswith(f"damaged: final/: on-wrapper/{WEIGHTS}: truncated")


def test_final_of_an_older_run_is_known_by_its_weights(run: Evaluated) -> None:
    run.evaluate(10, 1.5)
    run.evaluate(20, 1.7)
    (run.folder / FINAL).mkdir()
    fill(run.folder / FINAL, 20)
    assert run.best().final == FinalSource(20, 1.7)
    fill(run.folder / FINAL, 99)
    assert run.best().final is None


def test_an_untrained_model_that_was_better_is_said(run: Evaluated) -> None:
    run.evaluate(0, 1.0, saved=False)
    run.evaluate(10, 1.5)
    best = run.best()
    assert best.chosen is not None and best.chosen.step == 10
    assert "untrained" in texts(best) and "unsaved" not in texts(best)


def test_checkpoints_copied_from_another_run_count_by_what_their_manifest_says(run: Evaluated) -> None:
    run.store.write(10, lambda folder: fill(folder, 10), {"eval_loss": 1.0})
    run.evaluate(20, 1.5)
    best = run.best()
    assert best.chosen is not None and best.chosen.step == 10 and best.ties == ()


def test_nan_is_never_the_best_and_is_shown(run: Evaluated) -> None:
    run.evaluate(10, 1.5)
    run.everywhere("eval", step=20, loss="nan", tokens=400)
    best = run.best()
    assert best.chosen is not None and best.chosen.step == 10
    assert json.loads(json.dumps(as_json(best), allow_nan=False))["evaluations"][1]["value"] == "nan"
    assert curve([1.0, math.nan, 2.0]) == "▁!█"


def test_without_any_saved_evaluation_there_is_no_best_and_the_setting_is_named(run: Evaluated) -> None:
    run.evaluate(10, 1.5, saved=False)
    best = run.best()
    assert best.chosen is None and best.path is None
    assert "train.save_steps" in texts(best)["best"] and "step 10" in texts(best)["best"]


def test_a_run_without_evaluations_or_of_a_script_is_refused(run: Evaluated, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="has no evaluation yet") as refused:
        run.best()
    assert "data.val_split" in str(refused.value.fix)
    script = Evaluated(tmp_path / "script")
    script.script_start("train.py")
    with pytest.raises(UserInputError, match="run of a script"):
        script.best()


@pytest.mark.parametrize(
    ("settings", "why", "fix"),
    [
        ("data:\n  val_split: null\n", "data.val_split: null", "Set data.val_split"),
        ('data:\n  val_split: test\ntrain:\n  eval_strategy: "no"\n', "eval_strategy: no", "Set train.eval_strategy"),
        ("data:\n  val_split: test\ntrain:\n  eval_strategy: auto\n  eval_steps: 200\n", "every 200", "same lower"),
    ],
)
def test_without_evaluations_the_setting_that_is_the_cause_is_named(
    run: Evaluated, settings: str, why: str, fix: str
) -> None:
    (run.folder / "config.yaml").write_text(settings)
    with pytest.raises(UserInputError, match="has no evaluation yet") as refused:
        run.best()
    assert why in str(refused.value.why) and fix in str(refused.value.fix)
    assert "shardtune eval" not in str(refused.value.fix), "there is nothing to evaluate yet"
    (run.folder / "final").mkdir()
    fill(run.folder / "final", 1)
    with pytest.raises(UserInputError) as refused:
        run.best()
    assert f"shardtune eval {run.folder}`" in str(refused.value.fix)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("entropy", "neither"), ("perplexity", "exp"), ("eval_loss", "name it loss"), ("tokn_accuracy", "token_accuracy")],
)
def test_a_number_that_ranks_nothing_is_refused_with_the_reason(name: str, hint: str) -> None:
    with pytest.raises(UserInputError, match="not ranked") as refused:
        metric_named(name)
    assert hint in str(refused.value.why)
    assert all(metric in str(refused.value.fix) for metric in METRICS)


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_run_fits_the_terminal_and_shows_its_ends_and_its_best(run: Evaluated, width: int) -> None:
    for step in range(10, 2010, 10):
        run.evaluate(step, 1.5 + abs(step - 770) / 1000, saved=step % 500 == 270, train=2.0)
    out = StringIO()
    show(Console(width=width, force_terminal=True, no_color=True, file=out), run.best())
    printed = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.getvalue().splitlines()]
    assert all(len(line) <= width or str(run.folder) in line for line in printed), printed
    first = [line.split()[0] for line in printed if line[:6].strip()[:1].isdigit()]
    assert {"10", "770", "2,000"} <= set(first) and len(first) <= 26
    assert any("of 200 evaluations" in line for line in printed)
