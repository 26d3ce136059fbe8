"""Which features work together? The table that the tests run and docs/support.md is made from; a row is one line."""

from __future__ import annotations

from itertools import combinations

# What trains: overrides of the config. A toy with biases is trained, or a mixture of experts where experts are adapted.
WHAT: dict[str, list[str]] = {
    "LoRA": [],
    "rsLoRA": ["lora.use_rslora=true"],
    "DoRA": ["lora.use_dora=true"],
    "biases": ["lora.bias=all"],
    "new tokens": ["model.new_tokens=[<|a|>,<|b|>]"],
    "layers_to_transform": ["lora.layers_to_transform=[1]"],
    "rank_pattern": ["lora.rank_pattern={q_proj: 2}"],
    "modules_to_save": ["lora.modules_to_save=[norm, input_layernorm]"],
    "expert LoRA": ["lora.experts=true"],
    "FP8 base": ["model.base_precision=fp8"],
}
# How it is computed: none of it may change a number.
HOW: dict[str, list[str]] = {
    "packing": ["train.packing=true"],
    "fused kernels": ["train.kernels=auto"],
    "activation checkpointing: full": ["train.gradient_checkpointing=full"],
    "activation checkpointing: selective": ["train.gradient_checkpointing=selective"],
    "resume": [],
    "two processes": ["train.per_device_train_batch_size=4"],
}
RUNS = ("resume", "two processes")  # compared as whole runs
PLAIN = ["train.kernels=eager", "train.packing=false", "train.gradient_checkpointing=none"]
FAST = ["train.kernels=auto", "train.packing=auto", "train.gradient_checkpointing=full"]
# Pairs that are refused, and what the message says.
REFUSED: dict[frozenset[str], str] = {
    frozenset({"DoRA", "expert LoRA"}): "PEFT has no DoRA for routed experts and routers",
    frozenset({"DoRA", "FP8 base"}): "DoRA needs the norm of every weight row in each pass",
}
# What runs on a GPU alone, by tests/gpu/test_features_gpu.py; what has passed there stands in gpu.json.
ON_GPU: dict[str, list[str]] = {
    "compiled layers": ["train.kernels=auto", "train.packing=auto", "train.compile=true"],
    "offload_activations": [
        "train.kernels=auto",
        "train.gradient_checkpointing=full",
        "train.offload_activations=true",
    ],
    "offload_params": ["train.kernels=auto", "parallel.offload_params=true"],
}

Cell = tuple[str, str]
PAIRS: list[Cell] = list(combinations([name for name in WHAT if name != "LoRA"], 2))
CELLS: list[Cell] = [*((what, how) for what in WHAT for how in HOW), *PAIRS]
