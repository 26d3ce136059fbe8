"""How is the quickstart trained? Its hyperparameters, and the config file with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

# The chat format of SmolLM2. The answer starts at {json}; the end-of-sequence token <|im_end|> follows it.
PROMPT = "<|im_start|>user\n{sentence}<|im_end|>\n<|im_start|>assistant\n"
PROMPT_TEMPLATE = PROMPT + "{json}"


@dataclass(frozen=True)
class Recipe:
    """Sizes of a quickstart: of its data, its training and its scoring."""

    n_train: int
    n_val: int
    n_test: int
    max_steps: int
    per_device_train_batch_size: int
    learning_rate: float
    warmup_steps: int
    max_length: int = 128
    score_batch_size: int = 32
    max_new_tokens: int = 64


# Every step gathers the whole model over loopback, so a few larger steps are faster than many small ones.
REAL = Recipe(
    n_train=480, n_val=32, n_test=48, max_steps=76, per_device_train_batch_size=3, learning_rate=2e-3, warmup_steps=4
)
TINY = Recipe(
    n_train=64, n_val=16, n_test=16, max_steps=8, per_device_train_batch_size=4, learning_rate=2e-3, warmup_steps=1,
    max_new_tokens=16,
)  # fmt: skip


def config_text(
    model_folder: Path,
    data_folder: Path,
    output_dir: Path,
    *,
    recipe: Recipe = REAL,
    seed: int = 42,
    nproc: int = 2,
) -> str:
    """The quickstart's run as a config file, to be trained, read and changed.

    Args:
        model_folder: What `weights.model_folder` returned.
        data_folder: What `sentences.write_dataset` filled.
        output_dir: Where the run's folder is made.
        recipe: Sizes; `TINY` for the toy model.
        seed: Seeds adapters and data order.
        nproc: Processes that share the model.
    """
    together = recipe.per_device_train_batch_size * nproc
    return f"""\
# shardtune quickstart: SmolLM2-135M-Instruct learns to turn a sentence into JSON.
model:
  model_name_or_path: {_text(model_folder)}
  torch_dtype: float32              # most CPUs have no bf16 units; bf16 would take minutes per step

lora:
  r: 16
  lora_alpha: 32
  lora_dropout: 0.0                 # too short to overfit
  target_modules: all-linear

data:
  dataset_name_or_path: {_text(data_folder)}
  prompt_template: {_text(PROMPT_TEMPLATE)}
  train_on: completion              # loss on the JSON only
  train_split: train
  val_split: validation
  max_length: {recipe.max_length}

train:
  output_dir: {_text(output_dir)}
  max_steps: {recipe.max_steps}
  per_device_train_batch_size: {recipe.per_device_train_batch_size}    # x {nproc} processes = {together} rows per step
  per_device_eval_batch_size: {recipe.per_device_train_batch_size}
  gradient_checkpointing: false     # the model is small: time matters, memory does not
  learning_rate: {recipe.learning_rate}
  lr_scheduler_type: cosine
  warmup_steps: {recipe.warmup_steps}
  weight_decay: 0.0
  bf16: false
  packing: false                    # 3 sentences per process and step, as the recipe was tuned
  logging_steps: 5
  eval_strategy: "no"               # the test rows are scored before and after instead
  save_strategy: "no"               # final/ is written at the end
  seed: {seed}

parallel:
  nproc: {nproc}
  device: cpu
  shard: full                       # to show it; `auto` would replicate a model as small as this one
"""


def _text(value: Path | str) -> str:
    # JSON's quoting is valid YAML, whatever the path or the template contains.
    return json.dumps(str(value), ensure_ascii=False)
