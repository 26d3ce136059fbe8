"""Every event that is written is in the schema, and what a real run writes is as it says."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import REPOSITORY, Command
from toys import toy_config

from shardtune.observe.schema import ENVELOPE, EVENTS, page, problems

PACKAGE = REPOSITORY / "shardtune"
HEAD = {"v": 2, "time": 1.5, "rank": 0}


LOGS = {"events", "_events", "log", "profiler", "self"}  # what an open log, or what passes on to one, is called


def calls() -> Iterator[tuple[str, str, set[str]]]:
    """Place, event and named fields of every `<log>.write("event", …)` in the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "write":
                continue
            owner, first = ast.unparse(node.func.value).split(".")[-1], node.args[0] if node.args else None
            if owner in LOGS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                named = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                yield f"{file.relative_to(REPOSITORY)}:{node.lineno}", first.value, named


def test_every_event_the_package_writes_is_in_the_schema_with_its_fields() -> None:
    found = list(calls())
    assert len(found) > 20
    wrong = [f"{place}: no event {name}" for place, name, _ in found if name not in EVENTS]
    for place, name, fields in found:
        if name in EVENTS and not EVENTS[name].is_open:
            extra = fields - set(EVENTS[name].fields) - set(ENVELOPE)
            wrong += [f"{place}: {name} has no field {field}" for field in sorted(extra)]
    assert wrong == []


def test_the_page_is_the_schema() -> None:
    assert (REPOSITORY / "docs" / "events.md").read_text(encoding="utf-8") == page(), "make reference renews it"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"event": "guard"}, "guard.action is missing"),
        ({"event": "eval", "step": 1, "loss": "high"}, "eval.loss is not of kind number: 'high'"),
        ({"event": "eval", "step": True, "loss": 1.0}, "eval.step is not of kind integer: True"),
        ({"event": "eval", "step": 1, "loss": None}, "eval.loss is null"),
        ({"event": "eval", "step": 1, "loss": 1.0, "extra": 1}, "eval.extra is not in the schema"),
        ({"event": "profile", "step": 1, "seconds": {}}, "profile.seconds.step is missing"),
        (
            {"event": "profile", "step": 1, "seconds": {"step": 1}, "gpu": {"throttle": [4]}},
            "has items other than texts",
        ),
        ({"event": "metrics", "step": 1, "values": {"loss": "high"}}, "metrics.values has items other than numbers"),
        ({"event": "usage", "gpu": {"memory": 1}}, "usage.gpu.memory is not in the schema"),
        ({"event": "party"}, "there is no event 'party'"),
    ],
)
def test_what_is_not_as_written_is_found(record: dict, problem: str) -> None:
    assert any(problem in found for found in problems({**HEAD, **record}))


def test_a_diverged_loss_is_a_number_in_words() -> None:
    assert problems({**HEAD, "event": "eval", "step": 1, "loss": "nan"}) == []


def test_events_of_a_script_are_in_the_schema() -> None:
    records = [
        {"event": "metrics", "step": 4, "values": {"loss": 0.3, "lr": "inf", "val/mAP@50": 1}},
        {
            "event": "profile", "step": 4, "seconds": {"step": 0.5, "data": 0.1},
            "samples": 8, "samples_per_second": 16.0, "sample_unit": "images",
        },
        {"event": "usage", "host": {"rss": 1, "cpu_percent": 99.5}, "gpu": {"utilization": 90, "memory_used": 1}},
        {"event": "resume", "step": 4, "path": "checkpoints/step-4", "world_size": 2, "changes": [], "damaged": []},
    ]  # fmt: skip
    assert [problem for record in records for problem in problems({**HEAD, **record})] == []


@pytest.mark.slow
def test_a_real_run_of_two_ranks_writes_what_the_schema_says(
    shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    config = toy_config(
        tmp_path, toy_model, toy_data,
        data={"val_split": "validation"},
        train={
            "max_steps": 4, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "debug_freq": 2,
            "gradient_accumulation_steps": 2, "report_to": "tensorboard",
        },
    )  # fmt: skip
    result = shardtune("train", config, "--run-id", "one", "--nproc", 2)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs" / "one"
    for rank in (0, 1):
        lines = (run / f"events-rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        assert [problem for record in records for problem in problems(record)] == []
        profiles = [record for record in records if record["event"] == "profile"]
        assert [profile["step"] for profile in profiles] == [1, 2, 3, 4]
        for profile in profiles:
            seconds = dict(profile["seconds"])
            step = seconds.pop("step")
            assert set(seconds) == {"data", "forward", "backward", "optimizer", "collective"}
            assert seconds["collective"] > 0 and sum(seconds.values()) <= step
            assert profile["tokens"]["real"] > 0 and profile["tflops"] > 0
    told = [line for line in result.stdout.splitlines() if line.startswith("profile ")]
    assert [line.split()[1] for line in told] == ["2", "4"]
    _tensorboard_has_the_profile(run)


def _tensorboard_has_the_profile(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = run.rglob("events.out.tfevents.*")
    board = EventAccumulator(str(file.parent))
    board.Reload()
    assert [scalar.step for scalar in board.Scalars("train/profile/seconds/collective")] == [1, 2, 3, 4]
