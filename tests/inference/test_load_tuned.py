"""A trained model in one process answers as plain transformers and PEFT do, with its adapter and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_toys import to_fp8
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from toys import mistral4_config, save_toy, toy_wrapper
from tuned_toys import CASES, IDS, adapted_toy, tuned_toy

from shardtune.adapters.weight_changes import weight_changes
from shardtune.checkpoint.adapter import write_adapter_files
from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.inference.load import build_adapted, load_tuned
from shardtune.inference.source import find_tuned
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PeftModel, Path]:
    """An adapter that PEFT itself made, with random values, and its folder."""
    folder = tmp_path_factory.mktemp("inference")
    return tuned_toy(request.param, folder), folder / "adapter"


def test_it_computes_what_peft_does(trained: tuple[PeftModel, Path]) -> None:
    peft, folder = trained
    tuned_model = find_tuned(str(folder))
    section = tuned_model.base.model_copy(update={"torch_dtype": "float32"})  # some CPUs have bf16 units, some not
    loaded = load_tuned(replace(tuned_model, base=section), torch.device("cpu"))
    with torch.no_grad():
        with loaded.side(tuned=True) as model:
            tuned = model(input_ids=IDS).logits.float()
        with loaded.side(tuned=False) as model:
            alone = model(input_ids=IDS).logits.float()
        wanted = peft(input_ids=IDS).logits
        base = type(peft.base_model.model).from_pretrained(folder.parent / "base", dtype=torch.float32)
        wanted_base = base(input_ids=IDS).logits
        with loaded.side(tuned=True) as model:
            again = model(input_ids=IDS).logits.float()
    assert (wanted - wanted_base).abs().max() > 0.01  # else nothing is compared
    assert torch.equal(tuned, again)
    torch.testing.assert_close(tuned, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone, wanted_base, rtol=1e-4, atol=1e-4)


def test_the_changes_of_weights_are_those_of_pefts_own_merge(trained: tuple[PeftModel, Path]) -> None:
    peft, folder = trained
    adapted = build_adapted(find_tuned(str(folder)))
    changes = weight_changes(adapted.model, adapted.tensors)
    import transformers

    base = getattr(transformers, type(peft.base_model.model).__name__).from_pretrained(folder.parent / "base")
    before = {name: p.detach().float().clone() for name, p in base.named_parameters()}
    merged = PeftModel.from_pretrained(base, folder).merge_and_unload()
    after = {name: p.detach().float() for name, p in merged.named_parameters()}
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == set(changes)
    for name, change in changes.items():
        torch.testing.assert_close(change.apply(before[name]), after[name], rtol=1e-5, atol=1e-5, msg=name)


def test_an_fp8_base_in_a_wrapper_answers_as_its_dequantised_values_do(tmp_path: Path) -> None:
    """Trained by nobody: what counts is that each path computes with the same weights and adapters."""
    toy_wrapper(tmp_path / "base", mistral4_config(moe_intermediate_size=24, hidden_size=40))
    to_fp8(tmp_path / "base", "blocks")
    base = tmp_path / "base"
    config = LoraConfig(
        r=4, task_type="CAUSAL_LM", base_model_name_or_path=str(base), target_modules=["q_a_proj", "o_proj"],
        target_parameters=["experts.down_proj"],
    )  # fmt: skip
    meta = build_meta_model(ModelSection(model_name_or_path=str(base)), base, read_headers(base)).model
    adapter = PeftModel(meta, config, low_cpu_mem_usage=True)
    torch.manual_seed(2)
    shapes = get_peft_model_state_dict(adapter)
    write_adapter_files(config, {name: torch.randn(t.shape) * 0.1 for name, t in shapes.items()}, tmp_path / "adapter")
    logits = {}
    for precision in ("fp8", "bf16"):
        tuned = find_tuned(str(tmp_path / "adapter"))
        section = tuned.base.model_copy(update={"base_precision": precision, "torch_dtype": "float32"})
        loaded = load_tuned(replace(tuned, base=section), torch.device("cpu"))
        held = {p.dtype for p in loaded.model.parameters()}
        assert (torch.float8_e4m3fn in held) == (precision == "fp8")
        for side in (True, False):
            with torch.no_grad(), loaded.side(tuned=side) as model:
                logits[precision, side] = model(input_ids=IDS).logits.float()
    assert (logits["fp8", True] - logits["fp8", False]).abs().max() > 0.01
    for side in (True, False):
        torch.testing.assert_close(logits["fp8", side], logits["bf16", side], rtol=1e-3, atol=1e-3)


def test_an_adapter_of_another_model_is_refused(trained: tuple[PeftModel, Path], tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    other = save_toy(
        GPTNeoXForCausalLM,
        GPTNeoXConfig(vocab_size=72, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64),
        tmp_path / "other",
    )
    with pytest.raises(UserInputError, match="was trained on another model") as refused:
        find_tuned(str(trained[1]), base=str(other))
    assert "gpt_neox" in refused.value.why and "--model" in refused.value.fix


def test_a_folder_that_is_no_adapter_is_named_for_what_it_is(trained: tuple[PeftModel, Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes((trained[1] / "adapter_config.json").read_bytes())
    for folder, said in ((tmp_path, "but no adapter_model.safetensors"), (trained[1].parent / "base", "a whole model")):
        with pytest.raises(UserInputError, match=said):
            find_tuned(str(folder))
    with pytest.raises(UserInputError, match="no run"):
        find_tuned(str(tmp_path / "nowhere"))


def test_an_adapter_that_names_no_base_says_how_to_name_it(trained: tuple[PeftModel, Path], tmp_path: Path) -> None:
    for file in trained[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(UserInputError) as refused:
        find_tuned(str(tmp_path))
    assert "--model" in refused.value.fix
    assert find_tuned(str(tmp_path), base="somewhere").base.model_name_or_path == "somewhere"


@pytest.mark.parametrize(
    "settings", [{"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "olora"}, {"layer_replication": [[0, 2], [1, 2]]}]
)  # fmt: skip
def test_an_adapter_that_belongs_to_a_changed_base_is_refused(settings: dict[str, object], tmp_path: Path) -> None:
    """PEFT takes a part out of the base's weights when it puts such an adapter on, which no export would notice."""
    adapted_toy("llama", "LlamaForCausalLM", {"target_modules": ["q_proj"], **settings}, tmp_path)
    with pytest.raises(UserInputError, match=next(iter(settings))):
        build_adapted(find_tuned(str(tmp_path / "adapter")))


