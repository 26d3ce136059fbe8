"""How is a trained model loaded to answer? Base and adapter in one process, not merged, on a GPU or a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftConfig, PeftModel

from shardtune import terminal
from shardtune.adapters.experts import use_grouped_products, use_linear_products
from shardtune.adapters.new_tokens import use_token_rows
from shardtune.checkpoint.adapter import AdapterMismatchError, check_adapter_matches, load_adapter, read_adapter
from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.inference.source import TunedModel
from shardtune.machine import free_memory, lacks_bf16
from shardtune.model.experts import use_expert_loops, use_grouped_experts
from shardtune.model.load import load_tokenizer, model_folder
from shardtune.model.meta_model import MetaModel, build_meta_model, first_line, fp8_blocks
from shardtune.model.quantized import use_fp8_storage
from shardtune.model.safetensors_headers import read_headers
from shardtune.model.shard_reader import ShardReader
from shardtune.model.weight_loading import load_shards, local_shards, materialize

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_COPY = ".base_layer.weight"
_INITS_THAT_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class LoadedModel:
    """A trained model, ready to answer.

    Attributes:
        model: Base and adapter; `side` is the one or the other.
        folder: Of the base model's files.
        stored_rows: Rows of the embedding that the base has; tokens from this id on are known with the adapter alone.
        own_biases: The base's, of those that trained: PEFT has only one place for both.
    """

    tuned: TunedModel
    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    device: torch.device
    stored_rows: int
    own_biases: Mapping[str, torch.Tensor]

    @contextmanager
    def side(self, *, tuned: bool) -> Iterator[PeftModel]:
        """The model with its adapter, or the base as it is."""
        if tuned:
            yield self.model
            return
        # Not `disable_adapter`, which looks at every module for a report first: for each token, 15 ms in 36 layers.
        layers = self.model.base_model
        trained = {name: self.model.get_parameter(name).data for name in self.own_biases}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Careful, disabling adapter layers with bias")  # they change below
                layers.disable_adapter_layers()
            for name, bias in self.own_biases.items():
                self.model.get_parameter(name).data = bias
            yield self.model
        finally:
            for name, bias in trained.items():
                self.model.get_parameter(name).data = bias
            layers.enable_adapter_layers()


@dataclass(frozen=True)
class MetaAdapter:
    """Base and adapter on the meta device, what was read of the adapter, and where the base's weights are.

    Attributes:
        tensors: The adapter's, by PEFT's names on disk.
        stored_rows: As of `LoadedModel`.
    """

    tuned: TunedModel
    meta_model: MetaModel
    model: PeftModel
    tensors: dict[str, torch.Tensor]
    folder: Path
    stored_rows: int


def build_adapted(tuned: TunedModel, *, fp8: bool | None = None) -> MetaAdapter:
    """Everything but the weights: the base is built on the meta device, and the adapter's files are compared with it.

    Args:
        fp8: Hold linear layers and experts in FP8; None: as training did, or as the checkpoint stores them.

    Raises:
        UserInputError: the base is not there, or the adapter does not fit it.
    """
    # Attention code of training reads packed rows and knows no cache.
    section = tuned.base.model_copy(update={"attn_implementation": "auto"})
    folder = model_folder(section)
    meta_model = build_meta_model(section, folder, read_headers(folder))
    if fp8 if fp8 is not None else _is_held_in_fp8(section, meta_model):
        use_fp8_storage(meta_model.model, fp8_blocks(meta_model))
    config = _peft_config(tuned)
    tensors = _without_copies(read_adapter(tuned.adapter), meta_model)
    if meta_model.wrapper is not None and any(".language_model." in name for name in tensors):
        raise UserInputError(
            f"The adapter '{tuned.adapter}' was trained on {meta_model.wrapper.class_name}, the vision+text model.",
            why="Its tensors have the names of that class, and here the text model computes alone.",
            fix=f"Merge it with PEFT: load {meta_model.wrapper.class_name}, then merge_and_unload.",
        )
    stored_rows = len(meta_model.model.get_input_embeddings().weight)  # type: ignore[arg-type]
    rows = _trained_rows(config)
    _refuse_unknown_tokens(tuned, rows, folder)
    highest = max(rows, default=-1)
    if highest >= stored_rows:
        meta_model.model.resize_token_embeddings(highest + 1, mean_resizing=False)
    model = _adapted(meta_model.model, config, tuned)
    try:
        check_adapter_matches(model, tensors)
    except AdapterMismatchError as error:
        raise UserInputError(
            f"The adapter '{tuned.adapter}' does not fit '{section.model_name_or_path}'.",
            why=error.why,
            fix="Give the model it was trained on: --model PATH.",
        ) from error
    return MetaAdapter(tuned, meta_model, model, tensors, folder, stored_rows)


def load_tuned(
    tuned: TunedModel, device: torch.device | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> LoadedModel:
    """Read base and adapter into this process.

    The base is held as training held it (in FP8 where it was), except on a CPU without bf16 units: there in float32.
    The adapter computes in the base's dtype, as in training.

    Args:
        device: None: the first GPU, or the CPU where there is none.
        tokenizer: Where it is loaded already.

    Raises:
        UserInputError: files are missing or do not fit each other, or there is too little memory.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and lacks_bf16():
        tuned = _with_dtype(tuned, "float32")
    adapted = build_adapted(tuned)
    model, base = adapted.model, adapted.meta_model.model
    _refuse_too_large(model, device)
    tokenizer = tokenizer or load_tuned_tokenizer(tuned, adapted.folder)
    materialize(model, base, device)
    with ShardReader(adapted.meta_model.mapping) as reader:
        load_shards(local_shards(model, adapted.meta_model.mapping), reader)
    zero_added_rows(base, adapted.stored_rows)
    own_biases = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad and _is_bias(name)}
    load_adapter(model, adapted.tensors)
    dtype = base.dtype if base.dtype.itemsize > 1 else torch.bfloat16
    for parameter in model.parameters():
        if parameter.requires_grad:  # float32 on disk; FSDP2 casts them for each pass of training
            parameter.data = parameter.data.to(dtype)
    model.requires_grad_(False).eval()
    if device.type == "cuda":
        use_grouped_experts(base)
    else:
        use_expert_loops(base, compiled=False)
    base.config.use_cache = True
    return LoadedModel(tuned, model, tokenizer, adapted.folder, device, adapted.stored_rows, own_biases)


