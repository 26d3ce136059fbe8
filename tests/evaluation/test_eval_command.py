"""`shardtune eval` as users call it: what it prints, keeps and refuses, from a finished run to its report."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evaluated_run import fake_run
from running import Command, events
from toys import toy_chat_llama, toy_config, toy_llama, toy_rows
from typer.testing import CliRunner, Result
from unprivileged import PREFIX, needs_permissions

from shardtune.checkpoint.final import FinalSource, write_source
from shardtune.cli.main import app
from shardtune.errors import UserInputError
from shardtune.evaluation import result
from shardtune.evaluation.result import Evaluation


def evaluate(run: Path, *words: object) -> Result:
    found = CliRunner().invoke(app, ["eval", str(run), *map(str, words)], catch_exceptions=True)
    if isinstance(found.exception, UserInputError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found


def kept(run: Path) -> list[Path]:
    return sorted((run / "evaluations").glob("*.json"))


def test_the_result_is_printed_and_kept_with_its_rows(toy_run: Path) -> None:
    before = kept(toy_run)
    found = json.loads(evaluate(toy_run, "--json").stdout)
    assert [metric["name"] for metric in found["metrics"]] == ["loss", "perplexity", "exact_match"]
    assert found["left_out"] == [{"metric": "json", "why": "no expected answer is a JSON object or list"}]
    loss = found["metrics"][0]
    assert loss["base"]["low"] < loss["base"]["value"] < loss["base"]["high"]
    assert loss["difference"]["value"] == pytest.approx(loss["tuned"]["value"] - loss["base"]["value"])
    (file,) = set(kept(toy_run)) - set(before)
    written = json.loads(file.read_text())
    rows = [json.loads(line) for line in (file.parent / written["rows_file"]["name"]).read_text().splitlines()]
    assert written == found
    assert len(rows) == 35 and {"prompt", "expected", "base", "tuned", "loss"} <= rows[0].keys()
    tokens = sum(row["supervised_tokens"] for row in rows)
    mean = sum(row["loss"]["tuned"] * row["supervised_tokens"] for row in rows) / tokens
    assert (tokens, mean) == (found["data"]["supervised_tokens"], pytest.approx(loss["tuned"]["value"], abs=1e-5))


def test_two_results_of_one_second_have_two_names() -> None:
    about = {"data": None, "checkpoint": "final"}
    one, other = (Evaluation(about, (), (), {}, (), (), began=1e9) for _ in range(2))
    assert one.name != other.name and one.name.startswith(other.name[:-4])


def test_json_answers_are_scored_by_field(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"question": f"number {n}", "answer": json.dumps({"n": n})} for n in range(6)]
    for name in ("train", "validation"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = fake_run(tmp_path, toy_chat_llama(tmp_path / "model"), tmp_path / "data", max_length=256)
    found = json.loads(evaluate(run, "--metrics", "json", "--max-new-tokens", 5, "--json").stdout)
    assert [metric["name"] for metric in found["metrics"]] == ["json_valid", "json_precision", "json_recall", "json_f1"]
    assert found["metrics"][0]["rows"] == 6 and found["metrics"][0]["tuned"]["value"] == 0
    assert "with so few" in " ".join(found["notes"])


def test_the_weights_and_the_base_are_recorded(toy_run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(toy_run.parents[1] / "model", moved)
    (moved / "config.json").write_text((moved / "config.json").read_text() + "\n")  # these may be other weights
    write_source(toy_run / "final", FinalSource(18))
    try:
        words = ("--metrics", "perplexity", "--no-base", "--model", moved, "--json")
        found = json.loads(evaluate(toy_run, *words).stdout)
    finally:
        (toy_run / "final" / "source.json").unlink()
    weights = (toy_run / "final" / "adapter_model.safetensors").read_bytes()
    assert (found["step"], found["adapter_sha256"]) == (18, hashlib.sha256(weights).hexdigest())
    assert found["base_model"] == str(moved)
    assert f"using '{moved}': results are only meaningful if these are the same weights." in " ".join(found["notes"])


def test_a_backslash_n_in_a_template_from_the_shell_is_noticed(toy_run: Path) -> None:
    template = r"data.prompt_template={question}\n{answer}"
    said = " ".join(evaluate(toy_run, "-o", template, "--metrics", "perplexity", "--no-base").output.split())
    assert "has a backslash and an n, not a line break" in said and f"-o $'{template}'" in said


def test_a_sample_says_of_how_many_rows_it_is(toy_run: Path) -> None:
    said = " ".join(evaluate(toy_run, "--max-rows", 9, "--metrics", "perplexity", "--no-base").output.split())
    assert "a seeded sample of 9 of 35 rows is evaluated" in said
    assert "A seeded sample: 9 of 35 rows." in said and "tuned − base" not in said


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(toy_run: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    said = evaluate(toy_run, "--metrics", "perplexity,exact_match").output
    table = said[said.index("95 % intervals in brackets") :].partition("note ")[0].splitlines()
    assert max(map(len, table)) <= columns
    assert any("perplexity" in line for line in table) and "unclear" in said


def test_an_adapter_without_a_run_keeps_what_it_is_told_to(toy_run: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in (toy_run / "final").iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    data = toy_run.parents[1] / "data" / "validation.jsonl"
    format_ = [
        "-o",
        "data.prompt_template={question} => {answer}",
        "-o",
        "data.max_length=64",
        "--metrics",
        "perplexity",
    ]
    assert "Nothing is kept" in evaluate(adapter, "--data", data, *format_).output
    out = tmp_path / "found.json"
    written = evaluate(adapter, "--data", data, *format_, "--out", out, "--json")
    alone = json.loads(written.stdout)
    assert "Nothing is kept" not in written.output and "shardtune report" not in written.output
    in_run = json.loads(evaluate(toy_run, "--metrics", "perplexity", "--json").stdout)
    assert json.loads(out.read_text())["metrics"] == alone["metrics"]
    of_run, of_adapter = (found["metrics"][0]["tuned"]["value"] for found in (in_run, alone))
    assert of_adapter == pytest.approx(of_run, rel=1e-3)  # it does not say in which dtype it was trained
    assert (tmp_path / "found.rows.jsonl").is_file() and not (adapter / "evaluations").exists()


def test_a_file_that_is_no_result_is_not_written_over(toy_run: Path, tmp_path: Path) -> None:
    mine, rows = tmp_path / "mine.json", tmp_path / "found.rows.jsonl"
    mine.write_text('{"schema": 1}')
    rows.write_text("mine")
    for out, named in ((mine, mine), (tmp_path / "found.json", rows), (tmp_path / "found", rows)):
        with pytest.raises(UserInputError, match="is there already") as refused:
            evaluate(toy_run, "--metrics", "perplexity", "--out", out)
        assert str(named) in refused.value.what
    assert (mine.read_text(), rows.read_text()) == ('{"schema": 1}', "mine")
    (tmp_path / "link.json").symlink_to(toy_run / "config.yaml")
    with pytest.raises(UserInputError, match="is there already"):
        evaluate(toy_run, "--metrics", "perplexity", "--out", tmp_path / "link.json")
    earlier = tmp_path / "earlier.json"
    for metrics in ("perplexity", "perplexity,exact_match"):  # the second replaces the first
        evaluate(toy_run, "--metrics", metrics, "--out", earlier)
    assert len(json.loads(earlier.read_text())["metrics"]) == 3


def test_what_is_wrong_is_refused_before_any_work(toy_run: Path, tmp_path: Path) -> None:
    for words, said in (
        (["--limit", 3], "--limit has no effect without --tasks"),
        (["--metrics", "json"], "--metrics json cannot be computed"),
        (["--metrics", "exact_match,perplexitty", "--split", "none"], "there is no metric 'perplexitty'"),
        (["--checkpoint", "best"], "no checkpoint"),
        (["--model", tmp_path / "nowhere"], "nowhere"),
        (["--out", tmp_path], "is a folder"),
        (["--out", tmp_path / "no" / "where.json"], "There is no folder"),
        (["--data", ""], "--data is empty"),
        (["--max-new-tokens", 500], "500 tokens"),
        (["--tasks", ","], "names no task"),
    ):
        with pytest.raises(UserInputError, match=said):
            evaluate(toy_run, *words)


def test_a_run_without_final_says_which_checkpoints_there_are(tmp_path: Path) -> None:
    run = fake_run(tmp_path, toy_llama(tmp_path / "model"), toy_rows(tmp_path / "data"))
    (run / "final").rename(tmp_path / "elsewhere")
    with pytest.raises(UserInputError, match="has no final/ yet"):
        evaluate(run)


@needs_permissions
@pytest.mark.slow
def test_a_run_that_may_only_be_read_is_evaluated_into_a_file(
    toy_run: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(toy_run, run)
    shutil.rmtree(run / "evaluations", ignore_errors=True)
    run.chmod(0o555)
    out = tmp_path / "out.json"
    command = [*PREFIX, sys.executable, "-m", "shardtune", "eval", run, "--metrics", "perplexity"]
    found = subprocess.run([*command, "--out", out], env=environment, capture_output=True, text=True)
    assert found.returncode == 0 and "in --out alone" in " ".join(found.stdout.split()), found.stderr
    assert json.loads(out.read_text())["metrics"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "--out FILE" in refused.stderr
    run.chmod(0o755)


def test_results_are_not_written_through_a_link(toy_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "evaluations").symlink_to(toy_run)
    with pytest.raises(UserInputError, match="symbolic link"):
        result.evaluations_folder(run)


def test_too_many_rows_keep_those_that_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "MOST_ROWS", 2)
    rows = [
        {"row": 0, "loss": {"tuned": 9.0}, "exact_match": {"tuned": True}},
        {"row": 1, "loss": {"tuned": 0.1}, "exact_match": {"tuned": False}},
        {"row": 2, "loss": {"tuned": 0.2}, "exact_match": {"tuned": True}},
        {"row": 3, "loss": {"tuned": 0.3}, "exact_match": {"tuned": False}, "prompt": "x" * 30_000},
    ]
    found = result.saved_rows(rows)
    assert [row["row"] for row in found] == [1, 3] and len(found[1]["prompt"]) < 21_000


@pytest.fixture(scope="module")
def trained(shared_shardtune: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few real steps, with checkpoints and evaluations."""
    folder = tmp_path_factory.mktemp("trained")
    config = toy_config(
        folder, toy_llama(folder / "model"), toy_rows(folder / "data", val_rows=33), data={"val_split": "validation"},
        train={"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3},
    )  # fmt: skip
    assert shared_shardtune("train", config, "--run-id", "toy").returncode == 0
    return folder / "runs" / "toy"


@pytest.mark.slow
def test_a_trained_runs_loss_is_that_of_its_own_evaluation_and_of_eval_loss(
    trained: Path, shared_shardtune: Command
) -> None:
    found = shared_shardtune("eval", trained, "--json")
    assert found.returncode == 0, found.stderr
    loss = json.loads(found.stdout)["metrics"][0]
    assert loss["tuned"]["value"] == pytest.approx(events(trained, "eval")[-1]["loss"], rel=1e-5)
    for words, side in ((["--adapter", str(trained)], "tuned"), ([], "base")):
        only = json.loads(shared_shardtune("eval-loss", trained.parents[1] / "run.yaml", *words, "--json").stdout)
        assert loss[side]["value"] == pytest.approx(only["eval_loss"], rel=1e-5)
        assert json.loads(found.stdout)["data"]["supervised_tokens"] == only["supervised_tokens"]
    earlier = json.loads(
        shared_shardtune("eval", trained, "--checkpoint", "3", "--metrics", "perplexity", "--json").stdout
    )
    assert earlier["step"] == 3
    assert earlier["metrics"][0]["tuned"]["value"] == pytest.approx(events(trained, "eval")[0]["loss"], rel=1e-5)
    assert shared_shardtune("report", trained).returncode == 0
    assert '"evaluations":[{' in (trained / "report.html").read_text()
