"""Is every key of an accelerate file translated or answered, and do file and environment say the same?"""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.config import accelerate_file, accelerate_keys
from shardtune.config.accelerate_file import (
    ACCELERATE_VARIABLES,
    Translation,
    Verdict,
    neutralise,
    reference_page,
    resolve_conflicts,
    translate_environment,
    translate_file,
    verdict_line,
    verdict_table,
)
from shardtune.config.schema import RunConfig
from shardtune.errors import UserInputError

SAMPLES = Path(__file__).parent / "accelerate_samples"
REPOSITORY = Path(__file__).parents[2]
SMALLEST = {"model": {"model_name_or_path": "m"}, "data": {"dataset_name_or_path": "d"}}


def translate(tmp_path: Path, content: str | dict[str, Any]) -> Translation:
    file = tmp_path / "fsdp.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return translate_file(file)


def fsdp(tmp_path: Path, **keys: Any) -> Translation:
    return translate(tmp_path, {"distributed_type": "FSDP", "fsdp_config": keys})


def verdict(translation: Translation, key: str) -> Verdict:
    found = [v for v in translation.verdicts if v.key == key]
    assert len(found) == 1, f"{key}: {found}, problems {translation.problems}"
    return found[0]


def problem(translation: Translation, key: str) -> str:
    found = [f"{what} {change}" for k, what, change in translation.problems if k == key]
    assert len(found) == 1, f"{key}: {translation.problems}"
    return found[0]


# --- whole files ----------------------------------------------------------------------------------------------------


def test_an_fsdp1_file_from_an_article_is_translated_whole() -> None:
    translation = translate_file(SAMPLES / "fsdp1_blog.yaml")
    assert translation.problems == ()
    assert translation.values == {
        "parallel.backward_prefetch": 1,
        "parallel.forward_prefetch": 0,
        "parallel.offload_params": True,
        "parallel.reshard_after_forward": False,
        "parallel.shard": "full",
        "parallel.transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "parallel.nproc": 2,
        "train.bf16": True,
    }
    assert translation.sources["parallel.reshard_after_forward"] == "fsdp_sharding_strategy"
    by_verdict = {name: {v.key for v in translation.verdicts if v.verdict == name} for name in ("implied by FSDP2",)}
    assert by_verdict["implied by FSDP2"] == {"fsdp_limit_all_gathers", "fsdp_sync_module_states"}
    assert verdict(translation, "state_dict_cpu_offload").verdict == "no effect"
    assert verdict(translation, "fsdp_use_orig_params").verdict == "no effect"  # the file says false


def test_an_fsdp2_file_as_accelerate_writes_it_is_translated_whole() -> None:
    translation = translate_file(SAMPLES / "fsdp2.yaml")
    assert translation.problems == ()
    assert translation.values == {
        "parallel.nproc": 8,
        "parallel.offload_params": False,
        "parallel.reshard_after_forward": False,
        "parallel.transformer_layer_cls_to_wrap": "Mistral4DecoderLayer",
        "train.bf16": True,
        "train.gradient_checkpointing": True,
    }
    assert "empty adapter" in verdict(translation, "fsdp_activation_checkpointing").why


def test_a_file_for_three_machines_gives_one_machines_share_and_the_command_to_start_it() -> None:
    translation = translate_file(SAMPLES / "three_machines.yaml")
    assert translation.problems == ()
    assert translation.values["parallel.nproc"] == 2
    assert translation.values["cluster.nodes"] == 3
    assert translation.values["parallel.transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer", "LlamaMLP"]
    command = verdict(translation, "num_machines").why
    assert "shardtune train CONFIG --nnodes 3 --node-rank R --master-addr 10.0.0.7 --master-port 29501" in command
    assert "num_machines" in verdict(translation, "machine_rank").why


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_a_sample_gets_exactly_one_answer(sample: Path) -> None:
    content = yaml.safe_load(sample.read_text(encoding="utf-8"))
    written = [*(k for k in content if k != "fsdp_config"), *content["fsdp_config"]]
    translation = translate_file(sample)
    answered = [v.key for v in translation.verdicts] + [key for key, _, _ in translation.problems]
    assert sorted(answered) == sorted(written)
    assert all(v.why for v in translation.verdicts)


