"""A plain TRL script that knows of shardtune only its profiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from journey import Journey, read_events
from reference import load, score, text_example

SCRIPT = """\
import sys

from datasets import Dataset
from peft import LoraConfig
from shardtune.observe import LLMStepProfiler, print_hw_summary
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model, rows = sys.argv[1], [line.rstrip() for line in open("rows.txt")]
print_hw_summary()
profiler = LLMStepProfiler(
    output_dir="runs/baseline", report_meta={"recipe": "plain TRL", "team": "search"}, script_name="sft.py"
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
    args=SFTConfig(
        output_dir="trainer", max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
        train_sampling_strategy="sequential", disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"text": rows}),
    processing_class=AutoTokenizer.from_pretrained(model),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[profiler],
)
trainer.train()
"""


@pytest.mark.slow
def test_tokens_and_loss_are_those_of_the_rows_and_what_was_given_is_in_its_files(
    journey: Journey, toy_model: Path
) -> None:
    from transformers import AutoTokenizer

    rows = [" ".join(f"w{(7 * i + j) % 60:02d}" for j in range(3 + i)) for i in range(12)]
    (journey.folder / "rows.txt").write_text("\n".join(rows), encoding="utf-8")
    (journey.folder / "sft.py").write_text(SCRIPT, encoding="utf-8")
    done = journey.command("python", "sft.py", toy_model)
    assert done.stdout.startswith("host      ") and "software  Python" in done.stdout
    run = journey.folder / "runs" / "baseline"
    kept = json.loads((run / "profile.json").read_text())
    assert kept["script"] == "sft.py" and kept["meta"] == {"recipe": "plain TRL", "team": "search"}
    journey.shardtune("report", "baseline")
    page = (run / "report.html").read_text(encoding="utf-8")
    for given in ("plain TRL", "search", f"python sft.py {toy_model}", str(toy_model)):
        assert given in page, given

    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    examples = [text_example(tokenizer, row) for row in rows]
    steps = [examples[start : start + 4] for start in (0, 4, 8)]
    tokens = [profile["tokens"] for profile in read_events(run, "profile")]
    assert [counted["real"] for counted in tokens] == [sum(len(e.ids) for e in step) for step in steps]
    assert [counted["supervised"] for counted in tokens] == [sum(len(e.ids) - 1 for e in step) for step in steps]
    first = score(load(toy_model), steps[0])  # adapters begin at zero: the first loss is that of the base model
    assert read_events(run, "step")[0]["loss"] == pytest.approx(first.loss, abs=1e-4)