def test_an_adapter_in_a_pickle_is_called_what_it_is(tmp_path: Path) -> None:
    tuned_toy("dense", tmp_path)
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(UserInputError) as refused:
        find_tuned(str(tmp_path / "adapter"))
    assert "adapter_model.safetensors" in refused.value.what and "pickle" in refused.value.why


def test_a_base_that_has_moved_says_how_to_name_it(trained: tuple[PeftModel, Path], tmp_path: Path) -> None:
    for file in trained[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "adapter_config.json"
    gone = str(tmp_path / "gone")
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": gone}))
    with pytest.raises(UserInputError, match="gone' is not there") as refused:
        find_tuned(str(tmp_path))
    assert str(tmp_path) in refused.value.why and "--model" in refused.value.fix
    now = str(trained[1].parent / "base")
    assert find_tuned(str(tmp_path), base=now).base.model_name_or_path == now


def test_an_adapter_of_the_vision_text_class_is_called_what_it_is(tmp_path: Path) -> None:
    from transformers import Mistral3ForConditionalGeneration

    toy_wrapper(tmp_path / "base")
    whole = Mistral3ForConditionalGeneration.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=r".*language_model.*o_proj")
    get_peft_model(whole, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserInputError, match="Mistral3ForConditionalGeneration, the vision"):
        build_adapted(find_tuned(str(tmp_path / "adapter")))
