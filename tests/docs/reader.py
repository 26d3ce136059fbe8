"""Where are the commands of the pages typed? A folder with every file they name, small enough to train in seconds.

What a page says stays what is typed, but for these: a model's path becomes that of a toy, placeholders (RUN, NAME, R) become
real ones, eight processes and three nodes become two, and what would train for hours gets two steps.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from running import REPOSITORY
from shown_commands import ShownCommand
from toys import mistral4_config, save_toy, toy_text_config, wrapper_config

RUN, OTHER_RUN, NESTED_RUN = "20261115-104512-3fa9", "20261116-091500-77c1", "quickstart/20261116-175702-ff8e"
JOB = "ft"
STEPS = 4
# Commands about jobs are typed in a folder whose configs name paths in containers.
OF_CLUSTERS = ("cluster", "submit", "jobs", "status", "logs", "describe", "cancel", "suspend", "resume", "pull")
SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("ranks", int(total), sys.argv[1:], flush=True)
dist.destroy_process_group()
"""
_PLACES = {
    r"(?<![\w.])/models/": "models/", r"(?<![\w.])/data/runs": "volumes/runs", r"(?<![\w.])/data/models": "volumes/models",
    r"(?<![\w.])/data/sets": "volumes/data", r"(?<![\w.])/data/": "data/",
    r"mistralai/Mistral-Small-4-119B-2603": "models/mistral-small-4",
    r"HuggingFaceTB/SmolLM2-135M-Instruct": "models/llama-3.1-8b", r"meta-llama/Llama-3.2-1B": "models/llama-3.1-8b",
}  # fmt: skip
_PLACEHOLDERS = {
    r"\bRUN\b": RUN,
    r"\bNAME\b": JOB,
    r"step-000200": f"step-{STEPS:06d}",
    r"report shapes": f"report {RUN}",
}
# Nobody waits for hours here, and this machine has no GPU.
_SMALL = {
    "train.max_steps": 2, "parallel.device": "cpu", "model.torch_dtype": "float32", "train.fp8_compute": "false",
    "model.base_precision": "bf16", "data.max_length": 256, "train.effective_batch_size": 2,
    "train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": "auto",
}  # fmt: skip


def words_to_type(command: ShownCommand) -> list[str]:
    """The words behind `shardtune`, as they are typed in the reader's folder."""
    text = command.text
    for pattern, there in {**_PLACES, **_PLACEHOLDERS}.items():
        text = re.sub(pattern, there, text)
    words = ShownCommand(command.page, text).words
    words = words[words.index("shardtune") + 1 :]
    for option in ("--nproc", "--nnodes"):
        if option in words and words[0] in ("run", "train", "eval-loss", "doctor"):
            words[words.index(option) + 1] = "2"
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *_added(words), *words[end:]]


def _added(words: list[str]) -> list[str]:
    """What makes a command short, or keeps it from waiting for an answer."""
    match words[0]:
        case "train" | "eval-loss":
            return [word for key, value in _SMALL.items() for word in ("-o", f"{key}={value}")]
        case "quickstart":
            return ["--tiny"]
        case "cancel":
            return ["--yes"]
        case "dashboard":
            return ["--port", "0"]
        case "submit" if "slurm" in words:
            return [
                "-o",
                "cluster.image=null",
                "-o",
                "cluster.volumes=[]",
                *([] if "--print" in words else ["--print"]),
            ]
        case "submit" if "--print" not in words and "--dry-run" not in words and "--output" not in words:
            # These start programs that are not here, or pods that tests/cluster/test_local_pods.py starts.
            there = next((word for word in ("podman", "docker", "runai") if word in words), None)
            return ["--print"] if there else ["--dry-run", "client"] if "local-pods" in words else []
    return []


