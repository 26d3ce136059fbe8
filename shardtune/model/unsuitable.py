"""Which models are not supported at all? Decided from config.json, without torch, before any process is started."""

from __future__ import annotations

from typing import Any

from shardtune.errors import UserInputError

# Weights are (in, out) in a class of their own, `Conv1D`: not what adapters, sharding and FP8 are built on.
_CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
# Trained to fill in masked tokens. (Some can be made decoders by `is_decoder`; such a checkpoint says so.)
_ENCODERS = frozenset(
    {
        "albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
        "electra", "ernie", "esm", "eurobert", "flaubert", "funnel", "ibert", "layoutlm", "longformer", "megatron-bert",
        "mobilebert", "modernbert", "mpnet", "nomic_bert", "nystromformer", "rembert", "roberta",
        "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
_ALTERNATIVE = "Use a decoder-only (causal) language model, such as those of docs/families.md"

_QUANTISED = {
    "gptq": "whose format is not supported",
    "awq": "whose format is not supported",
    "bitsandbytes": "whose 4-bit and 8-bit formats are not supported",
    "compressed-tensors": "whose formats are not supported",
    "mxfp4": "whose 4-bit format is not supported",
}


def refuse_unsuitable(name: str, config: dict[str, Any]) -> None:
    """Args:
        config: The content of config.json.

    Raises:
        UserInputError: an encoder-decoder model, an encoder, or one without linear layers.
    """
    kind = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder") is True:
        raise UserInputError(
            f"'{name}' is an encoder-decoder model ({kind}), which is not supported.",
            why="Training predicts the next token of one sequence; these models read one text and write another.",
            fix=f"{_ALTERNATIVE}; for {kind}, transformers' Seq2SeqTrainer with PEFT.",
        )
    if kind in _ENCODERS and config.get("is_decoder") is not True:
        raise UserInputError(
            f"'{name}' is an encoder ({kind}): it does not predict the next token.",
            why="It attends to the whole text, so next-token training would leak the answer.",
            fix=f"{_ALTERNATIVE}; for {kind}, transformers' Trainer with PEFT.",
        )
    if kind in _CONV1D:
        raise UserInputError(
            f"'{name}' ({kind}) uses transformers' Conv1D instead of linear layers.",
            why="Adapters, sharding and FP8 work on linear layers, whose weights are (out, in); those of Conv1D are "
            "transposed.",
            fix=f"{_ALTERNATIVE}; for {kind}, PEFT's LoraConfig(fan_in_fan_out=True) in a script of your own.",
        )


def quantisation(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's `quantization_config`; empty where it is not quantised.

    Raises:
        UserInputError: it is quantised in a way that is not read.
    """
    inner = raw.get("text_config") or {}
    found: dict[str, Any] = raw.get("quantization_config") or inner.get("quantization_config") or {}
    method = found.get("quant_method", "fp8" if found else None)
    if method not in (None, "fp8"):
        raise UserInputError(
            f"'{name}' is quantised with {method}, {_QUANTISED.get(method, 'which is not supported')}.",
            why="LoRA needs gradients through the base weights; supported are checkpoints in bf16, fp16, fp32 and FP8 "
            "(quant_method: fp8).",
            fix="Use a bf16 checkpoint (the original, or a dequantised one); model.base_precision: fp8 quantises it to "
            "one byte per weight while loading.",
        )
    return found
