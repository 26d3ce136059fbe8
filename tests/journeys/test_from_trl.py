"""docs/from-trl.md, done: its files and commands, word for word, on a toy in the place of the model it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chat_tokenizers import chat_tokenizer
from journey import Journey, read_events
from reference import Score, load, score, text_example
from running import REPOSITORY
from toys import save_toy, toy_text_config

PAGE = (REPOSITORY / "docs" / "from-trl.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^\*\*`([\w.]+)`\*\*\n\n```\w+\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^```console\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)[0]  # the others: tests/docs
VALIDATION = [{"instruction": f"Add {i} and {i + 1}.", "response": f"The sum is {2 * i + 1}."} for i in range(60, 68)]
TRAIN = [{"instruction": f"Add {i} and {i + 2}.", "response": f"The sum is {2 * i + 2}."} for i in range(40)]


@pytest.fixture
def reader(journey: Journey) -> Journey:
    """Somebody who has the page's files, its data, and a Mistral where the page's is."""
    from transformers import MistralForCausalLM

    tokenizer = chat_tokenizer("chatml")
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = toy_text_config(
        "mistral",
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        **special,
    )
    model = save_toy(MistralForCausalLM, config, journey.folder / "models" / "mistral-7b")
    tokenizer.save_pretrained(model)
    (journey.folder / "data").mkdir()
    for name, rows in (("train", TRAIN), ("validation", VALIDATION)):
        (journey.folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in FILES.items():
        (journey.folder / name).write_text(text, encoding="utf-8")
    return journey


def plain_score(reader: Journey, adapter: Path) -> Score:
    """The adapter on the validation rows as the page's script writes them, all of their tokens supervised."""
    from transformers import AutoTokenizer

    model = reader.folder / "models" / "mistral-7b"
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["### Instruction:\n{instruction}\n\n### Response:\n{response}".format(**row) for row in VALIDATION]
    return score(load(model, adapter, "bfloat16"), [text_example(tokenizer, text) for text in texts])


@pytest.mark.slow
def test_the_commands_of_the_page_train_what_its_script_would(reader: Journey) -> None:
    typed = [line.removeprefix("$ ") for line in COMMANDS.splitlines()]
    assert len(typed) == 5
    for line in typed:
        reader.command("bash", "-c", line)
    run = reader.only_run("outputs")
    assert read_events(run, "run_start")[0]["world_size"] == 2
    plain, counted = plain_score(reader, run / "final"), read_events(run, "data")[-1]["validation"]
    assert (counted["tokens"], counted["supervised"]) == (plain.tokens, plain.supervised)
    assert read_events(run, "eval")[-1]["loss"] == pytest.approx(plain.loss, abs=5e-3)  # computed in bfloat16
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_the_script_of_the_page_is_one_that_trl_runs(reader: Journey) -> None:
    script = FILES["train.py"].replace("bf16=True,", "bf16=True, use_cpu=True,")  # there is no GPU here
    (reader.folder / "train.py").write_text(script)
    reader.command("python", "train.py")
    (state,) = (reader.folder / "outputs").glob("checkpoint-*/trainer_state.json")
    said = [entry["eval_loss"] for entry in json.loads(state.read_text())["log_history"] if "eval_loss" in entry]
    assert said[-1] == pytest.approx(plain_score(reader, reader.folder / "outputs" / "final").loss, abs=2e-2)
