"""Tasks of lm-evaluation-harness: its scores become metrics with intervals, and our loaded model is what it asks."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from running import REPOSITORY
from toys import WORDS
from typer.testing import CliRunner

from shardtune.cli.main import app
from shardtune.errors import UserInputError
from shardtune.evaluation.evaluate import _memory
from shardtune.evaluation.intervals import Estimate, paired_shares, wilson
from shardtune.evaluation.tasks import TaskChoice, _evaluated, _manager, check_tasks, run_tasks, scores

IS_INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(
    not IS_INSTALLED, reason="lm-evaluation-harness is not installed: pip install '.[eval]'"
)
TASK = """task: toy_reverse
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}} =>"
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def returned(values: list[float], name: str = "acc", reported: float | None = None, error: Any = 0.1) -> dict[str, Any]:
    """What the harness returns for one side."""
    mean = sum(values) / len(values) if reported is None else reported
    return {
        "results": {"task": {"alias": "task", f"{name},none": mean, f"{name}_stderr,none": error}},
        "samples": {"task": [{"doc_id": n, "filter": "none", name: value} for n, value in reversed(list(enumerate(values)))]},
        "higher_is_better": {"task": {name: name != "word_perplexity"}},
        "n-shot": {"task": 5},
        "n-samples": {"task": {"original": 99, "effective": len(values)}},
    }  # fmt: skip


def test_right_or_wrong_documents_have_the_intervals_of_shares() -> None:
    base, tuned = [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]
    (found,) = scores({"base": returned(base), "tuned": returned(tuned)})
    assert (found.task, found.filter, found.fewshot, found.documents) == ("task", "none", 5, 4)
    assert found.metric.kind == "share" and found.metric.sides == {"base": wilson(1, 4), "tuned": wilson(3, 4)}
    assert found.metric.difference == paired_shares([True, True, False, True], [False, True, False, False])


def test_other_scores_have_those_of_their_standard_errors() -> None:
    (found,) = scores({"base": returned([0.5, 0.7]), "tuned": returned([0.6, 0.9])})
    assert found.metric.kind == "number"
    assert found.metric.sides["base"].low == pytest.approx(0.6 - 0.196, abs=1e-4)
    assert found.metric.difference is not None and found.metric.difference.value == pytest.approx(0.15)
    assert found.metric.difference.low == pytest.approx(0.15 - 12.706 * 0.05, abs=1e-3)  # Student's t of two


def test_a_score_of_the_whole_corpus_has_a_difference_without_an_interval() -> None:
    results = {
        "base": returned([1.0, 2.0], "word_perplexity", 20.0, "N/A"), "tuned": returned([1.0, 2.0], "word_perplexity", 18.0, "N/A")
    }  # fmt: skip
    (found,) = scores(results)
    assert found.metric.better == "lower" and found.metric.sides["base"].low is None
    assert found.metric.difference is not None
    assert (found.metric.difference.value, found.metric.difference.low) == (-2.0, None)


@pytest.mark.parametrize("nowhere", [math.nan, math.inf, "N/A"])
def test_a_task_for_which_a_side_has_no_number_is_shown_without_it(nowhere: object) -> None:
    for without in ("base", "tuned"):
        results = {side: returned([0.5, 0.7]) for side in ("base", "tuned")}
        results[without]["results"]["task"]["acc,none"] = nowhere
        (found,) = scores(results)  # type: ignore[arg-type]
        assert {side: one.value for side, one in found.metric.sides.items() if side != without} == {
            "tuned" if without == "base" else "base": 0.6
        }
        assert found.metric.sides[without] == found.metric.difference == Estimate(None)
        json.dumps(found.as_dict(), allow_nan=False)
        del results[without]["results"]["task"]["acc,none"]
        assert scores(results) == [found]  # type: ignore[arg-type]