def load_tuned_tokenizer(tuned: TunedModel, folder: Path) -> PreTrainedTokenizerBase:
    """The one that was written beside the adapter, or the base's with `model.new_tokens` in it.

    Args:
        folder: Of the base model's files.
    """
    if has_tokenizer(tuned.adapter):
        own = ModelSection(model_name_or_path=str(tuned.adapter), trust_remote_code=tuned.base.trust_remote_code)
        return load_tokenizer(own)
    return load_tokenizer(tuned.base, folder)


def has_tokenizer(adapter: Path) -> bool:
    """A chat_template.jinja alone is none."""
    return any((adapter / name).is_file() for name in _TOKENIZER_FILES)


def _refuse_unknown_tokens(tuned: TunedModel, rows: list[int], folder: Path) -> None:
    """Rows of tokens that only a tokenizer beside the adapter knew, or the config of its run."""
    if not rows or has_tokenizer(tuned.adapter) or max(rows) < (known := len(load_tokenizer(tuned.base, folder))):
        return
    raise UserInputError(
        f"'{tuned.adapter}' has no tokenizer, and the base's does not have all of its tokens.",
        why=f"It trained the row of token {max(rows)}, and the base's tokenizer has {known} tokens.",
        fix="Copy the tokenizer's files (tokenizer.json, tokenizer_config.json) into that folder.",
    )


def _is_held_in_fp8(section: ModelSection, meta_model: MetaModel) -> bool:
    return section.base_precision == "fp8" or (section.base_precision == "auto" and bool(meta_model.mapping.quantised))


def _with_dtype(tuned: TunedModel, dtype: str) -> TunedModel:
    return replace(tuned, base=tuned.base.model_copy(update={"torch_dtype": dtype}))


