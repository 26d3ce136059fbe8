"""The report as a file: it needs nothing else, says what happened, and trusts no text of a run."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_run import FakeRun, long_run, script_run, showcase
from running import REPOSITORY, Command

from shardtune.report.charts import metric_ids
from shardtune.report.compare import compare_view
from shardtune.report.history import RunHistory
from shardtune.report.page import asset, chart_library, embedded, page
from shardtune.report.settings import differences, read_settings
from shardtune.report.view import run_view

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\"'<!--\u2028\u202e\x1b[31m"


class Elements(HTMLParser):
    """Which elements a browser would see, and the text of the embedded view."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.view = ""
        self._in_view = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_view = dict(attrs).get("id") == "view"

    def handle_endtag(self, tag: str) -> None:
        self._in_view = False

    def handle_data(self, data: str) -> None:
        if self._in_view:
            self.view += data


def history(folder: Path) -> RunHistory:
    found = RunHistory(folder)
    found.update()
    return found


def test_a_report_is_one_file_that_can_fetch_nothing(shardtune: Command, tmp_path: Path) -> None:
    showcase(tmp_path / "runs" / "one", ranks=2, steps=300)
    result = shardtune("report", "one", "--runs-dir", tmp_path / "runs")
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "runs" / "one" / "report.html").read_text(encoding="utf-8")
    elements = Elements(text)
    assert not [a for tag, a in elements.found if "src" in a or (tag == "link" and a.get("href") != "data:,")]
    (policy,) = [a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")
    own = "".join(asset(name) for name in ("elements.js", "charts.js", "page.js", "style.css"))
    assert not re.search(r"https?://|@import|url\(", own)
    assert chart_library()[:20] in text


def test_the_view_tells_what_happened(tmp_path: Path) -> None:
    run = showcase(tmp_path / "one", ranks=4)
    view = json.loads(Elements(page(run_view(history(run.folder), run.now))).view)
    assert view["status"] == "done"
    tiles = {tile["name"]: tile for tile in view["tiles"]}
    assert (
        tiles["steps"]["value"] == "400" and tiles["best evaluation loss"]["note"] == "step 400, best of 8 evaluations"
    )
    assert tiles["GPU memory"]["value"] == "63 GiB" and tiles["GPU memory"]["note"] == "peak, rank 3"
    assert tiles["time"]["note"] == "2 starts"
    assert {chart["group"] for chart in view["charts"]} == {"Learning", "Speed", "Memory", "Device"}
    loss = next(chart for chart in view["charts"] if chart["id"] == "loss")
    assert [s["look"] for s in loss["series"]] == ["faint", "faint", "line", "points"]
    assert max(value for value in loss["series"][2]["y"]) < 3, "the spike was rolled back and does not count"
    assert 7.9 in loss["series"][0]["y"]
    assert {group["kind"] for group in view["marks"]} == {"restart", "checkpoint", "warning", "guard"}
    assert [row[1]["text"] for row in view["problems"]["rows"]] == ["data", "loss_spike: rollback", "straggler"]
    assert "train:812" in view["problems"]["rows"][1][2] and view["problems"]["rows"][1][3] == "1"
    slow = [row[1]["tone"] if isinstance(row[1], dict) else "" for row in view["rank_table"]["rows"]]
    assert slow == ["", "", "warn", ""], "rank 2 is the slow one"
    assert "sw_power_cap" in view["rank_table"]["rows"][1][-1]["text"]
    peak, step = view["planned"]["rows"]
    assert peak == ["peak memory in tensors", "60 GiB", "63 GiB", "+5.0 %"]
    assert step[:2] == ["step time, median", "800 ms"] and step[3].startswith("+")
    assert view["checkpoints"]["rows"][-1][-1]["text"] == "latest, best"
    assert "lowest evaluation loss of those kept (0.5548)" in view["checkpoints"]["note"]
    assert view["samples"][0]["before"] != view["samples"][0]["after"] == view["samples"][0]["expected"]
    settings = {s["name"]: s for section in view["config"] for s in section["settings"]}
    assert settings["r"]["origin"] == "file: run.yaml:8:3" and not settings["r"]["is_default"]
    assert settings["model_init_kwargs.note"]["value"] == '"a  # in a value"'
    assert "1 unreadable line" in view["notes"][0]
    phases = next(chart for chart in view["charts"] if chart["id"] == "phases")
    assert [s["name"] for s in phases["series"]] == ["data", "forward", "backward", "optimizer", "collective", "other"]


def test_what_a_run_does_not_know_is_left_out(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "bare", ranks=1)
    run.write("run_start", run="bare", world_size=1)
    run.write("step", step=1, loss=2.5, tokens=10)
    view = run_view(history(run.folder), run.now)
    assert [chart["id"] for chart in view["charts"]] == ["loss"]
    assert [tile["name"] for tile in view["tiles"]] == ["steps", "loss", "tokens", "time"]
    assert view["rank_table"] is None and view["planned"] is None and view["samples"] == [] and view["config"] == []
    assert "0" not in view["tiles"][1]["note"].replace("2.5000", "")


def test_the_table_of_ranks_says_how_much_each_sends_and_how_much_of_it_to_other_nodes(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.begin(2)
    for rank, between in ((0, 0), (1, 1 << 20)):
        run.write(
            "profile", rank, step=1, seconds={"step": 1.0},
            collectives={"shard": 2 << 20, "replicate": 1 << 20, "other": 0},
            collectives_between_nodes={"shard": 0, "replicate": between, "other": 0},
        )  # fmt: skip
    shown = run_view(history(run.folder), run.now)["rank_table"]
    assert [head["name"] for head in shown["columns"]] == ["rank", "step time", "sent", "to other nodes"]
    assert [row[2:] for row in shown["rows"]] == [["3 MiB", "0 B"], ["3 MiB", "1 MiB"]]


def test_many_ranks_are_told_by_their_lowest_median_and_highest(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "wide", ranks=12)
    run.begin(20)
    for step in range(1, 21):
        run.step(step, 20, slow_rank=7)
    view = run_view(history(run.folder), run.now)
    chart = next(chart for chart in view["charts"] if chart["id"] == "step_seconds")
    assert [s["name"] for s in chart["series"]] == ["lowest", "median", "highest"] and "12 ranks" in chart["note"]
    lowest, median, highest = (s["y"][5] for s in chart["series"])
    assert lowest <= median < highest and view["ranks"] == [] and len(view["rank_table"]["rows"]) == 12


def test_texts_of_a_run_are_shown_and_never_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a&lt;b><b>", ranks=1)
    run.begin(5)
    run.step(1, 5)
    for event in ("warning", "notice"):
        run.write(event, about=HOSTILE, text=HOSTILE)
    run.write("guard", guard=HOSTILE, action=HOSTILE, step=1, text=HOSTILE, rows=[HOSTILE])
    run.write("sample", when="after", row=HOSTILE, prompt=HOSTILE, answer=HOSTILE, expected=HOSTILE)
    run.write("run_failed", exit_code=1, text=HOSTILE)
    run.write(HOSTILE)
    (run.folder / "config.yaml").write_text(f"model:\n  {HOSTILE}: {HOSTILE}  # {HOSTILE}\n", encoding="utf-8")
    (run.folder / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    found = history(run.folder)
    for view in (run_view(found, run.now), compare_view([found, found], run.now)):
        assert not set(embedded(view)) & set("<>&"), "nothing that could end or begin an element"
        elements = Elements(page(view))
        clean = Elements(
            page({**view, **{key: [] for key, value in view.items() if isinstance(value, list | dict)}, "why": ""})
        )
        assert [tag for tag, _ in elements.found] == [tag for tag, _ in clean.found]
        assert json.loads(elements.view) == json.loads(json.dumps(view)), "what is shown is what was written"
    shown = json.dumps(run_view(found, run.now), ensure_ascii=False)
    assert "\x1b" not in shown and "\u202e" not in shown


def test_reading_runs_needs_no_torch() -> None:
    code = "import sys, shardtune.cli.main, shardtune.report.server, shardtune.report.compare; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "False"


def test_nothing_of_ours_writes_html_from_texts() -> None:
    for name in ("elements.js", "charts.js", "page.js", "live.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", asset(name)
        ), name


def test_only_settings_that_differ_are_compared(tmp_path: Path) -> None:
    one, two = FakeRun(tmp_path / "one", ranks=1), FakeRun(tmp_path / "two", ranks=1)
    one.begin(5, r=16, rate="0.0001")
    two.begin(5, r=32, rate="0.0001")
    assert differences([read_settings(one.folder), read_settings(two.folder)]) == [("lora.r", ["16", "32"])]
    view = compare_view([history(one.folder), history(two.folder)], one.now)
    assert [row[0]["text"] for row in view["differences"]["rows"]] == ["lora.r"]


def test_a_run_without_a_config_differs_in_no_setting(tmp_path: Path) -> None:
    one, two, script = (FakeRun(tmp_path / name, ranks=1) for name in ("one", "two", "script"))
    one.begin(5, r=16, rate="0.0001")
    two.begin(5, r=32, rate="0.0001")
    script.profiled("toys/dense")
    runs = [history(run.folder) for run in (one, script, two)]
    assert compare_view(runs[:2], one.now)["differences"] is None
    table = compare_view(runs, one.now)["differences"]
    assert [column["name"] for column in table["columns"]] == ["setting", "one", "two"] and len(table["rows"]) == 1
    assert "Without a config.yaml: script" in table["note"]


def test_an_evaluation_is_captioned_by_who_computed_it(tmp_path: Path) -> None:
    ours, script = FakeRun(tmp_path / "ours", ranks=1), FakeRun(tmp_path / "script", ranks=1)
    ours.begin(5)
    script.profiled("toys/dense")
    for run, about in ((ours, "Mean over the supervised tokens"), (script, "the script's own Trainer")):
        run.evaluate(5, 0.5)
        charts = {chart["id"]: chart for chart in run_view(history(run.folder), run.now)["charts"]}
        assert about in charts["eval"]["about"]


def test_compared_runs_lie_on_the_same_axes_and_the_best_is_marked(shardtune: Command, tmp_path: Path) -> None:
    for name, loss in (("a", 0.5), ("b", 0.4)):
        run = FakeRun(tmp_path / "runs" / name, ranks=2)
        run.begin(10)
        for step in range(1, 11):
            run.step(step, 10)
        run.evaluate(10, loss)
        run.end(10)
    target = tmp_path / "both.html"
    result = shardtune("report", "a", tmp_path / "runs" / "b", "--runs-dir", tmp_path / "runs", "-o", target)
    assert result.returncode == 0, result.stderr
    view = json.loads(Elements(target.read_text(encoding="utf-8")).view)
    assert view["runs"] == ["a", "b"]
    assert all([s["name"] for s in chart["series"]] == ["a", "b"] for chart in view["charts"])
    column = [c["name"] for c in view["results"]["columns"]].index("best evaluation loss")
    assert [row[column]["tone"] for row in view["results"]["rows"]] == ["", "best"]


def test_a_run_that_is_not_there_and_a_place_that_cannot_be_written_are_told(
    shardtune: Command, tmp_path: Path
) -> None:
    result = shardtune("report", "nothing", "--runs-dir", tmp_path)
    assert result.returncode == 2 and "There is no run 'nothing'" in result.stderr and "--runs-dir" in result.stderr
    FakeRun(tmp_path / "one", ranks=1).begin(5)
    result = shardtune("report", tmp_path / "one", "-o", tmp_path / "missing" / "x.html")
    assert result.returncode == 2 and "Could not write the report" in result.stderr and "Traceback" not in result.stderr


def test_the_view_of_a_script_shows_what_it_logged_and_nothing_that_only_a_training_has(tmp_path: Path) -> None:
    run = script_run(tmp_path / "one", words=("train.py", "--batch-size", "8"))
    view = json.loads(Elements(page(run_view(history(run.folder), run.now))).view)
    assert view["is_script"] and view["status"] == "done"
    facts = {fact["name"]: fact["value"] for fact in view["facts"]}
    assert facts["Script"] == "train.py" and facts["Exit code"] == "0"
    assert facts["Command"] == "shardtune run --nproc 2 -- train.py --batch-size 8"
    assert facts["Logs"] == "logs/rank-0.log, logs/rank-1.log" and facts["Hardware"].endswith("2 processes")
    tiles = {tile["name"]: tile for tile in view["tiles"]}
    assert list(tiles) == ["steps", "val/mAP@50", "loss", "images/s", "step time", "time", "host memory"]
    assert (tiles["images/s"]["value"], tiles["images/s"]["note"]) == ("8", "2 ranks together, median of the steps")
    assert tiles["step time"]["note"] == "median, 25.0 % waiting for data"
    charts = {chart["id"]: chart for chart in view["charts"]}
    assert list(charts) == [
        "metric-loss", "metric-train-lr", "metric-val-mAP-50", "samples", "rank_samples", "step_seconds", "phases",
        "host_memory", "cpu",
    ]  # fmt: skip
    assert [charts[id_]["title"] for id_ in ("metric-val-mAP-50", "samples")] == [
        "val/mAP@50",
        "Images per second, all ranks",
    ]
    assert charts["metric-val-mAP-50"]["series"][0]["look"] == "points"
    assert charts["metric-loss"]["series"][0]["look"] == "line" and len(charts["metric-loss"]["series"]) == 1
    assert [(s["name"], s["y"][0]) for s in charts["phases"]["series"]] == [("data", 0.5), ("other", 1.5)]
    assert view["metrics"]["rows"][-1] == [
        "val/mAP@50",
        "0.11 (step 20)",
        "0.6 (step 60)",
        "0.11 (step 20)",
        "0.6 (step 60)",
    ]
    empty = ("planned", "samples", "data", "adapters", "config", "out_of_memory", "logs")
    assert not any(view[part] for part in empty)
    assert "eval loss" not in [column["name"] for column in view["checkpoints"]["columns"]]
    assert "images/s per rank" in [column["name"] for column in view["rank_table"]["columns"]]
    assert "None" not in json.dumps(view) and "token" not in json.dumps(view)


def test_a_script_that_tells_nothing_has_the_usage_of_its_machine_over_time(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "plain", ranks=2)
    run.script_start("plain.py")
    for _ in range(3):
        run.now += 60
        run.everywhere("usage", host={"rss": 2 << 30, "cpu_percent": 80.0}, gpu={"utilization": 55})
    run.now += 3600
    run.script_start("plain.py")
    run.now += 60
    run.everywhere("usage", host={"rss": 3 << 30, "cpu_percent": 80.0}, gpu={"utilization": 66})
    view = run_view(history(run.folder), run.now)
    charts = {chart["id"]: chart for chart in view["charts"]}
    assert list(charts) == ["host_memory", "gpu_utilization", "cpu"] and view["marks"] == []
    assert {chart["over"] for chart in charts.values()} == {"minutes"}
    memory = charts["host_memory"]["series"][1]
    assert memory["x"] == [1, 2, 3, 63, 64] and memory["y"] == [2, 2, 2, None, 3], "not joined across the restart"
    assert [tile["name"] for tile in view["tiles"]] == ["time", "host memory"]


def test_a_script_that_failed_shows_the_last_lines_of_the_rank_that_did(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.script_start("train.py")
    run.script_step(1, loss=1.0)
    run.log(0, "waiting for rank 1\n")
    run.log(
        1, "".join(f"line {i}\n" for i in range(9999)) + f"10 %\r100 %\n{HOSTILE}\nValueError: the box is outside\n"
    )
    run.write("run_failed", 1, exit_code=3, text="ValueError: the box is outside")
    run.script("train.py", exit_code=3, ended=run.now)
    view = run_view(history(run.folder), run.now)
    assert (view["status"], view["why"]) == ("failed", "ValueError: the box is outside (exit code 3)")
    (log,) = view["logs"]
    lines = log["lines"].split("\n")
    assert log["file"] == "logs/rank-1.log" and len(lines) == 40 and lines[-1] == "ValueError: the box is outside"
    assert lines[-3] == "100 %" and "\x1b" not in log["lines"]


def test_a_script_that_never_came_to_its_first_event_has_a_page(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.script("-m", "package.train", "--lr", "1", exit_code=1, ended=run.now + 7)
    run.log(0, "ImportError: no module named package\n")
    view = run_view(history(run.folder), run.now + 9)
    facts = {fact["name"]: fact["value"] for fact in view["facts"]}
    assert (facts["Script"], facts["Command"]) == ("-m package.train", "-m package.train --lr 1")
    assert view["status"] == "failed" and view["tiles"] == [{"name": "time", "value": "0:07", "note": "start to end"}]
    assert view["logs"] == [{"file": "logs/rank-0.log", "lines": "ImportError: no module named package"}]


def test_a_script_of_which_only_another_ranks_file_is_here_has_a_page(tmp_path: Path) -> None:
    run = script_run(tmp_path / "run")
    (run.folder / "events-rank0.jsonl").unlink()
    view = run_view(history(run.folder), run.now)
    assert {tile["name"]: tile["value"] for tile in view["tiles"]}["val/mAP@50"] == "0.6"
    assert "samples" not in [chart["id"] for chart in view["charts"]], "the sum over all ranks is not known"
    assert {tile["name"]: tile["note"] for tile in view["tiles"]}["images/s"] == "per rank, median of the steps"


def test_metrics_whose_names_differ_in_signs_only_have_charts_of_their_own(tmp_path: Path) -> None:
    assert metric_ids(["a/b", "a_b", "a/b.2", "a b"]) == [
        "metric-a-b",
        "metric-a-b.2",
        "metric-a-b-2",
        "metric-a-b.3",
    ]


def test_compared_scripts_share_the_charts_of_their_metrics_and_a_training_keeps_its_own(tmp_path: Path) -> None:
    one = script_run(tmp_path / "one", words=("train.py", "--lr", "1"))
    two = script_run(tmp_path / "two", steps=80, words=("train.py", "--lr", "2"))
    view = compare_view([history(run.folder) for run in (one, two)], one.now)
    charts = {chart["id"]: chart for chart in view["charts"]}
    both = [charts[id_]["series"] for id_ in ("metric-loss", "metric-val-mAP-50", "metric-samples-images")]
    assert [[s["name"] for s in series] for series in both] == [["one", "two"]] * 3
    assert both[1][1]["y"][-1] == 0.8 and both[1][1]["look"] == "points"
    assert view["metrics"]["rows"][-1] == ["val/mAP@50", "0.6 at step 60 (0.11 – 0.6)", "0.8 at step 80 (0.11 – 0.8)"]
    (command,) = view["differences"]["rows"]
    assert [cell["text"] for cell in command] == ["command", "train.py --lr 1", "train.py --lr 2"]
    assert all(set(axes) == {"step", "hours"} for axes in view["axes"])
    trained = showcase(tmp_path / "trained", ranks=2, steps=300)
    mixed = compare_view([history(run.folder) for run in (one, trained)], one.now)
    assert {"loss", "metric-loss"} <= {chart["id"] for chart in mixed["charts"]}
    assert "tokens" not in mixed["axes"][0] and "tokens" in mixed["axes"][1]


@pytest.mark.slow
def test_a_hundred_thousand_steps_of_four_ranks_stay_small_and_keep_their_extremes(tmp_path: Path) -> None:
    at = random.Random().randrange(2, 100_000, 2)
    long_run(tmp_path / "long", extreme=(at, 987.654))
    text = page(run_view(history(tmp_path / "long"), 0.0))
    assert len(text.encode()) < 8_000_000
    view = json.loads(Elements(text).view)
    loss = next(chart for chart in view["charts"] if chart["id"] == "loss")["series"][0]
    assert (at, 987.654) in zip(loss["x"], loss["y"], strict=True), f"planted at {at}"
    memory = next(chart for chart in view["charts"] if chart["id"] == "gpu_memory")
    rank_1 = next(s for s in memory["series"] if s["rank"] == 1)
    assert (at, 900.25) in zip(rank_1["x"], rank_1["y"], strict=True), f"planted at {at}"
    assert "of 100,000 points" in memory["note"]