def test_every_value_the_table_can_set_is_accepted_by_the_config() -> None:
    for keys in accelerate_keys.SECTIONS.values():
        for key in keys.values():
            for meaning in key.values.values():
                if meaning.path:
                    value = 2 if meaning.value is accelerate_keys.FROM_FILE and key.kind == "number" else meaning.value
                    value = "LlamaDecoderLayer" if value is accelerate_keys.FROM_FILE else value
                    section, name = meaning.path.split(".")
                    config = RunConfig.model_validate({**SMALLEST, section: {name: value}})
                    assert getattr(getattr(config, section), name) == value


# --- every key accelerate knows -------------------------------------------------------------------------------------


def keys_of_installed_accelerate() -> dict[str, set[str]]:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin

    arguments = set(vars(launch_command_parser().parse_args(["script.py"])))
    # Fields of the plugin that only Python code can set, or that the file spells otherwise.
    python_only = {"mixed_precision_policy", "state_dict_config", "optim_state_dict_config", "param_init_fn"}
    spelled = {"transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap", "cpu_offload": "offload_params"}
    plugin = {f.name for f in dataclasses.fields(FullyShardedDataParallelPlugin)} - python_only - {"fsdp_version"}
    return {
        "": {f.name for config in (ClusterConfig, SageMakerConfig) for f in dataclasses.fields(config)},
        "fsdp_config": {name for name in arguments if name.startswith("fsdp_")}
        | {f"fsdp_{spelled.get(name, name)}" for name in plugin},
        "parallelism_config": {name for name in arguments if name.startswith("parallelism_config_")},
    }


@pytest.mark.parametrize("section", ["", "fsdp_config", "parallelism_config"])
def test_every_key_the_installed_accelerate_knows_gets_a_verdict_or_a_problem(tmp_path: Path, section: str) -> None:
    keys = keys_of_installed_accelerate()[section] - {"fsdp_config", "parallelism_config"}
    assert len(keys) > 10  # the enumeration itself must not come out empty
    # Each with a number, which suits some keys and must be answered by the others.
    written = dict.fromkeys(keys, 1)
    translation = translate(tmp_path, {section: written} if section else written)
    answers = {v.key for v in translation.verdicts} | {key for key, _, _ in translation.problems}
    assert answers == keys
    unknown = [key for key, what, _ in translation.problems if "no such key" in what or "wrong place" in what]
    assert unknown == [], "accelerate knows keys that accelerate_keys.py does not"


def test_the_choices_of_the_table_are_those_of_the_installed_accelerate() -> None:
    from accelerate.utils import DistributedType, constants
    from accelerate.utils.dataclasses import ComputeEnvironment, PrecisionType

    keys = {**accelerate_keys.SECTIONS[""], **accelerate_keys.SECTIONS["fsdp_config"]}
    expected = {
        "fsdp_sharding_strategy": constants.FSDP_SHARDING_STRATEGY,
        "fsdp_auto_wrap_policy": constants.FSDP_AUTO_WRAP_POLICY,
        "fsdp_backward_prefetch": constants.FSDP_BACKWARD_PREFETCH,
        "fsdp_state_dict_type": constants.FSDP_STATE_DICT_TYPE,
        "mixed_precision": [choice.value for choice in PrecisionType],
        "compute_environment": [choice.value for choice in ComputeEnvironment],
    }
    for name, choices in expected.items():
        assert set(keys[name].values) == set(choices), name
    # TPU is what XLA was called; files with it are still about.
    assert set(keys["distributed_type"].values) == {choice.value for choice in DistributedType} | {"TPU"}


def test_the_numbers_of_old_files_mean_what_torchs_enums_say() -> None:
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType

    keys = accelerate_keys.SECTIONS["fsdp_config"]
    for name, enum in (
        ("fsdp_sharding_strategy", ShardingStrategy),
        ("fsdp_backward_prefetch", BackwardPrefetch),
        ("fsdp_state_dict_type", StateDictType),
    ):
        assert keys[name].aliases == {str(member.value): member.name.lstrip("_") for member in enum}


