"""A model that learnt a chat template stops where the template ends a turn."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from export.exporting import Quiet, export
from peft import LoraConfig, get_peft_model
from toys import toy_chat_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from shardtune.export.request import ExportRequest, TargetName
from shardtune.export.run import export_model
from shardtune.inference.source import find_tuned


def run_on_chats(folder: Path, kind: str = "chat") -> Path:
    """What is left of a run that trained on conversations."""
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


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_a_server_of_the_adapter_is_told_its_token(target: TargetName, tmp_path: Path) -> None:
    """It would go by the generation settings of the base alone."""
    run = run_on_chats(tmp_path)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "top_p": 0.9}))
    log = Quiet()
    export_model(ExportRequest(find_tuned(str(run / "final")), target, tmp_path / "out"), log)
    [line] = [line for line in log.lines if line.startswith("serve ")]
    words = shlex.split(line)
    end = AutoTokenizer.from_pretrained(tmp_path / "base").convert_tokens_to_ids("<|im_end|>")
    if target == "vllm":
        folder = Path(words[words.index("--generation-config") + 1])
        settings = GenerationConfig.from_pretrained(folder)
        assert settings.eos_token_id == [5, end] and settings.top_p == 0.9
    else:
        assert json.loads(words[words.index("--json-model-override-args") + 1]) == {"eos_token_id": [5, end]}


def test_where_training_is_not_known_nothing_is_said_of_it(tmp_path: Path) -> None:
    run = run_on_chats(tmp_path)
    (run / "config.yaml").unlink()
    (run / "run.json").write_text(json.dumps({"kind": "script", "command": ["train.py"]}))
    (run / "final").rename(tmp_path / "alone")
    shutil.copytree(tmp_path / "alone", run / "final")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    for adapter in (run / "final", tmp_path / "alone"):
        log = Quiet()
        export_model(ExportRequest(find_tuned(str(adapter)), "merged", tmp_path / f"of-{adapter.name}"), log)
        assert not [line for line in log.lines if "as in training" in line], adapter


def test_what_ends_it_already_and_other_formats_leave_the_file_alone(tmp_path: Path) -> None:
    for kind, folder in (("chat", tmp_path / "chat"), ("text", tmp_path / "text")):
        run = run_on_chats(folder, kind)
        file = folder / "base" / "generation_config.json"
        if kind == "text":
            file.write_text(json.dumps({"eos_token_id": 5}))
        before = file.read_bytes()
        export(run / "final", folder / "out")
        assert (folder / "out" / "generation_config.json").read_bytes() == before, kind
