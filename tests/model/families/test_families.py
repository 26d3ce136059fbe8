"""Is what the family files state true of the models transformers builds? Toys on the meta device, in every variant."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from running import REPOSITORY
from torch import nn
from toys import save_toy, toy_text_config, wrapper_config

from shardtune.config.schema import ModelSection
from shardtune.model.families.family import Family
from shardtune.model.families.generic import inspect_family
from shardtune.model.families.page import families_page
from shardtune.model.families.registry import families, family_for, family_of, wrapper_for
from shardtune.model.load import load_model

# What a config can change about the layers: together the variants must show every name a file states.
VARIANTS: dict[str, list[dict[str, object]]] = {
    "mistral4": [{}, {"q_lora_rank": None}, {"first_k_dense_replace": 1}],
    "qwen3_moe": [{}, {"mlp_only_layers": [0]}],
    "qwen2_moe": [{}, {"mlp_only_layers": [0]}],
    "qwen3_next": [{}, {"mlp_only_layers": [0]}],
    "deepseek_v3": [{}, {"q_lora_rank": None}],
    "gemma4_text": [{}, {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}],
}
ROUTER = re.compile(r"(mlp|feed_forward)\.(shared_expert_)?gate\.weight$|router\.(proj\.)?weight$")
TYPES = [(family, model_type) for family in families() for model_type in family.model_types]
BOTH = pytest.mark.parametrize(("family", "model_type"), TYPES, ids=[model_type for _, model_type in TYPES])


def built(family: Family, model_type: str) -> list[Any]:
    """The family's toy in each variant; building it proves that the class exists under that name."""
    model_class = getattr(transformers, family.causal_lm[model_type])
    with torch.device("meta"):
        return [model_class(toy_text_config(model_type, **changes)) for changes in VARIANTS.get(model_type, [{}])]


def layers(family: Family, model: Any) -> list[nn.Module]:
    name = family.decoder_layer[model.config.model_type]
    return [module for module in model.modules() if type(module).__name__ == name]


def adaptable(layer: nn.Module) -> set[str]:
    """All linear modules and all 3-D parameters of a layer, and the weights of its router."""
    linear = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    convolutions = {f"{name}.weight" for name, module in layer.named_modules() if isinstance(module, nn.Conv1d)}
    tensors = {name for name, p in layer.named_parameters() if p.ndim == 3} - convolutions
    routers = {name for name, p in layer.named_parameters() if p.ndim == 2 and ROUTER.search(name)}
    return (linear - {name.removesuffix(".weight") for name in routers}) | tensors | routers


def stated(family: Family) -> list[str]:
    feed_forward = [*family.mlp, *family.shared_experts, *family.experts, *family.router]
    return [*family.attention, *feed_forward, *family.other, *family.bypassed]


@BOTH
def test_a_family_states_everything_adaptable_in_its_layers_and_nothing_else(family: Family, model_type: str) -> None:
    assert len(stated(family)) == len(set(stated(family)))
    seen: set[str] = set()
    for model in built(family, model_type):
        found = layers(family, model)
        assert len(found) == model.config.num_hidden_layers
        for layer in found:
            assert adaptable(layer) <= set(stated(family))
            seen |= adaptable(layer)
    assert seen == set(stated(family))


@BOTH
def test_the_decoder_layer_is_the_one_the_model_says_never_to_split(family: Family, model_type: str) -> None:
    assert family.decoder_layer[model_type] in built(family, model_type)[0]._no_split_modules


@BOTH
def test_looking_at_a_toy_finds_what_its_family_file_states(family: Family, model_type: str) -> None:
    for model in built(family, model_type):
        looked = inspect_family(model)
        there = set().union(*(adaptable(layer) for layer in layers(family, model)))
        assert looked.decoder_layer == {model_type: family.decoder_layer[model_type]}
        assert looked.inspected and looked.doubts == tuple(
            f"Cannot tell whether {name} belongs to attention or MLP." for name in family.other if name in there
        )
        assert not looked.proven  # a look shows what there is, not what it computes
        for role in ("attention", "mlp", "shared_experts", "experts", "router", "bypassed"):
            assert set(getattr(looked, role)) == set(getattr(family, role)) & there, role


@BOTH
def test_what_a_copied_name_means_is_part_of_the_family(family: Family, model_type: str) -> None:
    for meant in family.aliases.values():
        assert meant and set(meant) <= set(stated(family))