# --- single keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "path", "becomes"),
    [
        ("fsdp_sharding_strategy", "FULL_SHARD", "parallel.reshard_after_forward", True),
        ("fsdp_sharding_strategy", 2, "parallel.reshard_after_forward", False),
        ("sharding_strategy", "full_shard", "parallel.reshard_after_forward", True),
        ("fsdp_reshard_after_forward", "no", "parallel.reshard_after_forward", False),
        ("fsdp_reshard_after_forward", "SHARD_GRAD_OP", "parallel.reshard_after_forward", False),
        ("fsdp_sharding_strategy", "FULL_SHARD", "parallel.shard", "full"),
        ("fsdp_sharding_strategy", "HYBRID_SHARD", "parallel.shard", "hybrid"),
        ("fsdp_sharding_strategy", "HYBRID_SHARD", "parallel.reshard_after_forward", True),
        ("fsdp_reshard_after_forward", "HYBRID_SHARD_ZERO2", "parallel.reshard_after_forward", False),
        ("fsdp_sharding_strategy", "NO_SHARD", "parallel.shard", "replicate"),
        ("fsdp_forward_prefetch", "True", "parallel.forward_prefetch", 1),
        ("fsdp_forward_prefetch", False, "parallel.forward_prefetch", 0),
        ("fsdp_backward_prefetch", "BACKWARD_POST", "parallel.backward_prefetch", 0),
        ("fsdp_backward_prefetch", "NO_PREFETCH", "parallel.backward_prefetch", 0),
        ("fsdp_backward_prefetch_policy", "BACKWARD_PRE", "parallel.backward_prefetch", 1),
        ("offload_params", 1, "parallel.offload_params", True),
        ("fsdp_transformer_layer_cls_to_wrap", ["A", "B"], "parallel.transformer_layer_cls_to_wrap", ["A", "B"]),
        ("fsdp_activation_checkpointing", "true", "train.gradient_checkpointing", True),
        ("fsdp_activation_checkpointing_offload", "true", "train.offload_activations", True),
    ],
)
def test_an_fsdp_value_becomes_the_setting_that_means_it(
    tmp_path: Path, key: str, value: Any, path: str, becomes: Any
) -> None:
    translation = fsdp(tmp_path, **{key: value})
    assert translation.problems == ()
    assert translation.values[path] == becomes
    assert set(translation.sources.values()) == {key}
    assert verdict(translation, key).verdict == "honoured"
    assert f"{path} = " in verdict(translation, key).sets


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("fsdp_reshard_after_forward", "maybe", "Allowed: true or false"),
        ("fsdp_sharding_strategy", "ZERO_3", "Allowed: FULL_SHARD, SHARD_GRAD_OP"),
        ("fsdp_sharding_strategy", True, "Allowed: FULL_SHARD"),
        ("fsdp_version", 3, "Allowed: 1, 2"),
        ("fsdp_version", True, "Allowed: 1, 2"),
        ("fsdp_offload_params", "gpu", "Allowed: true or false"),
        ("fsdp_transformer_layer_cls_to_wrap", 5, "a class name"),
        ("fsdp_ofload_params", True, "Did you mean `fsdp_offload_params`?"),
        ("ofload_params", True, "Did you mean `offload_params`?"),
        ("zzz", True, "Remove it."),
        ("num_processes", 4, "Move it at the top level"),
    ],
)
def test_a_wrong_fsdp_key_or_value_is_a_problem_that_says_what_to_write(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    translation = fsdp(tmp_path, **{key: value})
    assert expected in problem(translation, key)
    assert "fsdp.yaml:3: " in problem(translation, key)
    assert translation.values == {}
    assert key not in {v.key for v in translation.verdicts}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("distributed_type", "DEEPSPEED", "Set distributed_type: FSDP"),
        ("distributed_type", "MEGATRON_LM", "Set distributed_type: FSDP"),
        ("distributed_type", "MULTI_NPU", "Ascend"),
        ("distributed_type", "DDP", "Allowed: FSDP, MULTI_GPU, MULTI_CPU or NO"),
        ("mixed_precision", "fp16", "Set mixed_precision: bf16"),
        ("mixed_precision", "fp8", "Set mixed_precision: bf16"),
        ("mixed_precision", "bf61", "Allowed: bf16 or no"),
        ("fp16", True, "Set mixed_precision: bf16"),
        ("num_processes", 0, "a whole number from 1"),
        ("num_processes", "many", "a whole number from 1"),
        ("num_processes", True, "a whole number from 1"),
        ("num_machines", 0, "a whole number from 1"),
        ("compute_environment", "AMAZON_SAGEMAKER", "SageMaker"),
        ("fsdp_config", "FULL_SHARD", "a mapping of settings"),
        ("mixed_precison", "bf16", "Did you mean `mixed_precision`?"),
        ("fsdp_offload_params", True, "Move it under `fsdp_config:`"),
        ("state_dict_cpu_offload", True, "Move it under `fsdp_config:`"),
    ],
)
def test_a_wrong_top_level_key_or_value_is_a_problem_that_says_what_to_write(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    assert expected in problem(translate(tmp_path, {key: value}), key)


def test_processes_that_the_machines_cannot_share_evenly_are_a_problem(tmp_path: Path) -> None:
    translation = translate(tmp_path, {"num_machines": 2, "num_processes": 7})
    assert "7 processes cannot be shared evenly by 2 machines" in problem(translation, "num_processes")
    assert "parallel.nproc" not in translation.values


def test_minus_one_process_leaves_the_number_to_shardtune(tmp_path: Path) -> None:
    translation = translate(tmp_path, {"num_processes": -1})
    assert translation.values == {}
    assert verdict(translation, "num_processes").verdict == "no effect"


@pytest.mark.parametrize("written", ["no", "'no'", "NO"])
def test_a_bare_no_in_yaml_means_no_mixed_precision_and_not_a_wrong_value(tmp_path: Path, written: str) -> None:
    translation = translate(tmp_path, f"mixed_precision: {written}\n")
    assert translation.values == {"train.bf16": False}


@pytest.mark.parametrize("content", [{"use_cpu": True}, {"distributed_type": "MULTI_CPU"}, {"use_cpu": "yes"}])
def test_asking_for_the_cpu_is_honoured(tmp_path: Path, content: dict[str, Any]) -> None:
    assert translate(tmp_path, content).values == {"parallel.device": "cpu"}


def test_checkpointing_off_in_accelerate_does_not_turn_shardtunes_own_off(tmp_path: Path) -> None:
    # Files for the Trainer say false because the Trainer's own is on; both on raises there.
    translation = fsdp(tmp_path, fsdp_activation_checkpointing=False)
    assert translation.values == {}
    assert "train.gradient_checkpointing decides" in verdict(translation, "fsdp_activation_checkpointing").why


def test_null_says_nothing_and_is_answered(tmp_path: Path) -> None:
    translation = fsdp(tmp_path, fsdp_transformer_layer_cls_to_wrap=None)
    assert translation.values == {}
    assert verdict(translation, "fsdp_transformer_layer_cls_to_wrap").verdict == "no effect"


@pytest.mark.parametrize(
    ("version", "wins", "loses", "value"),
    [
        (1, "fsdp_sharding_strategy", "fsdp_reshard_after_forward", True),
        (2, "fsdp_reshard_after_forward", "fsdp_sharding_strategy", False),
    ],
)
def test_two_keys_that_disagree_are_settled_as_accelerate_would_and_said(
    tmp_path: Path, version: int, wins: str, loses: str, value: bool
) -> None:
    translation = fsdp(
        tmp_path, fsdp_version=version, fsdp_sharding_strategy="FULL_SHARD", fsdp_reshard_after_forward=False
    )
    assert translation.values["parallel.reshard_after_forward"] is value
    assert translation.sources["parallel.reshard_after_forward"] == wins
    assert verdict(translation, wins).verdict == "honoured"
    assert verdict(translation, loses).verdict == "conflicts"
    assert wins in verdict(translation, loses).why


def test_a_key_given_in_two_spellings_or_twice_is_a_problem(tmp_path: Path) -> None:
    two = fsdp(tmp_path, fsdp_offload_params=True, offload_params=False)
    assert any("the same setting as" in what for _, what, _ in two.problems)
    twice = translate(tmp_path, "num_processes: 2\nmixed_precision: bf16\nnum_processes: 4\n")
    assert "fsdp.yaml:3: the key is given twice" in problem(twice, "num_processes")


@pytest.mark.parametrize(
    ("keys", "becomes"),
    [
        ({"dp_shard_size": 4}, {"parallel.shard": "full"}),
        ({"dp_shard_size": 4, "tp_size": 1, "cp_size": 1}, {"parallel.shard": "full"}),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, {"parallel.shard": "hybrid", "parallel.shard_size": 2}),
        ({"dp_shard_size": 2}, {"parallel.shard": "hybrid", "parallel.shard_size": 2}),
        ({"dp_replicate_size": 2}, {"parallel.shard": "hybrid", "parallel.shard_size": 2}),
        ({"dp_replicate_size": 3}, "dp_replicate_size 3 does not fit num_processes: 4"),
        ({"dp_shard_size": 3}, "dp_shard_size 3 does not fit num_processes: 4"),
        ({"dp_replicate_size": 4, "dp_shard_size": 1}, {"parallel.shard": "replicate"}),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 4},
            "dp_replicate_size 2 × dp_shard_size 4 does not fit num_processes: 4",
        ),
        ({"dp_shard_size": 4, "tp_size": 2}, "tensor parallelism is not supported"),
    ],
)
def test_replicas_and_shards_of_a_parallelism_config_become_the_mesh(
    tmp_path: Path, keys: dict[str, int], becomes: dict[str, Any] | str
) -> None:
    section = {f"parallelism_config_{name}": value for name, value in keys.items()}
    translation = translate(tmp_path, {"num_processes": 4, "parallelism_config": section})
    if isinstance(becomes, str):
        assert [what for _, what, _ in translation.problems if becomes in what]
    else:
        assert not translation.problems
        assert {path: v for path, v in translation.values.items() if path != "parallel.nproc"} == becomes
    assert {v.key for v in translation.verdicts} | {key for key, _, _ in translation.problems} == {
        "num_processes",
        *section,
    }


