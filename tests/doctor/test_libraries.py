"""Packages, the model's class, and variables that nobody reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor.machines import config, found, machine
from fake_nvml import h200s

from shardtune.config.script_config import load_script_config
from shardtune.doctor.job import Job
from shardtune.doctor.nccl_variables import check_variables, names_in
from shardtune.doctor.system import System
from shardtune.doctor.versions import check_cuda, check_model_class, check_packages, check_torchvision

NEEDS = ["torch>=2.11,<2.14", "transformers>=5.22,<5.23", "pytest>=9; extra == 'dev'"]
GOOD = {"torch": "2.13.0+cu130", "transformers": "5.22.2"}


@pytest.mark.parametrize(
    ("versions", "verdict", "words"),
    [
        (GOOD, "ok", "torch 2.13.0+cu130, transformers 5.22.2"),
        ({**GOOD, "torch": "2.14.0"}, "warn", "torch 2.14.0 is installed; shardtune needs torch<2.14,>=2.11 → pip install 'torch"),
        ({**GOOD, "transformers": "4.57.1"}, "fail", "transformers 4.57.1 is installed"),
        ({"torch": "2.13.0"}, "fail", "transformers is not installed; shardtune needs it"),
        ({**GOOD, "tokenizers": "0.10"}, "warn", "transformers needs tokenizers>=0.22"),
    ],
)  # fmt: skip
def test_packages_are_compared_with_what_each_needs(
    tmp_path: Path, versions: dict[str, str], verdict: str, words: str
) -> None:
    needs = {"shardtune": NEEDS, "transformers": ["tokenizers>=0.22", "numpy"]}
    system = machine(tmp_path, versions=versions, requires=lambda name: needs.get(name, []))
    answer = found(check_packages, system)["packages"]
    assert answer[0] == verdict and words in answer[1]


def test_the_tested_environment_passes() -> None:
    assert found(check_packages, System())["packages"][0] == "ok"


@pytest.mark.parametrize(
    ("cuda", "verdict", "words"),
    [("13.0", "ok", "torch for CUDA 13.0, driver 580.95.05 up to CUDA 13.0"), ("12.8", "ok", "12.8"),
     ("14.1", "fail", "torch is built for CUDA 14.1"), (None, "fail", "is a CPU build")],
)  # fmt: skip
def test_the_driver_must_know_the_cuda_of_torch(tmp_path: Path, cuda: str | None, verdict: str, words: str) -> None:
    files = {"site/torch/version.py": f"cuda: Optional[str] = {cuda!r}\n"}
    machine(tmp_path, files)
    system = machine(tmp_path, files, cards=h200s(2), versions=GOOD)
    answer = found(check_cuda, system, Job(config(parallel={"device": "cuda"}), device="cuda"))["cuda"]
    assert answer[0] == verdict and words in answer[1]


@pytest.mark.parametrize(
    ("library", "cuda", "refused"),
    [("linked with libtorch_cuda.so", None, True), ("linked with libtorch_cuda.so", "13.0", False), ("alone", None, False)],
)  # fmt: skip
def test_a_torchvision_for_cuda_is_refused_beside_a_torch_without(
    tmp_path: Path, library: str, cuda: str | None, refused: bool
) -> None:
    files = {"site/torch/version.py": f"cuda: Optional[str] = {cuda!r}\n", "site/torchvision/_C.so": library}
    machine(tmp_path, files)
    system = machine(tmp_path, files, versions={**GOOD, "torch": "2.13.0", "torchvision": "0.28.0"})
    answer = found(check_torchvision, system)
    assert ("torchvision" in answer) == refused
    assert not refused or (
        answer["torchvision"][0] == "fail" and "0.28.0 is built for CUDA" in answer["torchvision"][1]
    )
    assert not found(check_torchvision, system, Job(load_script_config(None).config)), (
        "a script may not need transformers"
    )


def model(folder: Path, content: dict[str, object]) -> Job:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return Job(config(model={"model_name_or_path": str(folder)}))


def test_the_installed_transformers_has_the_models_class(tmp_path: Path) -> None:
    files = {"site/transformers/models/auto/modeling_auto.py": '("llama", "LlamaForCausalLM"), ("mistral4", "M")'}
    machine(tmp_path, files)
    system = machine(tmp_path, files, versions=GOOD)
    llama = model(tmp_path / "m", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    assert "has LlamaForCausalLM" in found(check_model_class, system, llama)["model class"][1]
    new = model(tmp_path / "m", {"model_type": "llama9"})
    assert found(check_model_class, system, new)["model class"][0] == "fail"
    wrapped = model(tmp_path / "m", {"model_type": "llama", "text_config": {"model_type": "mistral4"}})
    old = machine(tmp_path, files, versions={"transformers": "5.2.0"})
    verdict, text = found(check_model_class, old, wrapped)["model class"]
    assert verdict == "fail" and "needs transformers 5.15.0 or later; 5.2.0 is installed" in text


def nccl(root: Path, environ: dict[str, str], files: dict[str, str] | None = None) -> System:
    """A machine with an NCCL of three variables."""
    library = {
        "site/nvidia/nccl/lib/libnccl.so.2": "\0NCCL_DEBUG\0NCCL_IB_HCA\0NCCL_SOCKET_IFNAME\0NCCL_CONF_FILE\0 NCCL_TIMEOUT is gone.\0"
    }
    machine(root, library)
    return machine(root, {**library, **(files or {})}, environ=environ)


def test_a_variable_that_no_library_names_is_read_by_nothing(tmp_path: Path) -> None:
    answer = found(check_variables, nccl(tmp_path, {
        "NCCL_TIMEOUT": "1800", "NCCL_DEBG": "INFO", "NCCL_IB_HCA": "mlx5", "NCCL_VERSION": "2.28", "NCCL_FROBNICATE": "1"}))  # fmt: skip
    verdict, text = answer["NCCL_TIMEOUT"]
    assert verdict == "warn" and "is read by nothing" in text and "parallel.step_timeout_minutes" in text
    assert "Did you mean NCCL_DEBUG?" in answer["NCCL_DEBG"][1]
    assert answer["NCCL_FROBNICATE"][0] == "warn"
    assert answer["variables"][0] == "ok" and "NCCL_IB_HCA" in answer["variables"][1]
    assert "NCCL_VERSION" not in answer


@pytest.mark.parametrize("file", ["etc/nccl.conf", "home/me/.nccl.conf", "conf/mine"])
def test_nccl_conf_files_are_read_too(tmp_path: Path, file: str) -> None:
    environ = {"HOME": "/home/me", **({"NCCL_CONF_FILE": "/conf/mine"} if file.startswith("conf") else {})}
    answer = found(check_variables, nccl(tmp_path, environ, {file: "# NCCL_X=1\nNCCL_IB_CUDA_SUPPORT=1\n"}))
    assert (
        answer.keys() - {"variables"} == {"NCCL_IB_CUDA_SUPPORT"} and f"in /{file}" in answer["NCCL_IB_CUDA_SUPPORT"][1]
    )


def test_without_libnccl_its_variables_are_not_checked(tmp_path: Path) -> None:
    answer = found(check_variables, machine(tmp_path, environ={"NCCL_TIMEOUT": "1"}))
    assert answer == {"variables": ("ok", "not checked against libnccl, which is not here: 1 NCCL_* variable → ")}


def test_torchs_own_libraries_and_python_files_say_what_torch_reads() -> None:
    real = System(environ={"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_COMPILE_DEBUG": "1", "TORCH_NCL_BLOCKING_WAIT": "1"})
    answer = found(check_variables, real)
    assert answer["variables"] == ("ok", "TORCH_NCCL_BLOCKING_WAIT, TORCH_COMPILE_DEBUG: named in the libraries → ")
    assert "Did you mean TORCH_NCCL_BLOCKING_WAIT?" in answer["TORCH_NCL_BLOCKING_WAIT"][1]
    folder = real.folder("torch")
    assert folder is not None and "TORCH_CPP_LOG_LEVEL" in names_in(folder / "lib" / "libc10.so")