@pytest.fixture
def failing_harness(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A harness that raises what is put into the list."""
    errors: list[BaseException] = []

    def simple_evaluate(**settings: object) -> None:
        raise errors[0]

    evaluator, tasks = ModuleType("lm_eval.evaluator"), ModuleType("lm_eval.tasks")
    evaluator.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    tasks.TaskManager = lambda include_path: None  # type: ignore[attr-defined]
    for name, module in (
        ("lm_eval", ModuleType("lm_eval")),
        ("lm_eval.evaluator", evaluator),
        ("lm_eval.tasks", tasks),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    _manager.cache_clear()
    return errors


def test_questions_that_do_not_fit_into_memory_name_the_setting(failing_harness: list[BaseException]) -> None:
    failing_harness.append(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore"))
    loaded: Any = SimpleNamespace(device=torch.device("cpu"))
    for size, fix in ((32, "--batch-size 16."), (1, "Free the GPU's memory, or use a larger one.")):
        with pytest.raises(UserInputError, match=f"{size} at a time, do not fit") as refused, _memory(loaded, size):
            _evaluated(None, TaskChoice(("toy",)))
        assert refused.value.fix == fix and "Tried to allocate 2 GiB" in refused.value.why


def test_a_package_that_a_task_needs_is_named(failing_harness: list[BaseException]) -> None:
    failing_harness.append(ModuleNotFoundError("No module named 'langdetect'", name="langdetect"))
    with pytest.raises(UserInputError, match="could not run ifeval") as refused:
        _evaluated(None, TaskChoice(("ifeval",)))
    assert refused.value.fix == "pip install langdetect"


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserInputError, match="not installed") as refused:
        check_tasks(TaskChoice(("arc_easy",)))
    assert ".[eval]" in refused.value.fix


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(14):
            words, gold = rng.choices(WORDS, k=3), rng.randint(0, 1)
            choices = [" ".join(words[::-1]), " ".join(rng.choices(WORDS, k=3))]
            row = {"question": " ".join(words), "choices": choices if not gold else choices[::-1], "gold": gold}
            file.write(json.dumps(row) + "\n")
    (folder / "toy_reverse.yaml").write_text(TASK.format(data=folder / "rows.jsonl"))
    return folder


@needs_harness
@pytest.mark.slow
def test_both_sides_are_scored_as_plain_peft_would_be(toy_run: Path, tasks: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardtune.inference.load import load_tuned
    from shardtune.inference.source import find_tuned

    choice = TaskChoice(("toy_reverse",), limit=12, include_path=tasks)
    check_tasks(choice)
    tuned = find_tuned(str(toy_run))
    (found,) = run_tasks(load_tuned(tuned, torch.device("cpu")), choice, ("base", "tuned"), batch_size=3)
    base = AutoModelForCausalLM.from_pretrained(tuned.base.model_name_or_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tuned.base.model_name_or_path)
    wanted = {"base": share(base, tokenizer, tasks), "tuned": 0.0}
    wanted["tuned"] = share(PeftModel.from_pretrained(base, toy_run / "final").eval(), tokenizer, tasks)
    assert {side: estimate.value for side, estimate in found.metric.sides.items()} == wanted
    assert wanted["base"] != wanted["tuned"] and found.documents == 12


def share(model: Any, tokenizer: Any, tasks: Path) -> float:
    right = []
    for row in list(map(json.loads, (tasks / "rows.jsonl").read_text().splitlines()))[:12]:
        prompt = tokenizer(row["question"] + " =>")["input_ids"]
        likely = []
        for text in row["choices"]:
            ids = prompt + tokenizer(text)["input_ids"]
            with torch.no_grad():
                scores_ = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            places = torch.arange(len(prompt) - 1, len(ids) - 1)
            likely.append(scores_[places, torch.tensor(ids)[places + 1]].sum().item())
        right.append(likely.index(max(likely)) == row["gold"])
    return sum(right) / len(right)


@needs_harness
@pytest.mark.slow
def test_a_task_that_is_not_there_is_refused_with_those_near_it(tasks: Path) -> None:
    with pytest.raises(UserInputError, match="no task 'toy_revers'") as refused:
        check_tasks(TaskChoice(("toy_revers",), include_path=tasks))
    assert "toy_reverse" in refused.value.why
    with pytest.raises(UserInputError, match="no folder"):
        check_tasks(TaskChoice(("toy_reverse",), include_path=tasks / "nowhere"))


@needs_harness
@pytest.mark.slow
def test_a_task_without_its_data_is_an_error_of_one_line(toy_run: Path, tasks: Path, tmp_path: Path) -> None:
    from shardtune.inference.load import load_tuned
    from shardtune.inference.source import find_tuned

    (tmp_path / "lost.yaml").write_text(TASK.replace("toy_reverse", "toy_lost").format(data=tmp_path / "lost.jsonl"))
    choice = TaskChoice(("toy_lost",), include_path=tmp_path)
    check_tasks(choice)
    with pytest.raises(UserInputError, match="could not run toy_lost"):
        run_tasks(load_tuned(find_tuned(str(toy_run)), torch.device("cpu")), choice, ("tuned",), batch_size=2)


@needs_harness
@pytest.mark.slow
def test_the_command_of_the_page_works_as_it_stands_there(
    toy_run: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs" / "evaluate.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("$ shardtune") and "--tasks" in line)
    monkeypatch.chdir(tasks.parent)
    words = [word.replace("RUN", str(toy_run)) for word in line.split()[2:]]
    assert words[words.index("--include-path") + 1] == "tasks"
    words[words.index("tasks")] = tasks.name
    found = CliRunner().invoke(app, [*words, "--json"])
    assert found.exit_code == 0, found.output
    (task,) = json.loads(found.stdout)["tasks"]
    assert task["task"] == "toy_reverse" and task["tuned"]["low"] < task["tuned"]["high"]