def test_what_a_replicated_base_does_not_read_has_no_effect(tmp_path: Path) -> None:
    translation = fsdp(tmp_path, fsdp_sharding_strategy="NO_SHARD", fsdp_reshard_after_forward=True)
    assert translation.values == {"parallel.shard": "replicate"}
    assert verdict(translation, "fsdp_reshard_after_forward").verdict == "no effect"
    own = resolve_conflicts(fsdp(tmp_path, fsdp_sharding_strategy="FULL_SHARD"), {"parallel.shard": "replicate"})
    assert own.values == {}


def test_gpu_ids_are_not_dropped_without_a_word(tmp_path: Path) -> None:
    assert "CUDA_VISIBLE_DEVICES" in verdict(translate(tmp_path, {"gpu_ids": "2,3"}), "gpu_ids").why


# --- files that are no files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "is not a mapping"),
        ("distributed_type: FSDP\nfsdp_config:\n\tfsdp_version: 2\n", "fsdp.yaml:3:1: a tab"),
        ("distributed_type: FSDP\nfsdp_config: {a: 1\n", "not valid YAML"),
        ("a: b: c\n", "fsdp.yaml:1:5: the accelerate config is not valid YAML"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, content: str, expected: str) -> None:
    with pytest.raises(UserInputError) as caught:
        translate(tmp_path, content)
    assert expected in caught.value.what
    assert caught.value.fix


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="does not exist"):
        translate_file(tmp_path / "none.yaml")
    with pytest.raises(UserInputError, match="is a folder, not a file"):
        translate_file(tmp_path)


