"""A model that learnt a chat template stops where the template ends a turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from export.exporting import export
from peft import LoraConfig, get_peft_model
from toys import toy_chat_llama


def run_on_chats(folder: Path, kind: str = "chat") -> Path:
    """What is left of a run that trained on conversations."""
    from transformers import AutoModelForCausalLM

    toy_chat_llama(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    run = folder / "20260101-000000-abcd"
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        run / "final"
    )
    config = {
        "model": {"model_name_or_path": str(folder / "base"), "torch_dtype": "float32"},
        "data": {"dataset_name_or_path": "rows.jsonl", "val_split": None},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "run.json").write_text(json.dumps({"version": 1, "started": 1.0}))
    columns = ["messages"] if kind == "chat" else ["text"]
    data = {
        "version": 2,
        "event": "data",
        "time": 1.0,
        "rank": 0,
        "format": {"name": kind, "why": "", "columns": columns},
    }
    (run / "events-rank0.jsonl").write_text(json.dumps(data) + "\n")
    return run


@pytest.mark.parametrize("file", [{"eos_token_id": 5, "top_p": 0.9}, {"eos_token_id": [5, 6]}, None])
def test_its_token_joins_those_that_end_an_answer(file: dict[str, object] | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = run_on_chats(tmp_path)
    (tmp_path / "base" / "generation_config.json").unlink()
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    if file is not None:
        (tmp_path / "base" / "generation_config.json").write_text(json.dumps(file))
    export(run / "final", tmp_path / "out")
    settings = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    end = AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("<|im_end|>")
    before = [5] if file is None or file["eos_token_id"] == 5 else [5, 6]
    assert settings.eos_token_id == [*before, end]
    assert settings.top_p == (file or {}).get("top_p", settings.top_p)


def test_what_ends_it_already_and_other_formats_leave_the_file_alone(tmp_path: Path) -> None:
    for kind, folder in (("chat", tmp_path / "chat"), ("text", tmp_path / "text")):
        run = run_on_chats(folder, kind)
        file = folder / "base" / "generation_config.json"
        if kind == "text":
            file.write_text(json.dumps({"eos_token_id": 5}))
        before = file.read_bytes()
        export(run / "final", folder / "out")
        assert (folder / "out" / "generation_config.json").read_bytes() == before, kind