def make_folder(folder: Path) -> Path:
    """Everything but the runs: `here/` for what is done on a machine, `cluster/` for what is sent to one."""
    here, cluster = folder / "here", folder / "cluster"
    for place in (here, cluster):
        _write_shared(place)
    _write_models(here / "models")
    _write_data(here / "data")
    for name in ("train.jsonl", "my-corpus.txt"):
        shutil.copy(here / "data" / name, here / name)
    _write(here / "run.yaml", _run_config())
    _write(here / "cluster.yaml", {"cluster": {"image": "registry.example/ml/vision@sha256:" + "0" * 64}})
    for file in sorted((REPOSITORY / "configs").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        (cluster / "configs" / file.name).write_text(text, encoding="utf-8")
        for pattern, there in _PLACES.items():
            text = re.sub(pattern, there, text)
        (here / "configs" / file.name).write_text(text.replace("/runs", "runs"), encoding="utf-8")
    for volume in ("runs", "models", "data"):
        (cluster / "volumes" / volume).mkdir(parents=True)
    _write(cluster / "run.yaml", _cluster_config())
    section = _page("cluster.md").partition("## Any script\n")[2]
    (cluster / "cluster.yaml").write_text(section.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    for name in ("submit.sh", "launch.sh"):
        (cluster / name).write_text(_file_of("cluster-import.md", name), encoding="utf-8")
    (here / "fsdp.yaml").write_text(_file_of("from-trl.md", "fsdp.yaml"), encoding="utf-8")
    _write(cluster / "job.yaml", _todays_job())
    return folder


def profiles() -> str:
    """The profiles that pages show, for ~/.config/shardtune/clusters.yaml."""
    return _page("cluster.md").partition("## Profiles\n")[2].partition("```yaml\n")[2].partition("```")[0]


def _file_of(page: str, name: str) -> str:
    """A block below a bold file name."""
    (found,) = re.findall(rf"^\*\*`{name}`\*\*\n\n```\w+\n(.*?)^```", _page(page), re.DOTALL | re.MULTILINE)
    return str(found)


def _page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


def _write_shared(folder: Path) -> None:
    (folder / "configs").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "package").mkdir()
    for name, text in (("__init__", ""), ("train", SCRIPT)):
        (folder / "package" / f"{name}.py").write_text(text, encoding="utf-8")


def _write_models(folder: Path) -> None:
    from chat_tokenizers import chat_tokenizer
    from transformers import LlamaForCausalLM, Mistral3ForConditionalGeneration

    tokenizer = chat_tokenizer("chatml")
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # Wide enough for the ranks that pages set.
    llama = toy_text_config("llama", vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, **ids)
    wrapper = wrapper_config(mistral4_config(vocab_size=len(tokenizer), **ids))
    save_toy(LlamaForCausalLM, llama, folder / "llama-3.1-8b")
    save_toy(Mistral3ForConditionalGeneration, wrapper, folder / "mistral-small-4")
    for model in folder.iterdir():
        tokenizer.save_pretrained(model)
    (folder / "llama-3.1-8b-instruct").symlink_to("llama-3.1-8b")


def _write_data(folder: Path) -> None:
    pairs = _pairs(40)
    splits = {"train": pairs[:32], "validation": pairs[32:], "test": pairs[36:]}
    columns = {
        folder: ("prompt", "completion"), folder / "instructions": ("instruction", "response"),
        folder.parent / "runs" / "quickstart" / "data": ("sentence", "json"),
    }  # fmt: skip
    for place, keys in columns.items():
        place.mkdir(parents=True)
        for split, rows in splits.items():
            _write_rows(place / f"{split}.jsonl", [dict(zip(keys, row, strict=True)) for row in rows])
    turns = ("user", "assistant")
    chats = [[{"role": role, "content": text} for role, text in zip(turns, row, strict=True)] for row in _pairs(600)]
    _write_rows(folder / "chat.jsonl", [{"messages": chat} for chat in chats])
    (folder / "my-corpus.txt").write_text("".join(f"{a} {b}\n" for a, b in _pairs(2000)), encoding="utf-8")


def _pairs(count: int) -> list[tuple[str, str]]:
    return [(f"Add {i} and {i + 1}.", f"The sum is {2 * i + 1}.") for i in range(count)]


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _run_config() -> dict[str, Any]:
    return {
        "model": {"model_name_or_path": "models/llama-3.1-8b", "torch_dtype": "float32"},
        "lora": {"r": 4, "target_modules": ["attention"]},
        "data": {"dataset_name_or_path": "data", "val_split": "validation", "max_length": 64},
        "train": {
            "output_dir": "runs", "max_steps": STEPS, "per_device_train_batch_size": 1, "logging_steps": 1,
            "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "samples": 1,
        },
    }  # fmt: skip


def _cluster_config() -> dict[str, Any]:
    volumes = [{"claim": name, "path": f"/{name}"} for name in ("models", "data", "runs")]
    return {
        "model": {"model_name_or_path": "/models/llama-3.1-8b"},
        "data": {"dataset_name_or_path": "/data/instructions", "val_split": "validation"},
        "train": {"output_dir": "/runs"},
        "cluster": {
            "target": "jobset", "nodes": 2, "gpus_per_node": 8, "gpu": "H200", "cpu": 96, "memory": "512Gi",
            "image": "registry.example/ml/shardtune@sha256:" + "0" * 64, "volumes": volumes, "runai_project": "ml",
        },
    }  # fmt: skip


def _todays_job() -> dict[str, Any]:
    container = {
        "name": "pytorch", "image": "registry.example/ml/train:1", "command": ["python", "train.py"],
        "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "512Gi"}},
    }  # fmt: skip
    replica = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
    spec = {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "today"}, "spec": spec}


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
