"""`shardtune init`: a config that is commented, valid, and trains as it was written."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml
from running import Command, events
from toys import WORDS, toy_mistral4

from shardtune.config import load_config
from shardtune.errors import UserInputError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(*arguments: object) -> str:
    """In this process: it imports no torch, and takes as long as its imports."""
    from typer.testing import CliRunner

    from shardtune.cli.main import app

    result = CliRunner().invoke(app, ["init", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(result.output)


def pairs(file: Path, rows: int = 300) -> Path:
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    lines = [{"prompt": f"{words(draw.randint(4, 40))} =>", "completion": f" {words(5)}"} for _ in range(rows)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_config_for_named_gpus_is_commented_and_valid(toy_model: Path) -> None:
    init("--model", toy_model, "--data", pairs(Path("train.jsonl")), "--gpus", "2xH200", "--nodes", 2)
    text = Path("config.yaml").read_text()
    config = load_config(Path("config.yaml")).config
    assert text.startswith("# Written by shardtune init for 2 nodes with 2 × H200 each.\n")
    assert config.model.model_name_or_path == str(toy_model) and config.data.max_length == 256  # the toy's context
    assert config.data.val_split == 0.1 and config.train.load_best_model_at_end
    assert config.parallel.shard == "auto" and "# auto = replicate: the fastest that fits" in text
    assert "GiB per GPU" in text and "tokens/s" in text
    assert "# auto = prompt-completion (columns 'prompt' and 'completion')." in text
    assert "99 % of the rows have at most" in text and "counted with the model's tokenizer" in text
    assert (config.cluster.nodes, config.cluster.gpus_per_node, config.cluster.gpu) == (2, 2, "H200")


def test_what_a_setting_probably_does_not_mean_is_said(toy_model: Path) -> None:
    words = ("--model", toy_model, "--data", pairs(Path("train.jsonl")), "--gpus", "2xH200")
    said = init(*words, "-o", r"data.prompt_template={prompt}\n{completion}")
    assert r"-o $'data.prompt_template={question}\n{answer}'" in said
    assert "backslash" not in init(*words, "--force", "-o", "data.prompt_template={prompt}\n{completion}")


def test_routed_experts_get_no_adapters(tmp_path: Path) -> None:
    model = toy_mistral4(tmp_path / "mixture")
    init("--model", model, "--data", pairs(Path("train.jsonl")), "--gpus", "H100")
    assert load_config(Path("config.yaml")).config.lora.experts is False


def test_a_model_that_is_not_here_is_not_downloaded(tmp_path: Path) -> None:
    init("--model", "org/model", "--data", pairs(Path("train.jsonl")), "--gpus", "8xH100")
    text = Path("config.yaml").read_text()
    assert "The model is not on this machine" in text and "at 4 characters per token" in text


def test_the_users_own_values_are_kept(toy_model: Path) -> None:
    init(
        "--model", toy_model, "--data", pairs(Path("train.jsonl")), "--gpus", "H200",
        "--val", "null", "-o", "lora.r=4", "-o", "data.max_length=64",
    )  # fmt: skip
    config = load_config(Path("config.yaml")).config
    assert config.lora.r == 4 and config.data.max_length == 64 and config.data.val_split is None
    assert not config.train.load_best_model_at_end


def test_what_hangs_on_validation_rows_is_known_to_have_an_effect_where_the_data_has_them(toy_model: Path) -> None:
    data = Path("data")
    data.mkdir()
    pairs(data / "train.jsonl"), pairs(data / "validation.jsonl", rows=20)
    words = ("--model", toy_model, "--data", data, "--gpus", "H200", "-o", "train.max_steps=30", "--force")
    said = init(*words, "-o", "train.eval_steps=5", "-o", "train.load_best_model_at_end=true")
    config = load_config(Path("config.yaml"))
    assert "no effect" not in said and config.notices == ()
    assert config.config.data.val_split == "validation" and config.config.train.load_best_model_at_end
    assert (config.config.train.eval_steps, config.config.train.save_steps) == (5, 5)
    assert "train.eval_steps has no effect: there is no data.val_split." in init(
        *words, "-o", "train.eval_steps=5", "--val", "null"
    )


def test_an_existing_file_is_replaced_only_by_force(toy_model: Path) -> None:
    data = pairs(Path("train.jsonl"))
    mine = Path("mine.yaml")
    mine.write_text("# mine\n")
    with pytest.raises(UserInputError, match="exists"):
        init("--model", toy_model, "--data", data, "--output", mine)
    assert mine.read_text() == "# mine\n"
    init("--model", toy_model, "--data", data, "--output", mine, "--force")
    assert yaml.safe_load(mine.read_text())["lora"]["r"] == 16


def test_unsuitable_data_and_unknown_gpus_are_refused_and_nothing_is_written(toy_model: Path) -> None:
    other = Path("other.jsonl")
    other.write_text('{"question": "a", "reply": "b"}\n')
    with pytest.raises(UserInputError, match="Cannot detect the data format") as refused:
        init("--model", toy_model, "--data", other)
    assert "data.prompt_template" in refused.value.fix
    with pytest.raises(UserInputError, match="H900"):
        init("--model", toy_model, "--data", pairs(Path("train.jsonl")), "--gpus", "2xH900")
    with pytest.raises(UserInputError, match="does not exist"):
        init("--model", "./nowhere", "--data", other)
    assert not Path("config.yaml").exists()


def test_wrong_values_are_named_by_their_options_and_not_by_a_file_of_inits_own(toy_model: Path) -> None:
    with pytest.raises(UserInputError) as refused:
        init("--model", "", "--data", "", "--val", "2")
    assert refused.value.what.startswith("shardtune init: 3 problems found")
    for place in ("--model  model.model_name", "--data  data.dataset_name", "-o data.val_split=2  data.val_split"):
        assert f"\n{place}" in refused.value.what
    with pytest.raises(UserInputError, match="Could not write") as unwritten:
        init("--model", toy_model, "--data", pairs(Path("train.jsonl")), "--output", ".", "--force")
    assert "Is a directory" in unwritten.value.why


def test_a_split_that_the_data_has_not_is_refused_and_nothing_is_written(toy_model: Path) -> None:
    data = Path("data")
    data.mkdir()
    pairs(data / "validation.jsonl")
    with pytest.raises(UserInputError, match="has no split 'train'"):
        init("--model", toy_model, "--data", data)
    for model in (toy_model, "org/not-here"):
        with pytest.raises(UserInputError, match="has no split 'test'"):
            init("--model", model, "--data", data / "validation.jsonl", "--val", "test")
    assert not Path("config.yaml").exists()


def test_data_files_of_a_folder_that_are_not_read_are_told(toy_model: Path) -> None:
    data = Path("data")
    data.mkdir()
    pairs(data / "b.jsonl")
    (data / "a.csv").write_text("prompt,completion\nx,y\n")
    assert "not read: data/a.csv" in " ".join(init("--model", toy_model, "--data", data).split())


def test_what_cannot_fit_is_refused_before_anything_is_written(toy_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "70b"
    shutil.copytree(toy_model, model)
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "head_dim": 128}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **large, **heads}))
    arguments = ("--model", model, "--data", pairs(Path("train.jsonl")), "-o", "model.weights=random")
    arguments += ("-o", "parallel.offload_params=false")
    with pytest.raises(UserInputError, match="fit") as refused:
        init(*arguments, "--gpus", "L40S")
    assert refused.value.code == "does-not-fit" and not Path("config.yaml").exists()
    init(*arguments, "--gpus", "8xH200")


def test_the_config_trains_as_it_was_written(shardtune: Command, toy_model: Path) -> None:
    """The steps it counts on are those that the run takes."""
    pairs(Path("train.jsonl"), rows=120)
    shown = shardtune("init", "--model", toy_model, "--data", "train.jsonl", "-o", "parallel.device=cpu")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[1:] == ["  shardtune plan config.yaml", "  shardtune train config.yaml"]
    result = shardtune("train", "config.yaml", "--run-id", "first")
    assert result.returncode == 0, result.stderr
    (planned,) = events(Path("runs/first"), "plan")
    assert f"# Of about {planned['math']['steps']} steps." in Path("config.yaml").read_text()
