"""Which adapters does `eval-loss` take? Those that mean under the config what they meant when they were trained."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from toys import toy_config, toy_text_config
from transformers import AutoModelForCausalLM

from shardtune.adapters.lora import add_lora
from shardtune.config import load_config
from shardtune.config.schema import DataSection, LoraSection, ModelSection, RunConfig
from shardtune.errors import UserInputError
from shardtune.parallel.processes import Processes
from shardtune.run.evaluation import Evaluation, adapter_folder
from shardtune.run.exit_codes import INTERRUPTED
from shardtune.run.stop_request import StopRequest
from shardtune.train.evaluation import read_given, temporary_run
from shardtune.train.run import train


def toy(name: str = "") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(toy_text_config("llama", name_or_path=name))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Made by PEFT, without any of ours."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(toy(), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def read(processes: Processes, adapter: Path, base: str = "", **lora: Any) -> Any:
    section = LoraSection(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **lora})
    return read_given(processes, add_lora(toy(base), section)[0], base, adapter)


def test_a_plain_peft_adapter_with_the_same_settings_is_taken(processes: Processes, adapter: Path) -> None:
    given = read(processes, adapter)
    assert len(given.tensors) == 8 and given.path == str(adapter)


def test_settings_that_mean_the_same_are_the_same(processes: Processes, adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config, "r": 16, "rank_pattern": {"q_proj": 4, "v_proj": 4}})
    )
    assert read(processes, adapter)


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        ({"lora_alpha": 16}, "scale (lora_alpha, use_rslora) of model.layers.0.self_attn.q_proj is 2 there and 4 here"),
        ({"use_rslora": True}, "scale (lora_alpha, use_rslora) of model.layers.0.self_attn.q_proj is 2 there and 4"),
        ({"r": 2, "lora_alpha": 4}, "rank of model.layers.0.self_attn.q_proj is 4 there and 2 here"),
        ({"bias": "all"}, "bias is 'none' there and 'all' here"),
        ({"target_modules": ["q_proj"]}, "layers.0.self_attn.v_proj.lora_A"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "layers.0.self_attn.k_proj.lora_A"),
    ],
)
def test_another_setting_is_refused_by_its_name(
    processes: Processes, adapter: Path, lora: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserInputError, match="--adapter") as caught:
        read(processes, adapter, **lora)
    assert named in caught.value.why


def trained_on(adapter: Path, name: str) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))


@pytest.mark.parametrize("known_as", ["hub/llama-a", "here"])
def test_an_adapter_of_a_base_with_another_name_is_taken_with_a_notice_that_names_both(
    processes: Processes, adapter: Path, tmp_path: Path, known_as: str
) -> None:
    toy_text_config("llama").save_pretrained(tmp_path / "here")
    toy_text_config("llama").save_pretrained(tmp_path / "copy")
    trained_on(adapter, known_as if known_as != "here" else str(tmp_path / "copy"))
    (notice,) = read(processes, adapter, str(tmp_path / "here")).notices
    assert f"'{tmp_path / 'here'}'" in notice and ("hub/llama-a" in notice or f"'{tmp_path / 'copy'}'" in notice)


def test_the_same_base_by_another_path_needs_no_notice(processes: Processes, adapter: Path, tmp_path: Path) -> None:
    toy_text_config("llama").save_pretrained(tmp_path / "here")
    (tmp_path / "link").symlink_to(tmp_path / "here")
    trained_on(adapter, str(tmp_path / "link"))
    assert read(processes, adapter, str(tmp_path / "here")).notices == []


def test_an_adapter_of_a_base_of_another_architecture_is_refused(
    processes: Processes, adapter: Path, tmp_path: Path
) -> None:
    toy_text_config("llama").save_pretrained(tmp_path / "llama")
    toy_text_config("qwen2").save_pretrained(tmp_path / "qwen2")
    trained_on(adapter, str(tmp_path / "qwen2"))
    with pytest.raises(UserInputError, match="was trained on another model") as caught:
        read(processes, adapter, str(tmp_path / "llama"))
    assert "qwen2" in caught.value.why and "llama" in caught.value.why


def test_an_adapter_of_another_kind_is_refused(processes: Processes, tmp_path: Path) -> None:
    from peft import LoHaConfig

    get_peft_model(toy(), LoHaConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(UserInputError) as caught:
        read(processes, tmp_path)
    assert "peft_type" in caught.value.why and "LOHA" in caught.value.why


def test_a_runs_folder_stands_for_its_final_adapter_and_nothing_else_is_one(adapter: Path, tmp_path: Path) -> None:
    adapter.rename(tmp_path / "final")
    assert adapter_folder(tmp_path) == tmp_path / "final"
    for wrong, told in ((tmp_path / "nowhere", "does not exist"), (tmp_path / "final" / "..", "contains no adapter")):
        if wrong.exists():
            (tmp_path / "final" / "adapter_model.safetensors").unlink()
        with pytest.raises(UserInputError, match=told):
            adapter_folder(wrong)


def test_without_validation_rows_there_is_nothing_to_evaluate(processes: Processes) -> None:
    from contextlib import ExitStack

    config = RunConfig(model=ModelSection(model_name_or_path="m"), data=DataSection(dataset_name_or_path="d"))
    with ExitStack() as at_end, pytest.raises(UserInputError, match=r"data\.val_split is null"):
        temporary_run(config, processes, Evaluation(), at_end)


def test_an_evaluation_that_is_interrupted_says_so_with_its_exit_code_and_leaves_nothing(
    toy_model: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    config = toy_config(tmp_path, toy_model, toy_data, data={"val_split": "validation"})
    stop = StopRequest()
    monkeypatch.setattr(stop, "wait_for_step", lambda: setattr(stop, "signal", signal.SIGINT))
    try:
        assert train(load_config(config, environ={}), stop=stop, evaluation=Evaluation()) == INTERRUPTED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert "the evaluation was not finished" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists() and not list((tmp_path / "tmp").glob("shardtune-*"))
