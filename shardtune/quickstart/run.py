"""What does the quickstart do? Generates data, scores the model, trains it with `shardtune train`, scores it again."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shardtune.launch.start import start
from shardtune.observe.events import EventLog
from shardtune.quickstart import sentences
from shardtune.quickstart.recipe import REAL, TINY, Recipe, config_text
from shardtune.quickstart.weights import default_cache, model_folder, tiny_model
from shardtune.run.folder import new_run_id
from shardtune.terminal import say

if TYPE_CHECKING:
    from shardtune.quickstart.score import Score


def run_quickstart(*, model: str | None, output_dir: Path, seed: int, nproc: int, tiny: bool) -> int:
    """Run the quickstart; returns the exit code of its training.

    Args:
        model: Folder or hub name; None uses the default weights.
        tiny: Use a random toy model, for tests.
    """
    console, began = Console(), time.perf_counter()
    recipe = TINY if tiny else REAL
    work = output_dir.expanduser().absolute()
    weights = (
        tiny_model(work / "toy-model", seed)
        if tiny
        else model_folder(model, default_cache(), say=lambda line: say(console, "weights", line))
    )
    sentences.write_dataset(work / "data", seed, recipe.n_train, recipe.n_val, recipe.n_test)
    test_rows = [json.loads(line) for line in (work / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    config = work / "quickstart.yaml"
    config.write_text(
        config_text(weights, work / "data", work, recipe=recipe, seed=seed, nproc=nproc), encoding="utf-8"
    )
    say(
        console,
        "task",
        f"turn a sentence into JSON; {len(test_rows)} held-out test rows, e.g. {test_rows[0]['sentence']!r}",
    )
    say(console, "before", "scoring the model before training …")
    before = _score(weights, None, test_rows, recipe)
    run_id = new_run_id()
    say(console, "train", f"shardtune train {config}")
    code = start(config, [], None, run_id, os.environ)
    if code:
        return code
    say(console, "after", "scoring the model with its adapter …")
    final = work / run_id / "final"
    after = _score(weights, final, test_rows, recipe)
    (work / run_id / "quickstart.json").write_text(
        json.dumps({"before": before.as_dict(), "after": after.as_dict()}, indent=2) + "\n", encoding="utf-8"
    )
    _write_scores(work / run_id, before, after)
    _print_result(console, before, after, final, time.perf_counter() - began)
    return 0


def _score(weights: Path, adapter: Path | None, rows: list[dict[str, str]], recipe: Recipe) -> Score:
    """Plain transformers and peft in this process, as any user would load the adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from shardtune.quickstart.score import score

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(adapter or weights)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return score(model, tokenizer, rows, batch_size=recipe.score_batch_size, max_new_tokens=recipe.max_new_tokens)


def _write_scores(run: Path, before: Score, after: Score) -> None:
    """Write scores and sample answers for the report, in the form of `train.samples`.

    Not with that setting: each token would gather the whole model over loopback, for answers that are known already.
    """
    from shardtune.quickstart.score import SCORE_NAMES, samples

    events = EventLog(run, rank=0)
    for when, score in (("before", before), ("after", after)):
        events.write("score", when=when, name="test loss", value=score.eval_loss, rows=score.rows)
        for name in ("valid_json", "intent", "exact_match"):
            value = round(100 * getattr(score, name), 2)
            events.write("score", when=when, name=SCORE_NAMES[name], value=value, unit="%", rows=score.rows)
    for pair in samples(before, after):
        for when, answer in zip(("before", "after"), pair, strict=True):
            row = [one.sentence for one in before.answers].index(answer.sentence)
            events.write(
                "sample", when=when, row=f"test:{row}", prompt=answer.sentence, answer=answer.text,
                expected=answer.expected,
            )  # fmt: skip
    events.close()


def _print_result(console: Console, before: Score, after: Score, final: Path, seconds: float) -> None:
    from shardtune.quickstart.score import comparison
    from shardtune.terminal import clock

    console.print(comparison(before, after))
    say(console, "adapter", str(final))
    say(console, "time", f"{clock(seconds)} in total")
    run = final.parent
    say(console, "report", f"shardtune report {_typed(run)}")
    say(console, "live", f"shardtune dashboard {_typed(run.parent)}")
    say(console, "chat", f"shardtune chat {_typed(run)} --compare")
    say(console, "evaluate", f"shardtune eval {_typed(run)}")
    say(console, "export", f"shardtune export {_typed(run)} --to merged")


def _typed(path: Path) -> str:
    """A path as one would type it here."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
