"""Codes of errors: every one that is raised is explained, documented, and found by the words libraries use."""

from __future__ import annotations

import ast

import pytest
from running import REPOSITORY

from shardtune.run import exit_codes
from shardtune.run.error_codes import BY_CODE, CODES_OF_KINDS, ERROR_CODES, code_of_message
from shardtune.run.error_page import TABLES, with_table
from shardtune.run.failure import report_failure
from shardtune.run.findings import _CAUSES, Finding, cause_of


def raised_codes() -> set[str]:
    """Values of `code=` in calls that make an error, and of `code` in classes of errors."""
    found: set[str] = set()
    for path in (REPOSITORY / "shardtune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            elif isinstance(node, ast.ClassDef):
                values = [
                    line.value for line in node.body
                    if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
                    and line.targets[0].id == "code"
                ]  # fmt: skip
            else:
                continue
            found |= {
                value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)
            }
    return found - {""}


def test_every_code_that_is_raised_or_found_has_an_entry() -> None:
    raised = raised_codes()
    assert {"out-of-memory", "data-changed", "cannot-resume", "node-missing", "replicas-differ"} <= raised
    assert raised | set(CODES_OF_KINDS.values()) <= set(BY_CODE)
    kinds = {kind for kinds in _CAUSES for kind in kinds}
    assert kinds - set(CODES_OF_KINDS) == {"user_error", "known_error", "machine_error", "error", "exited", "finished"}


def test_every_exit_code_has_an_entry() -> None:
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert codes == set(exit_codes.EXIT_CODES)
    assert {entry.exit_code for entry in ERROR_CODES} - {None} <= codes


@pytest.mark.parametrize("page", TABLES)
def test_the_docs_have_the_tables_as_they_are(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    assert with_table(page, text) == text, "make reference"


def test_every_page_exists() -> None:
    assert not [entry.page for entry in ERROR_CODES if not (REPOSITORY / "docs" / entry.page).exists()]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out-of-memory"),
        ("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO)", "nccl-error"),
        ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "duplicate-gpu"),
        ("[/pytorch/gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.2]:4242", "connection-lost"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)", "no-progress"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. insufficient shared memory (shm)",
         "shared-memory-full"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
        ("CUDA error: an illegal memory access was encountered", "cuda-error"),
        ("The server socket has failed to listen. EADDRINUSE: address already in use", "port-in-use"),
        ("Signal 9 (SIGKILL) received by PID 17", "rank-killed"),
        ("huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling "
         "parallelism to avoid deadlocks...", "tokenizer-fork"),
        ("ValueError: The checkpoint you are trying to load has model type `mistral4` but Transformers does not recognize "
         "this architecture.", "unknown-architecture"),
        ("KeyError: 'mistral4'", "unknown-architecture"),
        ("ImportError: cannot import name 'Mistral4ForCausalLM' from 'transformers' (/opt/x.py)", "unknown-architecture"),
        ("KeyError: 'text'", ""),
        ("401 Client Error. (Request ID: Root=1)\n\nCannot access gated repo for url https://huggingface.co/a/b.",
         "hub-access"),
        ("401 Client Error: Unauthorized for url: https://huggingface.co/api/models/a/b", "hub-access"),
        ("401 Client Error: Unauthorized for url: https://tracker.example/runs", ""),
        ("PermissionError: [Errno 13] Permission denied: '/runs/x'", "permission-denied"),
        ("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device", "cuda-build"),
        ("OSError: libcudart.so.12: cannot open shared object file: No such file or directory", "cuda-build"),
        ("ValueError: Target modules {'q_proj'} not found in the base model. Please check the target modules and try "
         "again.", "target-not-found"),
    ],
)  # fmt: skip
def test_messages_of_libraries_are_recognised(message: str, code: str) -> None:
    assert code_of_message(message) == code


@pytest.mark.parametrize("kind", CODES_OF_KINDS)
def test_what_a_launcher_finds_ends_with_its_code_and_keeps_it_in_the_file(kind: str) -> None:
    finding = Finding(kind, 0.0, 0, "host", rank=1, text="Connection closed by peer", exit_code=137)
    assert cause_of([finding], 1).text.endswith(f"  more: shardtune explain {CODES_OF_KINDS[kind]}")
    assert finding.as_dict()["error_code"] == CODES_OF_KINDS[kind]


def test_a_traceback_with_a_known_message_ends_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    report_failure(RuntimeError("CUDA error: device-side assert triggered"), rank=0)
    assert capsys.readouterr().err.endswith("device-side assert triggered\n  more: shardtune explain cuda-error\n")
    report_failure(RuntimeError("something else"), rank=0)
    assert "explain" not in capsys.readouterr().err