def _peft_config(tuned: TunedModel) -> LoraConfig:
    try:
        config = PeftConfig.from_pretrained(str(tuned.adapter))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserInputError(
            f"The settings of the adapter '{tuned.adapter}' cannot be read.",
            why=first_line(error),
            fix="Use an adapter that the installed PEFT can load.",
        ) from error
    assert isinstance(config, LoraConfig)  # `find_tuned` refuses others
    _refuse_changed_base(tuned, config)
    config.inference_mode = False  # what trained is what is loaded; requires_grad says which
    return config


def _without_copies(tensors: dict[str, torch.Tensor], meta_model: MetaModel) -> dict[str, torch.Tensor]:
    """Beside LoRA on a head PEFT's save_pretrained writes the head itself; one that is the base's says nothing new."""
    copies = [name for name in tensors if name.endswith(_COPY)]
    if not copies:
        return tensors
    mapping = meta_model.mapping
    with ShardReader(mapping) as reader:
        for name in copies:
            base = name.removeprefix("base_model.model.").removesuffix(_COPY) + ".weight"
            pieces = mapping.pieces.get(mapping.same.get(base, base), ())
            if len(pieces) == 1 and pieces[0].scale is None and pieces[0].stored.shape == tuple(tensors[name].shape):
                rows = reader.rows(pieces[0].stored, 0, len(tensors[name]))
                if torch.equal(rows.to(tensors[name].dtype), tensors[name]):
                    tensors = {other: tensor for other, tensor in tensors.items() if other != name}
    return tensors


def _refuse_changed_base(tuned: TunedModel, config: LoraConfig) -> None:
    """Such an adapter belongs to other weights than the stored ones: W + BA would be wrong, unnoticed."""
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in _INITS_THAT_KEEP_THE_BASE:
        raise UserInputError(
            f"The adapter '{tuned.adapter}' was trained with init_lora_weights: {init}.",
            why="That changes the base's weights, so the adapter does not belong to the base as it is stored.",
            fix="Convert it to plain LoRA with PEFT: save_pretrained(…, path_initial_model_for_weight_conversion=…).",
        )
    if config.layer_replication:
        raise UserInputError(
            f"The adapter '{tuned.adapter}' repeats layers of the base model (layer_replication).",
            why="Such a model has more layers than its base's files.",
            fix="Merge it with PEFT: merge_and_unload.",
        )


def _trained_rows(config: LoraConfig) -> list[int]:
    given = config.trainable_token_indices or {}
    return [row for rows in given.values() for row in rows] if isinstance(given, dict) else list(given)


def _adapted(base: PreTrainedModel, config: LoraConfig, tuned: TunedModel) -> PeftModel:
    try:
        with warnings.catch_warnings():
            # PEFT looks for the patterns' keys among modules only; ours may name parameters (adapters/lora.py).
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            model = PeftModel(base, config, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserInputError(
            f"The adapter '{tuned.adapter}' does not fit '{tuned.base.model_name_or_path}'.",
            why=first_line(error),
            fix="Give the model it was trained on: --model PATH.",
        ) from error
    use_linear_products(model)
    use_grouped_products(model)
    use_token_rows(model)
    return model


def _refuse_too_large(model: PeftModel, device: torch.device) -> None:
    needed = sum(parameter.nbytes for parameter in model.parameters())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if free is not None and needed > free:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
        raise UserInputError(
            f"The model does not fit: its weights take {terminal.size(needed)}, and {where} has "
            f"{terminal.size(free)} free.",
            why="It is loaded into one device: nothing is sharded or offloaded to answer.",
            fix="Use a larger GPU, free its memory, or serve it with vLLM or SGLang (shardtune export --to vllm).",
        )


def _is_bias(name: str) -> bool:
    return name.endswith(".bias") and "modules_to_save" not in name


def zero_added_rows(base: PreTrainedModel, stored_rows: int) -> None:
    """Rows that no file holds belong to the adapter; without it they must at least be numbers."""
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        for name, parameter in module.named_parameters() if module is not None else ():
            if not name.startswith("token_adapter.trainable") and parameter.shape[0] > stored_rows:
                parameter.data[stored_rows:].zero_()