# --- the user's own settings ----------------------------------------------------------------------------------------


def test_the_users_own_setting_wins_and_the_table_says_so() -> None:
    translation = translate_file(SAMPLES / "fsdp2.yaml")
    settled = resolve_conflicts(translation, {"parallel.reshard_after_forward": True, "train.bf16": True})
    assert "parallel.reshard_after_forward" not in settled.values
    assert "parallel.reshard_after_forward" not in settled.sources
    lost = verdict(settled, "fsdp_reshard_after_forward")
    assert (lost.verdict, lost.value, lost.sets) == ("conflicts", "false", "parallel.reshard_after_forward = true")
    assert verdict(settled, "mixed_precision") == verdict(translation, "mixed_precision")
    assert settled.values["train.bf16"] is True


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("parallel.nproc", "8"),
        ("parallel.reshard_after_forward", "false"),
        ("parallel.transformer_layer_cls_to_wrap", ["Mistral4DecoderLayer"]),
    ],
)
def test_the_same_value_written_otherwise_is_no_conflict(path: str, own: Any) -> None:
    translation = translate_file(SAMPLES / "fsdp2.yaml")
    assert resolve_conflicts(translation, {path: own}) == translation


def test_fp16_in_the_file_is_moot_beside_the_users_own_bf16(tmp_path: Path) -> None:
    translation = translate(tmp_path, {"mixed_precision": "fp16", "num_machines": 0})
    settled = resolve_conflicts(translation, {"train.bf16": True})
    assert [key for key, _, _ in settled.problems] == ["num_machines"]
    lost = verdict(settled, "mixed_precision")
    assert (lost.verdict, lost.value, lost.sets) == ("conflicts", "fp16", "train.bf16 = true")


