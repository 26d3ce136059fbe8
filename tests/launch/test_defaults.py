from __future__ import annotations

import pytest

from shardtune.errors import UserInputError
from shardtune.launch.safe_defaults import set_defaults_of_nodes, set_safe_defaults
from shardtune.launch.start import banner


def test_safe_defaults_are_set_where_the_user_has_not() -> None:
    environ: dict[str, str] = {}
    set_safe_defaults(environ)
    assert environ["TOKENIZERS_PARALLELISM"] == "false" and environ["RDMAV_FORK_SAFE"] == "1"
    assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_what_the_user_has_set_stays_under_either_name() -> None:
    environ = {"TOKENIZERS_PARALLELISM": "true", "PYTORCH_CUDA_ALLOC_CONF": "x"}
    set_safe_defaults(environ)
    assert environ["TOKENIZERS_PARALLELISM"] == "true" and "PYTORCH_ALLOC_CONF" not in environ


def test_an_empty_number_of_threads_is_unset_and_a_list_is_refused_before_the_run_has_a_folder() -> None:
    environ = {"OMP_NUM_THREADS": ""}
    set_safe_defaults(environ)
    assert "OMP_NUM_THREADS" not in environ
    for number in ("4", " 4", "0", "-2"):
        set_safe_defaults({"OMP_NUM_THREADS": number})
    for words in ("abc", "4,2", "1.5", " "):
        with pytest.raises(UserInputError, match="OMP_NUM_THREADS is"):
            set_safe_defaults({"OMP_NUM_THREADS": words})


def test_the_banner_tells_node_master_and_gpus() -> None:
    text = banner(3, 1, 2, "a:29500", ["H200", "H200"])
    assert "node 1 of 3, master a:29500, 2 processes, 2 × H200" in text and "insecure" not in text
    assert "warning: insecure network" in banner(3, 1, 2, "a:29500", [], insecure=True)
    assert "node" not in banner(1, 0, 1, "127.0.0.1:0", []).replace(__import__("socket").gethostname(), "")


def test_each_default_has_a_reason_and_only_those_that_were_set_are_named() -> None:
    environ = {"RDMAV_FORK_SAFE": "0"}
    reasons = set_safe_defaults(environ)
    assert "RDMAV_FORK_SAFE" not in reasons and environ["RDMAV_FORK_SAFE"] == "0"
    assert "data loaders" in reasons["TOKENIZERS_PARALLELISM"] and all(reasons.values())
    assert set_safe_defaults(environ) == {}


def test_several_nodes_hear_what_failed_in_nccl_unless_the_user_has_set_it() -> None:
    environ: dict[str, str] = {}
    assert "NCCL_DEBUG" in set_defaults_of_nodes(environ) and environ == {"NCCL_DEBUG": "WARN"}
    environ = {"NCCL_DEBUG": "INFO"}
    assert set_defaults_of_nodes(environ) == {} and environ == {"NCCL_DEBUG": "INFO"}
