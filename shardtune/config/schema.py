"""What can be set? Typed sections; each field's description is its help text, schema entry and reference page.

Settings that TRL has too keep TRL's names (refused.py has those that do not).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from shardtune.config.cluster_schema import ClusterSection
from shardtune.config.fields import Float, Int, Section, comma_list, number


def _yaml_no(value: Any) -> Any:
    # A bare `no` or `off` is the boolean false in YAML 1.1; for a strategy or a tracker it means the word.
    return "no" if value is False or _is_no(value) else value


def _is_no(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in ("no", "off", "false", "none")


def _none_word(value: Any) -> Any:
    return "none" if value in (False, None) or _is_no(value) else value


def _off_word(value: Any) -> Any:
    return "off" if value is False or _is_no(value) else value


def _all_or_nothing(value: Any) -> Any:
    # TRL's switch is true or false; `full` and `none` mean the same.
    return {"full": True, "none": False}.get(value.lower(), value) if isinstance(value, str) else value


_YEAR_IN_MINUTES, _YEAR_IN_SECONDS = 366 * 24 * 60, 366 * 24 * 3600  # timers of the operating system end somewhere

Strategy = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_yaml_no)]
AutoStrategy = Annotated[Literal["auto", "no", "steps", "epoch"], BeforeValidator(_yaml_no)]
Checkpointing = Annotated[bool | Literal["auto", "none", "selective", "full"], BeforeValidator(_all_or_nothing)]
# What a guard does. A step can only be skipped before the optimizer's update, so not every guard can.
SpikeAction = Annotated[Literal["off", "warn", "skip-step", "rollback", "stop"], BeforeValidator(_off_word)]
TrendAction = Annotated[Literal["off", "warn", "rollback", "stop"], BeforeValidator(_off_word)]
WatchAction = Annotated[Literal["off", "warn", "stop"], BeforeValidator(_off_word)]


class ModelSection(Section):
    """Which model is trained and how its weights are held."""

    model_name_or_path: str = Field(
        min_length=1, description="A local folder with config.json and safetensors, or a hub name.",
        examples=["mistralai/Mistral-Small-4-119B-2603", "/models/llama-3.1-8b"],
    )  # fmt: skip
    revision: str | None = Field(
        default=None, description="Hub revision (branch, tag or commit). Ignored for a local folder."
    )
    tokenizer_name_or_path: str | None = Field(
        default=None, description="Tokenizer, if it is not in the model's folder."
    )
    new_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Tokens to add to the tokenizer and to learn. They are matched in text exactly as written; "
        "only their rows of the embedding and output head are trained (PEFT's "
        "trainable_token_indices), initialised to the mean of the others.",
        examples=[["<|tool|>", "<|/tool|>"]],
    )
    torch_dtype: Literal["bfloat16", "float32", "auto"] = Field(
        default="bfloat16",
        description="Dtype of the frozen weights, unless they are held in FP8. `auto` = the checkpoint's own "
        "(bfloat16 for float16). On a CPU without bf16 units float32 is many times faster.",
    )
    base_precision: Literal["auto", "bf16", "fp8"] = Field(
        default="auto",
        description="How the frozen weights are held. `fp8` = one byte each: an FP8 checkpoint as it is, any "
        "other quantised on load (per row; the error is reported). `bf16` = in torch_dtype; an FP8 "
        "checkpoint is dequantised on load. `auto` = bf16; for an FP8 checkpoint the faster of the two "
        "in the memory there is, as the planner computes it, or fp8 if train.fp8_compute is true.",
    )
    weights: Literal["checkpoint", "random"] = Field(
        default="checkpoint",
        description="`random` builds the model from its config.json alone and initialises the weights on the "
        "device, to measure speed and memory. An adapter trained on them is worthless, and every "
        "output says so.",
    )
    load: Literal["auto", "read-all", "read-once", "rank0-broadcast"] = Field(
        default="auto",
        description="How the weights are read. `read-all` = every rank reads its own slices from disk. `read-once` = "
        "replicas divide the reading and send each other what they read. `rank0-broadcast` = rank 0 reads and sends "
        "each rank its slices. `auto` = read-all, or read-once within or between nodes where that is measured to be "
        "faster; rank0-broadcast where a rank has no files.",
    )
    ignore_tensors: list[str] = Field(
        default_factory=list,
        description="Regular expressions for tensors of the checkpoint to skip. Any other tensor that the model "
        "has no parameter for is an error.",
    )
    device_map: str | None = Field(
        default=None,
        description="Kept for configs written for transformers. FSDP2 places the weights, so any value other than "
        "null has no effect, and the run says so.",
    )
    use_cache: bool = Field(
        default=False,
        description="Key/value cache for generation. No effect in training; true gives a notice.",
    )
    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "shardtune_varlen", "shardtune_whole_rows"
    ] = Field(
        default="auto",
        description="Attention implementation of transformers. `auto` = sdpa, or eager where the model has no "
        "sdpa; on a GPU variable-length attention for packed rows (shardtune_varlen), or sdpa without "
        "a mask (shardtune_whole_rows).",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that ships with the checkpoint. Only for sources you trust."
    )


ALL_LINEAR = "all-linear"
ATTENTION = "attention"
MLP = "mlp"
EXPERTS = "experts"
SHARED_EXPERTS = "shared-experts"
ROUTER = "router"

# Words that may stand in lora.target_modules for a part of the model.
TARGET_WORDS = (ATTENTION, MLP, EXPERTS, SHARED_EXPERTS, ALL_LINEAR, ROUTER)

# Names of embeddings and output heads, which cannot have an adapter.
VOCABULARY = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "tok_embeddings")

# Both places that refuse dropout give this reason.
NO_DROPOUT = (
    "an adapter on a fused tensor or a router is computed as W + B·A, and dropout on its input is not possible there"
)


def entries_of(target_modules: str | list[str]) -> list[str]:
    """The entries of `lora.target_modules`, however it is written."""
    return [target_modules] if isinstance(target_modules, str) else list(target_modules)


class LoraSection(Section):
    """Which adapters are trained."""

    r: Int = Field(default=16, ge=1, description="Rank of the adapters.")
    lora_alpha: Float = Field(
        default=32, gt=0, description="Scale of the adapters: their output is multiplied by alpha / r."
    )
    lora_dropout: Float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Dropout on the adapters' input while training, from 0 to below 1. Must be 0 when routed experts "
        "or the router are adapted.",
    )
    target_modules: Annotated[str | list[str], BeforeValidator(comma_list)] = Field(
        default=["attention", "mlp"],
        min_length=1,
        description="What gets an adapter, as one entry or a list: the words `attention`, `mlp` (with shared "
        "experts), `shared-experts`, `experts`, `router`, `all-linear` (every linear layer but output "
        "head and router), as the model's family defines them; module names (`q_proj`); regular "
        "expressions over full names. Each entry must match something. Names from other architectures "
        "are mapped to this one's.",
        examples=[["attention", "mlp"], ["q_proj", "k_proj", "v_proj", "o_proj"]],
    )
    exclude_modules: Annotated[str | list[str], BeforeValidator(comma_list)] = Field(
        default_factory=list,
        description="Names or regular expressions of modules without an adapter, even if target_modules matches them.",
        examples=[["lm_head", "layers.0.mlp.down_proj"]],
    )
    layers_to_transform: Annotated[Int, Field(ge=0)] | list[Annotated[Int, Field(ge=0)]] | None = Field(
        default=None,
        description="Indices of the decoder layers that get adapters, from 0; null = all.",
        examples=[[0, 1, 2, 3]],
    )
    rank_pattern: dict[str, Annotated[Int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="Ranks of individual adapters, by the end of the module's name or a regular expression for "
        "it; the first match wins. The scale becomes lora_alpha / that rank, as in PEFT.",
        examples=[{"down_proj": 32}],
    )
    alpha_pattern: dict[str, Annotated[Float, Field(gt=0)]] = Field(
        default_factory=dict, description="Alphas of individual adapters, by name as in rank_pattern."
    )
    experts: bool | None = Field(
        default=None,
        description="In a mixture of experts: whether `mlp`, `all-linear` and names such as `gate_proj` include "
        "the routed experts. null = no, and the run reports what gets no adapter.",
    )
    expert_r: Annotated[Int, Field(ge=1)] | None = Field(
        default=None, description="Rank of the adapters on routed experts; null = r."
    )
    expert_alpha: Annotated[Float, Field(gt=0)] | None = Field(
        default=None,
        description="Alpha of the adapters on routed experts; null = the same scale as the other adapters "
        "(lora_alpha × expert_r / r; with use_rslora, lora_alpha).",
    )
    modules_to_save: Annotated[str | list[str], BeforeValidator(comma_list)] = Field(
        default_factory=list,
        description="Names or regular expressions of layers that are trained in full alongside the adapters: "
        "embedding, output head, norms. They are saved with the adapter and every checkpoint, in "
        "float32.",
        examples=[["embed_tokens", "lm_head"]],
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none",
        description="Bias vectors that are trained too: none, all of the model's, or those of adapted layers.",
    )
    task_type: Literal["CAUSAL_LM"] = Field(
        default="CAUSAL_LM", description="PEFT's task type; only causal language models."
    )
    use_dora: bool = Field(
        default=False,
        description="DoRA: the magnitude of each row of an adapted weight is trained separately from its "
        "direction. Only linear layers in bf16 or float32; runs PEFT's own code, slower than the "
        "fused LoRA kernels.",
    )
    init_lora_weights: Literal[True, "gaussian"] = Field(
        default=True,
        description="Initialisation of A (B is zero): uniform within ±1/√(inputs) (true), or normal with a "
        "standard deviation of 1/r (`gaussian`).",
    )
    use_rslora: bool = Field(
        default=False, description="Scale by alpha / sqrt(r) instead of alpha / r (rank-stabilised LoRA)."
    )


class SourceSection(Section):
    """One source of a mixture."""

    path: str = Field(min_length=1, description="A file, glob, folder or hub name, as dataset_name_or_path takes it.")
    weight: Float = Field(
        default=1.0,
        gt=0,
        description="Repetitions of its rows per epoch: 2 = each row twice, 0.5 = a random half of them (by "
        "train.seed).",
    )
    config_name: str | None = Field(default=None, description="Configuration of a hub dataset.")
    split: str | None = Field(default=None, description="Split to train on; null = train_split.")


class DataSection(Section):
    """Training and validation data."""

    dataset_name_or_path: str | list[str | SourceSection] = Field(
        min_length=1,
        description="A local file (.jsonl .json .parquet .csv .tsv .arrow .txt, plain or .gz/.zst), a glob, a folder "
        "of such files, a folder written by `datasets`, a URL that fsspec knows (s3://…), a hub name; or a list of "
        "these, each with a weight.",
        examples=["data/train.jsonl", "wikitext"],
    )
    dataset_config_name: str | None = Field(
        default=None, description="Configuration of a hub dataset, e.g. wikitext-2-raw-v1."
    )
    format: Literal["auto", "text", "prompt", "prompt-completion", "chat"] = Field(
        default="auto",
        description="What a row is: `text` (one column), `prompt` (prompt_template), `prompt-completion` (columns "
        "prompt and completion), `chat` (a column of messages, OpenAI or ShareGPT form). `auto` = "
        "detected from the columns; the run reports it.",
    )
    text_field: str | None = Field(
        default=None,
        min_length=1,
        description="Column that holds the text (format: text). If set, `format: auto` means `text`; null = text.",
    )
    messages_field: str | None = Field(
        default=None, description="Column that holds the messages (format: chat); null = messages or conversations."
    )
    prompt_template: str | None = Field(
        default=None,
        description='Template of a row\'s text, such as "{instruction}\\n\\n{response}". The last column is the '
        "answer, everything before it the prompt. Empty prompt columns become empty text; rows "
        "without an answer are dropped. Literal braces are doubled: {{ }}.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template instead of the tokenizer's own: a .jinja file, or one of chatml, llama3, "
        "mistral, qwen. Refused if no row is a conversation.",
    )
    train_on: Literal["auto", "assistant", "completion", "all"] = Field(
        default="auto",
        description="Which tokens are supervised: the assistant's turns with their end-of-turn token (chat), the "
        "answer (prompt formats), or all. `auto` = assistant, completion or all, as the format suggests.",
    )
    train_split: str = Field(
        default="train", min_length=1, description="Split to train on (slices such as train[:90%] work)."
    )
    val_split: Annotated[Float, Field(gt=0, lt=1)] | str | None = Field(
        default=None,
        description="Split to evaluate on, or the fraction of training rows to hold out (0.05); null = no "
        "evaluation. Rows are held out by a hash of their content, whatever their order, so the "
        "fraction is approximate.",
    )
    max_length: Int = Field(
        default=1024,
        ge=2,
        le=2**24,
        description="Maximum length of a row in tokens, and the length of a packed sequence.",
    )
    long_rows: Literal["truncate", "drop", "split"] = Field(
        default="truncate",
        description="Rows longer than max_length are truncated, dropped, or split into several rows.",
    )
    concatenate: bool | Literal["auto"] = Field(
        default="auto",
        description="Concatenate the rows of a text corpus and cut them into sequences of max_length, as in "
        "pre-training. `auto` = for plain-text files and rows that end in line breaks (WikiText); the "
        "run reports it.",
    )
    append_eos: bool = Field(
        default=True,
        description="End every row with the tokenizer's end-of-sequence token, so that the model learns to stop. "
        "(Chat templates end their turns themselves.)",
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="A row that cannot be read or rendered: stop and say where it is, or skip and count it.",
    )
    cache_dir: str | None = Field(
        default=None,
        description="Where prepared data is kept; null = $SHARDTUNE_CACHE, else ~/.cache/shardtune.",
    )


class TrainSection(Section):
    """How the adapters are trained."""

    output_dir: str = Field(
        default="runs", min_length=1, description="Each run has its own folder, <output_dir>/<run-id>."
    )
    run_folder_access: Literal["private", "group"] = Field(
        default="private",
        description="Who else may read a run's folder: nobody (`private`, mode 0700), or its group (`group`, "
        "0750). Permissions of an existing folder are not tightened.",
    )
    num_train_epochs: Float = Field(
        default=3.0, gt=0, description="Passes over the training data (fractions are allowed)."
    )
    # transformers reads 0 as "by epochs", which nobody means by it.
    max_steps: Annotated[Int, Field(ge=1)] | Literal[-1] = Field(
        default=-1, description="Number of optimizer steps; -1 = what num_train_epochs takes."
    )
    effective_batch_size: Annotated[int, Field(ge=1), BeforeValidator(number)] | None = Field(
        default=None,
        description="Rows of all processes in one optimizer step, on any number of nodes; must be divisible by the "
        "number of processes. per_device_train_batch_size and gradient_accumulation_steps are chosen to make it. "
        "null = what these give; 8 rows per process where both are auto.",
    )
    per_device_train_batch_size: Annotated[int, Field(ge=1), BeforeValidator(number)] | Literal["auto"] = Field(
        default="auto",
        description="Rows per process in one forward pass. `auto` = what is fastest in the memory there is, with "
        "gradient_accumulation_steps making up the same effective batch.",
    )
    per_device_eval_batch_size: Int = Field(default=8, ge=1, description="The same for evaluation.")
    gradient_accumulation_steps: Annotated[int, Field(ge=1), BeforeValidator(number)] | Literal["auto"] = Field(
        default="auto",
        description="Forward passes per optimizer step. Effective batch = per-device × processes × this. `auto` = what "
        "the effective batch takes, else 1.",
    )
    gradient_checkpointing: Checkpointing = Field(
        default="auto",
        description="Activation checkpointing: recompute whole layers in the backward pass (`full`, or true: "
        "about a third more compute), only cheap operations (`selective`: results of matrix products "
        "and attention are kept), or nothing (`none`, or false). `auto` = the fastest that fits in memory.",
    )
    offload_activations: bool | Literal["auto"] = Field(
        default="auto",
        description="Keep checkpointed layer inputs (gradient_checkpointing: full) in host memory until the "
        "backward pass. The copies overlap with computation. GPU only. `auto` = only if the run fits no other way.",
    )
    optim: str = Field(
        default="adamw_torch",
        description="Optimizer: adamw_torch (fused on a GPU), adamw_torch_fused, adam, adamax, nadam, radam, sgd, "
        "rmsprop, adagrad or adadelta. Others do not support sharded tensors and are refused.",
    )
    optim_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of the optimizer's class in torch.optim, by name; unknown ones are refused.",
        examples=[{"momentum": 0.9}],
    )
    adam_beta1: Float = Field(
        default=0.9, ge=0, lt=1, description="Decay of the running mean of gradients (Adam-type optimizers)."
    )
    adam_beta2: Float = Field(
        default=0.999, ge=0, lt=1, description="Decay of the running mean of squared gradients (Adam-type optimizers)."
    )
    adam_epsilon: Float = Field(
        default=1e-8, ge=0, description="Added to the denominator of the update, for numerical stability."
    )
    learning_rate: Float = Field(default=1e-4, gt=0, description="Peak learning rate.")
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant",
        "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay",
    ] = Field(default="cosine", description="Learning-rate schedule after warm-up.")  # fmt: skip
    lr_scheduler_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters of the schedule, by transformers' names; those the schedule does not have are refused.",
        examples=[{"num_cycles": 2}, {"min_lr_rate": 0.1}],
    )
    warmup_ratio: Float = Field(default=0.05, ge=0, lt=1, description="Warm-up as a fraction of all steps.")
    warmup_steps: Int | None = Field(default=None, ge=0, description="Warm-up in steps; overrides warmup_ratio.")
    weight_decay: Float = Field(
        default=0.01, ge=0, description="Weight decay: decoupled in AdamW, L2 in other optimizers."
    )
    max_grad_norm: Float = Field(
        default=1.0, ge=0, description="Gradients are clipped to this global norm; 0 = no clipping."
    )
    loss: Literal["nll", "dft"] = Field(
        default="nll",
        description="Training objective, averaged over supervised tokens: `nll` = negative log-likelihood; `dft` = "
        "Dynamic Fine-Tuning, each token's loss weighted by its (detached) probability. Validation loss is always nll.",
    )
    label_smoothing_factor: Float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the target probability spread evenly over the vocabulary. Training only; 0 = off.",
    )
    router_aux_loss_coef: Float | None = Field(
        default=None,
        ge=0,
        description="Weight of the routers' load-balancing loss in a mixture of experts; 0 = off, null = the value in "
        "the model's config.",
    )
    neftune_noise_alpha: Float | None = Field(
        default=None,
        ge=0,
        description="NEFTune: uniform noise on the input embeddings while training, scaled by alpha / √(tokens × "
        "hidden size); 0 or null = off.",
    )
    bf16: bool | Literal["auto"] = Field(
        default="auto",
        description="Compute in bfloat16 while the adapters' master weights stay float32. `auto` = when the model is "
        "held in bfloat16.",
    )
    fp16: bool = Field(
        default=False,
        description="Not supported, because it needs loss scaling and overflows where bf16 does not: true is refused.",
    )
    kernels: Literal["auto", "eager"] = Field(
        default="auto",
        description="`auto` = fused and compiled kernels where machine and model support them (the run reports "
        "which); `eager` = plain PyTorch instead of each of them.",
    )
    fused_lora: bool | Literal["auto"] = Field(
        default="auto",
        description="A linear layer and its adapter in one operator. `auto` = on, unless kernels is eager.",
    )
    fused_experts: bool | Literal["auto"] = Field(
        default="auto",
        description="Routed experts as grouped matrix products, with tokens sorted by expert. If off: "
        "transformers' own code, or one expert at a time where they are adapted or held in FP8. "
        "`auto` = on for model families where it is verified to give the same results, unless kernels "
        "is eager.",
    )
    fused_loss: bool | Literal["auto"] = Field(
        default="auto",
        description="Output head and loss in one operator, for supervised tokens only and without materialising "
        "the logits. `auto` = on for model families with nothing between head and loss, unless "
        "kernels is eager.",
    )
    fp8_compute: bool | Literal["auto"] = Field(
        default="auto",
        description="FP8 matrix products for weights held in FP8 (base_precision: fp8): activations and their "
        "gradients are quantised per row; adapters stay in the compute dtype. Faster on Hopper and "
        "later, with a relative error of a few percent per product; elsewhere the same rounding "
        "without the speedup. `auto` = off.",
    )
    compile: bool | Literal["auto"] = Field(
        default="auto",
        description="Compile each decoder layer with torch.compile, at the first step. `auto` = on a GPU in bf16, "
        "for model families where it is verified to give the same results, unless kernels is eager.",
    )
    packing: bool | Literal["auto"] = Field(
        default="auto",
        description="Several rows per sequence of max_length, kept separate in attention and positions. `auto` = "
        "on where every layer of the model is known to keep them separate; off on a GPU if single "
        "rows already fill max_length.",
    )
    dataloader_num_workers: Int = Field(
        default=0, ge=0, description="Processes that load batches ahead, for each rank; 0 = the rank loads them itself."
    )
    dataloader_prefetch_factor: Int | None = Field(
        default=None, ge=1, description="Batches each worker loads ahead; null = 2. Needs dataloader_num_workers."
    )
    dataloader_persistent_workers: bool = Field(
        default=False, description="Keep the workers between epochs. Needs dataloader_num_workers."
    )
    dataloader_pin_memory: bool = Field(
        default=True, description="Load batches into pinned host memory, for faster copies to the GPU. GPU only."
    )
    logging_strategy: Strategy = Field(
        default="steps", description="When to log: no, steps (every logging_steps), epoch."
    )
    logging_first_step: bool = Field(default=True, description="Also log the first step.")
    logging_steps: Int = Field(
        default=25, ge=1, description="Log loss, speed and time left every N steps (logging_strategy: steps)."
    )
    eval_strategy: AutoStrategy = Field(
        default="auto",
        description="When to evaluate: no, steps, epoch. `auto` = steps when data.val_split is given, else no.",
    )
    eval_steps: Int = Field(default=200, ge=1, description="Evaluate every N steps (eval_strategy: steps).")
    eval_delay: Float = Field(
        default=0,
        ge=0,
        description="No evaluation before this step (eval_strategy: steps) or epoch (eval_strategy: epoch).",
    )
    eval_on_start: bool = Field(default=False, description="Also evaluate before the first step.")
    early_stopping_patience: Int | None = Field(
        default=None,
        ge=1,
        description="Stop after this many evaluations in a row without a lower validation loss; null = never.",
    )
    early_stopping_threshold: Float = Field(
        default=0.0, ge=0, description="Smallest decrease of the validation loss that counts as an improvement."
    )
    save_strategy: Strategy = Field(default="steps", description="When to save a checkpoint: no, steps, epoch.")
    save_steps: Int = Field(default=200, ge=1, description="Save a checkpoint every N steps (save_strategy: steps).")
    save_minutes: Float | None = Field(
        default=None,
        gt=0,
        le=_YEAR_IN_MINUTES,
        description="Also save a checkpoint at the next step once this many minutes have passed since the last "
        "one; null = by save_strategy only.",
    )
    save_total_limit: Int | None = Field(
        default=3, ge=1, description="Checkpoints to keep (the best one is never deleted); null = all."
    )
    load_best_model_at_end: bool = Field(
        default=False,
        description="Write the weights with the lowest validation loss (of a checkpoint or the last step) to "
        "`final/`, instead of the last step's.",
    )
    final_wait_minutes: Float = Field(
        default=10,
        ge=0,
        le=_YEAR_IN_MINUTES,
        description="If `final/` cannot be written (a full disk), how long to wait for space there or in "
        "fallback_dir before the adapter is written to TMPDIR.",
    )
    fallback_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Where the final adapter is written if `final/` cannot be: `<fallback_dir>/<run>/final`. Best "
        "on another disk than output_dir.",
        examples=["/scratch/shardtune"],
    )
    grace_seconds: Float | None = Field(
        default=None,
        gt=0,
        le=_YEAR_IN_SECONDS,
        description="Seconds between a scheduler's SIGTERM and its SIGKILL; null = the environment variable "
        "SHARDTUNE_GRACE_SECONDS, else 30. The run warns when a step and a save take longer; if neither is set, only "
        "in a pod or a SLURM job.",
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="What to resume: `auto` (the newest unfinished run of the same config, else a new run), "
        "`latest`, `best`, `never`, or the path of a checkpoint or run (also --resume).",
        examples=["never", "runs/20260101-120000-ab12/checkpoints/step-000200"],
    )
    report_to: Annotated[str | list[str], BeforeValidator(_none_word), BeforeValidator(comma_list)] = Field(
        default="none",
        description="Experiment trackers of transformers (tensorboard, wandb, mlflow, trackio), or none.",
    )
    run_name: str | None = Field(
        default=None, min_length=1, description="Name of the run in the tracker (wandb, mlflow, trackio, comet_ml, …)."
    )
    project: str | None = Field(
        default=None, min_length=1, description="Project in trackio; null = huggingface. (wandb reads WANDB_PROJECT.)"
    )
    trackio_space_id: str | None = Field(
        default=None, min_length=1, description="Hugging Face Space that trackio logs to; null = locally."
    )
    trackio_bucket_id: str | None = Field(
        default=None, min_length=1, description="Hugging Face bucket that trackio stores the run's metrics in."
    )
    trackio_static_space_id: Literal[False] | str | None = Field(
        default=None, description="Static Space that trackio publishes the run to at its end; false = none."
    )
    callbacks: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Your own transformers.TrainerCallback classes, each as `module:Class`; created without arguments.",
        examples=[["my_callbacks:SendLossToSlack"]],
    )
    seed: Int = Field(
        default=42, ge=0, le=2**32 - 1, description="Seed of adapter initialisation, data order and dropout."
    )
    data_seed: Int | None = Field(
        default=None, ge=0, le=2**32 - 1, description="Seed of the order of training rows; null = seed."
    )
    full_determinism: bool = Field(
        default=False,
        description="Deterministic algorithms only (torch.use_deterministic_algorithms); slower. A resumed run on the "
        "same hardware is bit-identical.",
    )
    tf32: bool | None = Field(
        default=None,
        description="TF32 for float32 matrix products on Ampere and later GPUs; null = torch's own setting.",
    )
    torch_empty_cache_steps: Int | None = Field(
        default=None,
        ge=1,
        description="Empty torch's GPU memory cache every N steps: slower, less fragmentation; null = never.",
    )
    ddp_find_unused_parameters: bool | None = Field(
        default=None,
        description="Kept for configs written for DDP. FSDP2 has no such setting; any value gives a notice.",
    )
    debug_freq: Int = Field(
        default=25, ge=1, description="Measure time and memory of a step every N steps (also --debug-freq)."
    )
    samples: Int = Field(
        default=0,
        ge=0,
        description="Generate answers to this many rows (of validation, else of training) before and after "
        "training, with greedy decoding: the prompt is the row up to its first supervised token. Each "
        "token takes a forward pass on all ranks.",
    )
    sample_tokens: Int = Field(default=64, ge=1, description="Maximum length of a generated answer, in tokens.")

    @property
    def micro_batch(self) -> int:
        """`per_device_train_batch_size`, once it is chosen."""
        assert self.per_device_train_batch_size != "auto"
        return self.per_device_train_batch_size

    @property
    def accumulation(self) -> int:
        """`gradient_accumulation_steps`, once they are chosen."""
        assert self.gradient_accumulation_steps != "auto"
        return self.gradient_accumulation_steps


class ParallelSection(Section):
    """Processes and sharding (FSDP2)."""

    nproc: Annotated[int, Field(ge=1), BeforeValidator(number)] | Literal["auto"] = Field(
        default="auto", description="Processes on this machine; `auto` = one per GPU, or one without a GPU."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device to compute on; `auto` = cuda if available."
    )
    accelerate_config: str | None = Field(
        default=None, description="An accelerate config file (fsdp.yaml) to translate, with a verdict for every key."
    )
    transformer_layer_cls_to_wrap: Annotated[str | list[str] | None, BeforeValidator(comma_list)] = Field(
        default=None,
        description="Class of the layers that are sharded individually; null = detected. The decoder layer of "
        "another architecture (MistralDecoderLayer for a Mistral 4) stands for this model's.",
    )
    shard: Literal["auto", "full", "hybrid", "replicate"] = Field(
        default="auto",
        description="How far the frozen base is sharded: `full` over all processes; `hybrid` inside a node (or groups "
        "of `shard_size`), with a replica in each; `replicate`: every process holds it, and only adapters are "
        "communicated. `auto` = the fastest that fits in memory (docs/parallel.md).",
    )
    shard_size: Annotated[int, Field(ge=1), BeforeValidator(number)] | None = Field(
        default=None, description="Processes that share one replica of the base (`shard: hybrid`); null = a node's."
    )
    reshard_after_forward: bool | Literal["auto"] = Field(
        default="auto",
        description="Free a layer's gathered weights after its forward pass and gather them again for backward; "
        "`false` keeps them until the step's last backward pass. `auto` = true where they would not fit.",
    )
    forward_prefetch: Int = Field(default=1, ge=0, le=8, description="Layers gathered ahead in the forward pass.")
    backward_prefetch: Int = Field(default=1, ge=0, le=8, description="Layers gathered ahead in the backward pass.")
    offload_params: bool | Literal["auto"] = Field(
        default="auto",
        description="Keep parameter shards, gradients and optimizer state in host memory (slow). No effect on a CPU. "
        "`auto` = only if the run fits no other way.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Dtype in which gradients are reduced across ranks."
    )
    load_timeout_minutes: Float = Field(
        default=30,
        gt=0,
        le=_YEAR_IN_MINUTES,
        description="The run fails if loading the weights makes no progress for this long (docs/failures.md).",
    )
    step_timeout_minutes: Float = Field(
        default=10,
        gt=0,
        le=_YEAR_IN_MINUTES,
        description="The run fails if a batch of data, a forward and backward pass, or a batch of an evaluation "
        "takes longer than this. The first step may compile kernels: leave time for it.",
    )
    checkpoint_timeout_minutes: Float = Field(
        default=30,
        gt=0,
        le=_YEAR_IN_MINUTES,
        description="The run fails if saving a checkpoint or the final adapter takes longer than this.",
    )
    join_timeout_minutes: Float = Field(
        default=10,
        gt=0,
        le=_YEAR_IN_MINUTES,
        description="How long a node waits for the master and for the other nodes at the start.",
    )
    node_timeout_seconds: Float = Field(
        default=30,
        gt=0,
        le=_YEAR_IN_SECONDS,
        description="A node that has not been heard from for this long is considered lost.",
    )
    max_restarts: Int = Field(
        default=0,
        ge=0,
        description="How often the launcher restarts all processes after a failure that is not a user error: a "
        "killed, hung or lost process or node (also --max-restarts).",
    )


class GuardsSection(Section):
    """Checks of each step, and what they trigger (docs/guards.md)."""

    memory_plan: Annotated[Literal["refuse", "warn", "off"], BeforeValidator(_off_word)] = Field(
        default="refuse",
        description="The run needs more GPU memory than there is, by the plan (docs/plan.md): `refuse` it before "
        "weights are loaded, `warn`, or say nothing (`off`).",
    )
    non_finite: Literal["skip-step", "rollback", "stop"] = Field(
        default="stop",
        description="Loss or gradient is NaN or infinite. It never reaches the optimizer: `skip-step` skips the "
        "update, `rollback` returns to the last checkpoint and skips the step's rows, `stop` ends the "
        "run.",
    )
    loss_spike: SpikeAction = Field(default="warn", description="A step's loss is far above the recent ones.")
    loss_spike_z: Float = Field(
        default=10.0, gt=0, description="Threshold: robust standard deviations (1.4826 × MAD) above the median …"
    )
    loss_spike_ratio: Float = Field(default=1.5, gt=1, description="… and at least this multiple of the median.")
    grad_norm_spike: SpikeAction = Field(
        default="warn", description="The gradient norm (before clipping) is far above the recent ones."
    )
    grad_norm_spike_z: Float = Field(
        default=12.0, gt=0, description="Threshold: robust standard deviations above the median …"
    )
    grad_norm_spike_ratio: Float = Field(default=10.0, gt=1, description="… and at least this multiple of the median.")
    window: Int = Field(
        default=50,
        ge=8,
        description="Steps over which the median and MAD are computed; spikes are reported once half of them have "
        "passed.",
    )
    divergence: TrendAction = Field(
        default="warn", description="The loss has risen and stays up (the median of the last window)."
    )
    divergence_ratio: Float = Field(
        default=1.5,
        gt=1,
        description="Threshold: this multiple of the lowest median so far (and at least 0.3 above it, and above "
        "the initial loss).",
    )
    flat_loss: WatchAction = Field(
        default="warn", description="After flat_loss_steps the loss is no lower than at the start."
    )
    flat_loss_steps: Int = Field(default=200, ge=8, description="Steps within which the loss has to fall.")
    frozen_adapter: WatchAction = Field(
        default="warn",
        description="The adapters are bit-identical in two checks in a row (every train.debug_freq steps) "
        "although the learning rate is not zero. The first steps are always checked.",
    )
    straggler: WatchAction = Field(
        default="warn",
        description="A rank's own forward computation takes longer per token than the other ranks', not counting "
        "waits (checked every train.debug_freq steps).",
    )
    straggler_ratio: Float = Field(
        default=1.3, gt=1, description="Threshold: this multiple of the median rank's time, in three checks in a row."
    )
    memory: WatchAction = Field(default="warn", description="A GPU is nearly full.")
    memory_share: Float = Field(
        default=0.95, gt=0, lt=1, description="Threshold: peak allocated memory as a fraction of the GPU's."
    )
    data_starvation: WatchAction = Field(default="warn", description="Steps wait for data.")
    data_starvation_share: Float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="Threshold: fraction of the time between two checks that a rank waited for batches.",
    )
    throttling: WatchAction = Field(
        default="warn",
        description="A GPU lowers its clocks because of heat or a power brake (NVML); the ordinary power limit does "
        "not count.",
    )
    replica_check_steps: Int = Field(
        default=0,
        ge=0,
        description="Compare the weights of replicas (parallel.shard: replicate or hybrid) by checksum every so many "
        "steps, and stop the run if they differ; 0 = at the start only.",
    )
    max_skips: Int = Field(default=5, ge=1, description="The run ends after more skipped steps in a row than this.")
    max_rollbacks: Int = Field(default=3, ge=1, description="The run ends after more rollbacks than this.")


class RunConfig(Section):
    """One YAML describes a run."""

    model: ModelSection = Field(description="Which model is trained and how its weights are held.")
    lora: LoraSection = Field(default_factory=LoraSection, description="Which adapters are trained.")
    data: DataSection = Field(description="Training and validation data.")
    train: TrainSection = Field(default_factory=TrainSection, description="How the adapters are trained.")
    parallel: ParallelSection = Field(default_factory=ParallelSection, description="Processes and sharding (FSDP2).")
    guards: GuardsSection = Field(
        default_factory=GuardsSection, description="Checks of each step, and what they trigger (docs/guards.md)."
    )
    cluster: ClusterSection = Field(
        default_factory=ClusterSection,
        description="The job for a scheduler: `shardtune submit` reads it, `train` does not.",
    )
    # What was written where values came from ${VAR} (see references.py); goes along with every copy.
    _references: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)
