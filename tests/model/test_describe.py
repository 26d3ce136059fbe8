"""A model that only the Hub has is described from its config.json and the first bytes of its weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from running import REPOSITORY
from toys import save_toy, toy_text_config

from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.model.describe import describe
from shardtune.model.outline import NeedsTorch

PREFIX = "/org/toy/resolve/main/"
CODE = """
import sys
from shardtune.config.schema import ModelSection
from shardtune.model.describe import describe
outline = describe(ModelSection(model_name_or_path=sys.argv[1]))
print(outline.size, outline.model_class, 'torch' in sys.modules or 'transformers' in sys.modules)
"""


class Hub:
    """Serves the files of one repository as the Hub does, and notes what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def _answer(self, *, body: bool) -> None:
                name, part = self.path.removeprefix(PREFIX), self.headers.get("range")
                hub.asked.append((self.command, name, part))
                file = folder / name
                if not self.path.startswith(PREFIX) or not file.is_file():
                    self.send_response(404)
                    self.send_header("X-Error-Code", "EntryNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                content = file.read_bytes()
                tag = hashlib.sha256(content).hexdigest()
                if part is not None:
                    first, last = (int(at) for at in part.removeprefix("bytes=").split("-"))
                    content = content[first : last + 1]
                self.send_response(200 if part is None else 206)
                self.send_header("ETag", f'"{tag}"')
                self.send_header("X-Repo-Commit", "a" * 40)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two files, larger than what the Hub's client asks for at first."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    save_toy(LlamaForCausalLM, toy_text_config("llama", hidden_size=128, intermediate_size=512), folder)
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="1MB")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    served = Hub(model)
    yield served
    served.server.shutdown()
    served.server.server_close()


def asked(home: Path, name: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HOME": str(home), **environ}
    return subprocess.run([sys.executable, "-c", CODE, name], cwd=REPOSITORY, env=env, capture_output=True, text=True)


def test_the_hub_is_asked_for_headers_and_never_for_weights(hub: Hub, model: Path, tmp_path: Path) -> None:
    result = asked(tmp_path, "org/toy", HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="0")
    assert result.returncode == 0, result.stderr
    size = describe(ModelSection(model_name_or_path=str(model))).size
    assert result.stdout.split() == [str(size), "LlamaForCausalLM", "False"]
    files = {path.name for path in model.glob("*.safetensors")}
    parts = {name: part for command, name, part in hub.asked if command == "GET" and name in files}
    assert len(files) > 1 and parts == dict.fromkeys(files, "bytes=0-100000")


def test_what_the_hub_does_not_have_is_said_without_a_traceback(hub: Hub, tmp_path: Path) -> None:
    for environ in ({"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}, {"HF_HUB_OFFLINE": "1"}):
        result = asked(tmp_path, "org/other", **environ)
        assert "UserInputError: 'org/other' is neither a local folder nor available on the Hub." in result.stderr


@pytest.mark.parametrize("complete", [True, False])
def test_the_local_cache_is_used_before_the_hub_is_asked(complete: bool, model: Path, hub: Hub, tmp_path: Path) -> None:
    stored = tmp_path / "hub" / "models--org--toy"
    shutil.copytree(model, stored / "snapshots" / ("a" * 40))
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("a" * 40)
    if not complete:
        next((stored / "snapshots" / ("a" * 40)).glob("*.safetensors")).unlink()
    result = asked(tmp_path, "org/toy", HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="0")
    assert result.stdout.split()[1:] == ["LlamaForCausalLM", "False"], result.stderr
    assert bool(hub.asked) is not complete


def test_what_files_do_not_tell_is_found_by_building_where_that_is_allowed(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path)
    random = ModelSection(model_name_or_path=str(tmp_path), weights="random")
    with pytest.raises(NeedsTorch):
        describe(random)
    stored = describe(ModelSection(model_name_or_path=str(model)))
    assert describe(random, may_build=True).parameters == stored.parameters


def test_a_model_that_is_not_supported_is_refused_first(model: Path, tmp_path: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    shutil.copytree(model, tmp_path / "t5")
    (tmp_path / "t5" / "config.json").write_text(json.dumps({**raw, "model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(UserInputError, match="encoder-decoder"):
        describe(ModelSection(model_name_or_path=str(tmp_path / "t5")))