def test_looking_translates_the_classic_names_as_the_file_of_the_same_architecture_does() -> None:
    for family in map(family_for, ("mistral4", "mixtral", "phi3", "deepseek_v3", "glm4", "glm4_moe", "gpt_oss")):
        assert family is not None
        (model, *_) = built(family, family.model_types[0])
        there = set().union(*(adaptable(layer) for layer in layers(family, model)))
        looked = inspect_family(model)
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            assert set(looked.aliases.get(name, ())) == set(family.aliases.get(name, ())) & there, (family.name, name)


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("starcoder2", {}, {"attention": 4, "mlp": 2}),
        ("falcon", {}, {"attention": 2, "mlp": 2}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, {"attention": 4, "mlp": 2}),
        ("olmoe", {"num_experts": 4, "intermediate_size": 16}, {"attention": 4, "experts": 2, "router": 1}),
    ],
)  # fmt: skip
def test_an_architecture_without_a_file_is_inspected(
    model_type: str, changes: dict[str, object], expected: dict[str, int]
) -> None:
    config = toy_text_config(model_type, **changes)
    with torch.device("meta"):
        family = family_of(transformers.AutoModelForCausalLM.from_config(config))
    assert family.inspected and not family.doubts
    parts = {role: len(getattr(family, role)) for role in ("attention", "mlp", "shared_experts", "experts", "router")}
    assert {role: count for role, count in parts.items() if count} == expected


def test_what_looking_cannot_place_is_a_doubt() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(toy_text_config("llama"))
        model.model.layers[1].extra = nn.Linear(4, 4)
    assert inspect_family(model).doubts == ("Cannot tell whether extra belongs to attention or MLP.",)


def test_a_known_model_is_not_inspected() -> None:
    with torch.device("meta"):
        assert family_of(transformers.LlamaForCausalLM(toy_text_config("llama"))) is family_for("llama")


def test_code_that_ships_with_a_checkpoint_is_inspected_whatever_it_calls_itself() -> None:
    remote = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {"__module__": "transformers_modules.llama"})
    with torch.device("meta"):
        family = family_of(remote(toy_text_config("llama")))
    assert family.inspected and not family.proven


def test_the_wrapper_is_known_for_the_text_models_it_packages() -> None:
    for text in ("mistral4", "mistral", "ministral3"):
        wrapper = wrapper_for("mistral3", text)
        assert wrapper is not None and wrapper.class_name == "Mistral3ForConditionalGeneration"
    assert wrapper_for("mistral3", "llama") is None
    assert wrapper_for("gemma3", "mistral4") is None
    assert wrapper_for("gemma3", "gemma3_text") is not None


def wrapped(text: str) -> Any:
    """The config of a tiny wrapper around a toy text model."""
    inside = toy_text_config(text)
    vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "patch_size": 8}
    one_layer = {**vision, "num_hidden_layers": 1}
    if text.startswith("qwen3_5"):
        config = transformers.Qwen3_5MoeConfig if "moe" in text else transformers.Qwen3_5Config
        layers = {**vision, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
        return config(text_config=inside, vision_config=layers)
    if text == "gemma4_text":
        heads = {**one_layer, "num_key_value_heads": 2, "head_dim": 8}
        return transformers.Gemma4Config(text_config=inside, vision_config=heads, audio_config=None)
    if text == "llama4_text":
        outer = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
        tower = {**one_layer, **outer, "intermediate_size": 64, "image_size": 16, "patch_size": 4}
        return transformers.Llama4Config(text_config=inside, vision_config=tower)
    if text == "gemma3_text":
        return transformers.Gemma3Config(text_config=inside, vision_config={**one_layer, "image_size": 16})
    return wrapper_config(inside)


PACKAGED = [kind for family, kind in TYPES if family.wrappers]


def renamed(name: str, prefixes: Any) -> str | None:
    fitting = [(old, new) for old, new in prefixes.items() if name.startswith(old)]
    assert len(fitting) <= 1
    return fitting[0][1] + name.removeprefix(fitting[0][0]) if fitting else None


@pytest.mark.parametrize("text", PACKAGED)
def test_a_wrappers_stored_names_become_exactly_the_text_models(tmp_path: Path, text: str) -> None:
    """Tensor by tensor: what each stored name becomes has the values that loading the text model gives it."""
    family = family_for(text)
    assert family is not None
    (wrapper,) = family.wrappers
    whole = getattr(transformers, wrapper.class_name)
    save_toy(whole, wrapped(text), tmp_path)
    loaded = load_model(ModelSection(model_name_or_path=str(tmp_path), torch_dtype="float32"))
    assert type(loaded).__name__ == family.causal_lm[text]
    served = whole.from_pretrained(tmp_path, dtype="float32").state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, served[str(renamed(name, wrapper.served))]), name


@pytest.mark.parametrize("text", PACKAGED)
def test_the_text_models_names_are_found_in_the_served_wrapper(text: str) -> None:
    family = family_for(text)
    assert family is not None
    wrapper = family.wrappers[0]
    with torch.device("meta"):
        served = getattr(transformers, wrapper.class_name)(wrapped(text))
        alone = getattr(transformers, family.causal_lm[text])(toy_text_config(text))
    inside = {name for name in served.state_dict() if not re.search("vision|visual|projector", name)}
    assert {renamed(name, wrapper.served) for name in alone.state_dict()} == inside


def test_the_page_in_docs_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "families.md").read_text(encoding="utf-8")
    assert page == families_page(), "make reference"


def test_the_family_files_need_no_torch() -> None:
    code = (
        "import sys; from shardtune.model.families.registry import families; families(); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr
