"""How do vision+text models package their text models? Here, because one wrapper packages several families."""

from __future__ import annotations

from shardtune.model.families.family import Wrapper

# `save_pretrained` writes the first two (the names of the released checkpoints); the other two are the names inside
# the model, under which other tools write.
_STORED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_SERVED = {"model.": "model.language_model.", "lm_head.": "lm_head."}

MISTRAL3 = Wrapper("mistral3", "Mistral3ForConditionalGeneration", stored=_STORED, served=_SERVED)
GEMMA3 = Wrapper("gemma3", "Gemma3ForConditionalGeneration", stored=_STORED, served=_SERVED)
# Their checkpoints have the names inside the model.
_INSIDE = {"model.language_model.": "model.", "lm_head.": "lm_head."}
QWEN3_5 = Wrapper("qwen3_5", "Qwen3_5ForConditionalGeneration", stored=_INSIDE, served=_SERVED)
QWEN3_5_MOE = Wrapper("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", stored=_INSIDE, served=_SERVED)
GEMMA4 = Wrapper("gemma4", "Gemma4ForConditionalGeneration", stored=_INSIDE, served=_SERVED)
LLAMA4 = Wrapper(
    "llama4",
    "Llama4ForConditionalGeneration",
    stored={"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    served={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)
