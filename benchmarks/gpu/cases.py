"""What is measured? Our cases and those they are compared with: models at their real size without weights, random rows.

A case's name is what `speed.py` is asked for. `tiny` is the same case as a toy that a CPU trains in seconds.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

DENSE_7B: dict[str, object] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "dtype": "bfloat16", "pad_token_id": 1, "use_cache": False,
}  # fmt: skip
_TINY: dict[str, object] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "dtype": "float32",
}  # fmt: skip
_TINY_MOE: dict[str, object] = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
DENSE_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MOE_TARGETS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
END = 2  # the token behind every row


@dataclass(frozen=True)
class Pace:
    """Steps of a measurement: the first `warm` are left out, then `windows` times `window` steps are timed together.

    A window and not a step, since reading a clock waits for the device: what runs ahead of it would be left out.
    """

    window: int = 2
    warm: int = 4
    windows: int = 5

    @property
    def steps(self) -> int:
        return self.warm + self.window * self.windows


QUICK, TINY = Pace(windows=2), Pace(window=1, warm=2, windows=2)


@dataclass(frozen=True)
class Case:
    """One measurement: the model (`dense`, or `moe` and its layers), the rows, and how it is trained.

    Args:
        by: Whose code trains it.
        short: Rows as instructions are, not rows of `length` tokens each.
        sets: For ours: sections of the config. For the others: `checkpointing`, `packing`, `liger`, and `experts`
            (PEFT's target_parameters on them).
    """

    model: str
    by: Literal["ours", "stock", "unsloth"] = "ours"
    length: int = 4096
    batch: int = 2
    accumulation: int = 1
    short: bool = False
    sets: dict[str, Any] = field(default_factory=dict)
    scale: int = 1  # rows are so many times shorter than they really are

    @property
    def packs(self) -> bool:
        """Does a row of the batch hold many of the data's? Ours packs by itself."""
        return self.short and (self.by == "ours" or bool(self.sets.get("packing")))

    def tiny(self) -> Case:
        batch, accumulation = min(self.batch, 2), min(self.accumulation, 2)
        return replace(self, length=self.length // 64, scale=64, batch=batch, accumulation=accumulation)


def stock(model: str, *, by: Literal["stock", "unsloth"] = "stock", **given: Any) -> Case:
    fields = {name: given.pop(name) for name in ("length", "batch", "accumulation", "short") if name in given}
    return Case(model, by, sets=given, **fields)


def together(*parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections of a config, of several parts each."""
    whole: dict[str, dict[str, Any]] = {}
    for part in parts:
        for section, values in part.items():
            whole[section] = whole.get(section, {}) | values
    return whole


DEQUANTISED = {"model": {"base_precision": "fp8"}}
FP8 = together(DEQUANTISED, {"train": {"fp8_compute": True}})
CHECKPOINTED = {"train": {"gradient_checkpointing": "full"}}
SELECTIVE = {"train": {"gradient_checkpointing": "selective"}}
EXPERTS = {"lora": {"target_modules": ["attention", "mlp"], "experts": True}}
# With 16 on every expert of 36 layers the adapters alone, their gradients and moments are 17 GB beside 119 GB of codes.
FEW_EXPERTS = together(EXPERTS, {"lora": {"expert_r": 4}})

CASES: dict[str, Case] = {
    "dense-4k": Case("dense", batch=4),
    "dense-4k-two": Case("dense"),
    "dense-4k-eager": Case("dense", batch=1, sets={"train": {"kernels": "eager"}}),
    "dense-4k-nocompile": Case("dense", sets={"train": {"compile": False}}),
    "dense-short": Case("dense", batch=4, short=True),
    "dense-fp8": Case("dense", batch=4, sets=FP8),
    "dense-fp8-dequantised": Case("dense", batch=4, sets=DEQUANTISED),
    "dense-16k-selective": Case("dense", batch=4, sets=SELECTIVE),
    "dense-16k-ckpt": Case("dense", batch=4, sets=CHECKPOINTED),
    "moe8": Case("moe8", batch=4),
    "moe8-selective": Case("moe8", batch=4, sets=SELECTIVE),
    "moe8-ckpt": Case("moe8", batch=4, sets=CHECKPOINTED),
    "moe8-experts": Case("moe8", batch=4, sets=EXPERTS),
    "moe8-experts-ckpt": Case("moe8", batch=4, sets=together(EXPERTS, CHECKPOINTED)),
    "moe8-fp8": Case("moe8", batch=4, sets=together(FP8, CHECKPOINTED)),
    "moe36-fp8": Case("moe36", batch=4, sets=together(FP8, CHECKPOINTED)),
    "moe36-fp8-dequantised": Case("moe36", batch=4, sets=together(DEQUANTISED, CHECKPOINTED)),
    "moe36-fp8-experts": Case("moe36", batch=4, sets=together(FP8, CHECKPOINTED, FEW_EXPERTS)),
    "stock-dense": stock("dense"),
    "stock-dense-liger": stock("dense", liger=True),
    "stock-dense-classic": stock("dense", length=1024, batch=1, accumulation=16, short=True),
    "stock-dense-packing": stock("dense", batch=4, short=True, packing=True, checkpointing=True, liger="if there"),
    "stock-dense-16k": stock("dense", batch=4),
    "stock-dense-16k-ckpt": stock("dense", batch=4, checkpointing=True),
    "stock-moe8": stock("moe8", batch=4, checkpointing=True),
    "stock-moe8-experts": stock("moe8", batch=4, checkpointing=True, experts=True),
    "unsloth-dense": stock("dense", by="unsloth"),
}  # fmt: skip


def shape_of(model: str, *, tiny: bool = False) -> dict[str, object]:
    """The config.json of a case's model: a dense 7B, or Mistral Small 4 (119B with 36 layers) cut to some layers."""
    if model == "dense":
        return {**DENSE_7B, **_TINY, "head_dim": 8, "num_hidden_layers": 2} if tiny else DENSE_7B
    from transformers import Mistral4Config

    layers = 2 if tiny else int(model.removeprefix("moe"))
    changes: dict[str, Any] = {"num_hidden_layers": layers, "pad_token_id": 1, "use_cache": False, "dtype": "bfloat16"}
    if tiny:
        changes |= {**_TINY, **_TINY_MOE}
    config: dict[str, object] = Mistral4Config(**changes).to_dict()
    return {**config, "architectures": ["Mistral4ForCausalLM"], "dtype": changes["dtype"]}


def write_model(folder: Path, config: dict[str, object]) -> Path:
    """A folder with config.json and a tokenizer whose words are the numbers of its tokens; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {"<unk>": 0, "<pad>": 1, "</s>": END} | {str(n): n for n in range(3, int(str(config["vocab_size"])))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def write_rows(file: Path, case: Case, steps: int, vocabulary: int) -> Path:
    """Rows for so many steps: of `length` tokens, or short ones as instructions are (log-normal, median 180 tokens)."""
    rng = random.Random(0)
    wanted = steps * case.batch * case.accumulation
    if case.packs:  # they are 250 tokens on average: some more than are needed
        wanted = wanted * case.length * case.scale // 200
    with file.open("w") as out:
        for _ in range(wanted):
            drawn = max(16, round(rng.lognormvariate(5.2, 0.8))) // case.scale
            n = max(3, min(case.length, drawn)) if case.short else case.length
            # One token is the end of text that is put behind every row.
            words = " ".join(str(rng.randrange(10, vocabulary - 1)) for _ in range(n - 1))
            out.write(json.dumps({"text": words}) + "\n")
    return file