# --- accelerate launch ----------------------------------------------------------------------------------------------


def environment_of(file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the installed `accelerate launch --config_file FILE` puts into its workers' environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.delenv(name)
    arguments = ["--config_file", str(file), "-m", "shardtune", "train", "config.yaml"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    args.main_process_port = 0  # a free one; the port is not what is looked at
    args.machine_rank = 1  # accelerate asks whether the port is free on machine 0 only
    return prepare_multi_gpu_env(args)


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    config = RunConfig.model_validate(SMALLEST)
    paths = {
        m.path
        for keys in accelerate_keys.SECTIONS.values()
        for key in keys.values()
        for m in key.values.values()
        if m.path
    }
    defaults = {path: getattr(getattr(config, path.split(".")[0]), path.split(".")[1]) for path in paths}
    return {**defaults, **values}


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_launch_hands_its_workers_the_same_settings_as_the_file(
    sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_file = translate_file(sample)
    by_environment = translate_environment(environment_of(sample, monkeypatch))
    assert by_environment is not None
    assert by_environment.problems == ()
    expected = with_defaults(by_file.values)
    # The processes run already on the other road; and the launcher's own defaults read there like silence.
    expected["parallel.nproc"], expected["cluster.nodes"] = "auto", 1
    if by_file.values.get("parallel.forward_prefetch") == 0:
        expected["parallel.forward_prefetch"] = 1
        assert "set parallel.forward_prefetch yourself" in verdict(by_environment, "FSDP_FORWARD_PREFETCH").why
    if by_file.values.get("parallel.reshard_after_forward") is True:
        expected["parallel.reshard_after_forward"] = "auto"
    if by_file.values.get("parallel.offload_params") is False:
        expected["parallel.offload_params"] = "auto"
    assert with_defaults(by_environment.values) == expected
    assert len(by_environment.values) >= 3


def test_a_silent_fsdp_file_sets_nothing_through_accelerate_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {}\n", encoding="utf-8")
    environment = environment_of(file, monkeypatch)
    written = {name: value.lower() for name, value in environment.items() if name in accelerate_keys.LAUNCH_DEFAULTS}
    # ACCELERATE_USE_CPU is written by the launcher for a single process only.
    known = {name: default.value for name, default in accelerate_keys.LAUNCH_DEFAULTS.items()}
    assert {**written, "ACCELERATE_USE_CPU": "false"} == known
    translation = translate_environment(environment)
    assert translation is not None
    assert translation.values == {}
    assert verdict(translation, "ACCELERATE_MIXED_PRECISION").verdict == "no effect"


def test_every_variable_accelerate_launch_writes_for_fsdp_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = environment_of(SAMPLES / "fsdp1_blog.yaml", monkeypatch)
    written = {name for name in environment if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))}
    assert written - set(ACCELERATE_VARIABLES) == set()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin", "FSDP_OFFLOAD_PARAMS": "true"},
        {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False", "ACCELERATE_DYNAMO_BACKEND": "NO"},
    ],
)
def test_an_environment_in_which_accelerate_said_nothing_is_none(environment: dict[str, str]) -> None:
    assert translate_environment(environment) is None


