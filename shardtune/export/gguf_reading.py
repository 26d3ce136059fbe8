"""Does a GGUF file answer as adapter and base do? Read by transformers' own reader, and compared by differences."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from shardtune.export.gguf_file import damaged, rounded
from shardtune.export.gguf_tensors import GgufTensors
from shardtune.export.gguf_tokenizer import CONTROL, USER_DEFINED
from shardtune.export.samples import Samples, samples_for
from shardtune.inference.load import load_tuned
from shardtune.model.load import load_model

if TYPE_CHECKING:
    import gguf
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from shardtune.config.schema import ModelSection
    from shardtune.export.gguf_tokenizer import GgufTokenizer
    from shardtune.inference.source import TunedModel

_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Wie wird das Wetter morgen in Zürich? 北京今天下雨吗？",
    'def area(r):\n    return 3.14159 * r ** 2\n\n{"intent": "set_timer", "minutes": 15}',
    "I'VE told 2024 people they'll pay $1,234.56 on 03/11 — don't you agree?",
)
_AS_WRITTEN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


@dataclass(frozen=True)
class LogitsAgreement:
    """Attributes:
    share: Of the fine-tuning's effect on the logits, how much the file has: the projection on that of the adapter.
    error: What differs, relative to that effect.
    apart: How far the tuned model's logits are from those of adapter and base, relative to their spread.
    """

    share: float
    error: float
    apart: float
    tokens: int
    source: str


def compare_logits(path: Path, plan: GgufTensors, tuned: TunedModel) -> LogitsAgreement:
    """Both models in float32, the base of each subtracted: for the file, the base as it would have been written."""
    exact = tuned.base.model_copy(update={"torch_dtype": "float32", "base_precision": "bf16"})
    wanted, wanted_base, samples = _adapter_logits(replace(tuned, base=exact))
    model = _read(path, plan)
    found = _logits(model, samples)
    _restore_base(model, plan, exact)
    found_base = _logits(model, samples)
    effect, there = wanted - wanted_base, found - found_base
    size, apart = _norm(effect), _norm(found - wanted) / _norm(wanted)
    if not size:
        return LogitsAgreement(1.0, _norm(there), apart, len(wanted), samples.source)
    share = _sum(there * effect) / size**2
    return LogitsAgreement(share, _norm(there - effect) / size, apart, len(wanted), samples.source)


def check_tokenizer(
    path: Path, fields: Mapping[str, gguf.ReaderField], meant: GgufTokenizer, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Read the tokenizer back and encode some texts; returns how many tokens were compared.

    Args:
        fields: The file's metadata.

    Raises:
        ShardtuneError: other ids, or another chat template.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    read: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    stated, own = (json.loads(one.backend_tokenizer.to_str()) for one in (read, tokenizer))
    if meant.pre not in GGUF_PRE_TOKENIZER_SPLITS:  # transformers knows a part of llama.cpp's names
        stated["pre_tokenizer"] = own["pre_tokenizer"]
    stated["normalizer"], stated["post_processor"] = own["normalizer"], own["post_processor"]  # no file states them
    # llama.cpp finds control and user-defined tokens in the text as the file has them. transformers respells those with
    # a space or another character outside of the byte alphabet, and does not find them any more.
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    stated["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    stated["added_tokens"] = [
        {"id": index, "content": tokens[index], "special": kind == CONTROL, **_AS_WRITTEN}
        for index, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend = Tokenizer.from_str(json.dumps(stated))
    count = 0
    for text in (*_TEXTS, *_special_texts(tokenizer)):
        wanted, found = tokenizer(text)["input_ids"], backend.encode(text).ids
        if wanted != found:
            raise damaged(f"the tokenizer gives {found[:8]} for {text[:24]!r}, not {wanted[:8]}")
        count += len(wanted)
    if (read.chat_template or None) != meant.chat_template:
        raise damaged("the chat template is another")
    return count


def _special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    return [f"{token}hello{token}\n" for token in (*added[:8], *added[-8:])]  # the last are model.new_tokens


def _adapter_logits(tuned: TunedModel) -> tuple[Tensor, Tensor, Samples]:
    loaded = load_tuned(tuned, torch.device("cpu"))
    samples = samples_for(tuned, loaded.folder, loaded.stored_rows)
    with loaded.side(tuned=True) as model:
        wanted = _logits(model, samples)
    with loaded.side(tuned=False) as model:
        return wanted, _logits(model, samples), samples


def _logits(model: Any, samples: Samples) -> Tensor:
    """Of the tokens that count, centred: what adds the same to all of the vocabulary counts for nothing."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=samples.ids, use_cache=False).logits[samples.real].float()
    return logits - logits.mean(dim=-1, keepdim=True)


def _norm(values: Tensor) -> float:
    return math.sqrt(_sum(values.square()))


def _sum(values: Tensor) -> float:
    """Rows in float32, their sums in float64: of millions of values, a norm in float32 is off by 0.1 %."""
    return float(values.sum(dim=-1).double().sum())


def _read(path: Path, plan: GgufTensors) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    built = plan.merged.adapted.meta_model.model
    cls, config = type(built), type(built.config).from_dict(built.config.to_dict())
    if isinstance(built, MistralForCausalLM):  # the same without a window, and transformers reads it as a Llama alone
        cls, config = LlamaForCausalLM, LlamaConfig(**{**built.config.to_dict(), "model_type": "llama"})
    config.tie_word_embeddings = "output.weight" not in plan.parameters
    config.vocab_size = next(t.shape[0] for t in plan.tensors if t.name == "token_embd.weight")
    with _quiet():
        model = cls.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            attn_implementation="eager",
        )
    return cast("PreTrainedModel", model.eval())


def _restore_base(model: PreTrainedModel, plan: GgufTensors, section: ModelSection) -> None:
    """Put the base's weights back, as they would have been written in the same types.

    Types round within a row, so neither the order of rows nor how they are divided into tensors matters.
    """
    parameters, base = dict(model.named_parameters()), load_model(section)
    with torch.no_grad():
        for name in plan.merged.changes:
            if name not in parameters:  # tied: the embedding's
                continue
            values = base.get_parameter(name).detach()
            kind = next(tensor.type for tensor in plan.tensors if plan.parameters.get(tensor.name) == name)
            parameters[name][: len(values)].copy_(rounded(values, kind))
            parameters[name][len(values) :] = 0  # tokens that were learnt: the base has none, here as where it is asked


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()):
        yield
