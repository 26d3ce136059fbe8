from __future__ import annotations

from shardtune.launch.start import banner, set_safe_defaults


def test_safe_defaults_are_set_where_the_user_has_not() -> None:
    environ: dict[str, str] = {}
    set_safe_defaults(environ)
    assert environ["TOKENIZERS_PARALLELISM"] == "false" and environ["RDMAV_FORK_SAFE"] == "1"
    assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_what_the_user_has_set_stays_under_either_name() -> None:
    environ = {"TOKENIZERS_PARALLELISM": "true", "PYTORCH_CUDA_ALLOC_CONF": "x"}
    set_safe_defaults(environ)
    assert environ["TOKENIZERS_PARALLELISM"] == "true" and "PYTORCH_ALLOC_CONF" not in environ


def test_the_banner_tells_node_master_and_gpus() -> None:
    text = banner(3, 1, 2, "a:29500", ["H200", "H200"])
    assert "node 1 of 3, master a:29500, 2 processes, 2 × H200" in text and "insecure" not in text
    assert "warning: insecure network" in banner(3, 1, 2, "a:29500", [], insecure=True)
    assert "node" not in banner(1, 0, 1, "127.0.0.1:0", []).replace(__import__("socket").gethostname(), "")