def test_mixed_precision_and_cpu_are_taken_from_a_launch_without_fsdp() -> None:
    translation = translate_environment({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True"})
    assert translation is not None
    assert translation.values == {"train.bf16": True, "parallel.device": "cpu"}
    assert translation.sources["train.bf16"] == "ACCELERATE_MIXED_PRECISION"


@pytest.mark.parametrize(("shards", "becomes"), [("4", "full"), ("2", "hybrid")])
def test_a_launch_that_shards_over_some_of_the_processes_is_hybrid(shards: str, becomes: str) -> None:
    launched = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "WORLD_SIZE": "4"}
    translation = translate_environment({**launched, "PARALLELISM_CONFIG_DP_SHARD_SIZE": shards})
    assert translation is not None and not translation.problems
    assert translation.values["parallel.shard"] == becomes


def test_a_deepspeed_launch_is_refused() -> None:
    translation = translate_environment({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "bf16"})
    assert translation is not None
    assert "DeepSpeed" in problem(translation, "ACCELERATE_USE_DEEPSPEED")


def test_fp16_by_launch_is_moot_beside_the_users_own_bf16() -> None:
    translation = translate_environment({"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert translation is not None
    assert problem(translation, "ACCELERATE_MIXED_PRECISION")
    assert resolve_conflicts(translation, {"train.bf16": True}).problems == ()


def test_neutralise_takes_out_what_the_trainer_would_act_on_and_nothing_else() -> None:
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_FP8_BACKEND": "TE",
        "ACCELERATE_DEBUG_MODE": "true",
        "RANK": "0",
        "PATH": "/bin",
    }
    taken = neutralise(environment)
    assert sorted(taken) == [
        "ACCELERATE_FP8_BACKEND",
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_USE_FSDP",
        "FSDP_VERSION",
    ]
    assert set(environment) == {"ACCELERATE_DEBUG_MODE", "RANK", "PATH"}
    assert translate_environment(environment) is None


# --- for people -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_shows_every_key_whole(width: int) -> None:
    from rich.console import Console

    translation = translate_file(SAMPLES / "fsdp1_blog.yaml")
    settled = resolve_conflicts(translation, {"parallel.offload_params": False})
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(verdict_table(settled.verdicts))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    for row in settled.verdicts:
        assert f"{row.key}:" in text
        assert row.sets.partition(" = ")[0] in text
    headings = [line.strip() for line in text.splitlines() if line.strip() in accelerate_file._ORDER]
    assert headings == ["conflicts", "honoured", "implied by FSDP2", "no effect"]


def test_the_line_names_what_lost_and_what_does_nothing_but_not_what_is_in_every_file() -> None:
    settled = resolve_conflicts(
        translate_file(SAMPLES / "fsdp2.yaml"), {"train.bf16": False, "parallel.reshard_after_forward": True}
    )
    line = verdict_line(settled.verdicts)
    assert "2 conflicts (fsdp_reshard_after_forward: false, but parallel.reshard_after_forward = true wins; " in line
    assert "mixed_precision: bf16, but train.bf16 = false wins)" in line
    assert "11 no effect (fsdp_cpu_ram_efficient_loading, fsdp_state_dict_type)" in line


def test_a_key_of_every_file_is_named_when_somebody_changed_it() -> None:
    line = verdict_line(translate_file(SAMPLES / "three_machines.yaml").verdicts)
    assert "debug" in line and "main_training_function" not in line


def test_the_docs_page_is_what_the_table_gives() -> None:
    page = (REPOSITORY / "docs" / "accelerate-files.md").read_text(encoding="utf-8")
    assert page == reference_page(), "python -m shardtune.config.accelerate_file > docs/accelerate-files.md"


def test_the_docs_page_names_every_key() -> None:
    page = reference_page()
    for keys in accelerate_keys.SECTIONS.values():
        for name in keys:
            assert f"`{name}`" in page


def test_reading_a_file_imports_neither_torch_nor_accelerate() -> None:
    code = (
        "import sys; from pathlib import Path; from shardtune.config.accelerate_file import translate_file; "
        f"translate_file(Path({str(SAMPLES / 'fsdp2.yaml')!r})); "
        "print([m for m in ('torch', 'accelerate', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "[]"
