"""A GGUF file answers as adapter and base do: read by transformers, and by llama.cpp where it is installed."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from chat_tokenizers import chat_tokenizer
from export.test_answer_end import run_on_chats
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Regex, pre_tokenizers
from toys import save_toy, toy_text_config, toy_wrapper

from shardtune.errors import ShardtuneError, UserInputError
from shardtune.export.log import ConsoleLog
from shardtune.export.request import ExportRequest, ExportResult
from shardtune.export.run import export_model
from shardtune.inference.source import find_tuned

gguf = pytest.importorskip("gguf")
from shardtune.export import gguf_file, gguf_tensors  # noqa: E402
from shardtune.export.gguf_export import GgufExport  # noqa: E402
from shardtune.export.gguf_models import rope_factors  # noqa: E402
from shardtune.export.gguf_tokenizer import gguf_tokenizer  # noqa: E402

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Rows of 32 values, so that every tensor can be quantised.
_WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}, {"target_modules": ["q_proj", "k_proj", "down_proj"]}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}, {"target_modules": ["k_proj", "gate_proj"]}),
    "qwen2": ("Qwen2ForCausalLM", {}, {"target_modules": ["q_proj", "o_proj"]}),
    "qwen3": ("Qwen3ForCausalLM", {}, {"target_modules": ["q_proj", "up_proj"]}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
        {"target_modules": ["v_proj"], "target_parameters": _EXPERTS},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", {"moe_intermediate_size": 32, "norm_topk_prob": True},
        {"target_modules": ["q_proj", "o_proj"], "target_parameters": _EXPERTS},
    ),
}  # fmt: skip


def _trained(
    kind: str, folder: Path, size: float = 0.1, lora: dict[str, Any] | None = None, tokens: int = 0, **changes: Any
) -> Path:
    """A random model with a byte-level tokenizer and a chat template, and an adapter that PEFT itself made.

    Args:
        lora: Its settings; None: those of the model type.
        tokens: That are added to the tokenizer after it; they are known with the adapter alone.
    """
    name, config, settings = MODELS[kind]
    cls = getattr(transformers, name)
    tokenizer = chat_tokenizer("chatml")
    ids = {f"{one}_token_id": getattr(tokenizer, f"{one}_token_id") for one in ("bos", "eos", "pad")}
    values = {**_WIDE, **config, "vocab_size": len(tokenizer) + 5, **ids, **changes}
    save_toy(cls, toy_text_config(kind, **values), folder / "base")
    tokenizer.save_pretrained(folder / "base")
    if tokens:
        lora = {**(lora or {}), "trainable_token_indices": [len(tokenizer) + index for index in range(tokens)]}
    base = cls.from_pretrained(folder / "base", dtype=torch.float32)
    if len(tokenizer) + tokens > values["vocab_size"]:
        base.resize_token_embeddings(len(tokenizer) + tokens, mean_resizing=False)
    model = get_peft_model(
        base,
        LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **(lora or settings)),
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * size)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    if tokens:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
        tokenizer.add_tokens([f"<new{index}>" for index in range(tokens)])
        tokenizer.save_pretrained(folder / "adapter")
    return folder / "adapter"


def _export(adapter: Path, out: Path, **options: Any) -> ExportResult:
    return export_model(ExportRequest(find_tuned(str(adapter)), "gguf", out, **options), ConsoleLog(to_stderr=True))


def _file(out: Path) -> Path:
    (file,) = out.glob("*.gguf")
    return file


@pytest.mark.parametrize("kind", MODELS)
def test_the_file_is_published_when_its_answers_are_those_of_adapter_and_base(kind: str, tmp_path: Path) -> None:
    done = _export(_trained(kind, tmp_path), tmp_path / "out")
    assert done.verification.method == "logits"
    assert done.verification.figures["logits_error"] < 1e-3  # float32 throughout
    assert abs(done.verification.figures["logits_share"] - 1) < 1e-3
    assert _file(tmp_path / "out").name.endswith("-F32.gguf")


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA and biases": ("qwen2", {"lora": {"target_modules": ["q_proj"], "use_dora": True, "bias": "all"}}),
    "a head of its own": (
        "llama", {"lora": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "tie_word_embeddings": True},
    ),
    "new tokens": (
        "llama",
        {"lora": {"target_modules": ["q_proj"]}, "tokens": 2, "tie_word_embeddings": True},
    ),
    "new tokens beyond the base's rows": (
        "llama",
        {"lora": {"target_modules": ["q_proj"]}, "tokens": 9, "tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_can_be_merged_is_in_the_file(kind: str, tmp_path: Path) -> None:
    model, options = KINDS[kind]
    figures = _export(_trained(model, tmp_path, **options), tmp_path / "out").verification.figures
    assert figures["logits_error"] < 1e-3
    names = {tensor.name for tensor in gguf.GGUFReader(_file(tmp_path / "out")).tensors}
    assert ("output.weight" in names) == (not kind.startswith("new tokens"))


def test_a_tied_head_that_the_base_stores_too_is_no_obstacle(tmp_path: Path) -> None:
    model, options = KINDS["new tokens"]
    adapter = _trained(model, tmp_path, **options)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    assert _export(adapter, tmp_path / "out").verification.figures["logits_error"] < 1e-3


def test_matrices_that_cannot_be_quantised_are_named_and_where_all_are_it_is_refused(tmp_path: Path) -> None:
    some = _trained("llama", tmp_path / "some", size=0.5, hidden_size=64, intermediate_size=72)
    done = _export(some, tmp_path / "out", quantization="q8_0", min_surviving_delta=0.0)
    assert "2 matrices are float16" in " ".join(done.warnings)
    types = {one.name: one.tensor_type for one in gguf.GGUFReader(_file(tmp_path / "out")).tensors}
    assert types["blk.0.ffn_down.weight"] == gguf_file.Type.F16 and types["blk.0.attn_q.weight"] == gguf_file.Type.Q8_0
    none = _trained("llama", tmp_path / "none", hidden_size=72, intermediate_size=40, head_dim=12)
    with pytest.raises(UserInputError, match="--quantization q8_0 has no effect"):
        _export(none, tmp_path / "none" / "out", quantization="q8_0")


def test_the_text_part_of_a_wrapper_is_written_and_that_is_said(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    text = toy_text_config("mistral", sliding_window=None, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(toy_wrapper(tmp_path / "base", text))
    model = transformers.MistralForCausalLM(text)
    model.config._name_or_path = model.name_or_path = str(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    done = _export(tmp_path / "adapter", tmp_path / "out")
    assert done.verification.figures["logits_error"] < 1e-3
    assert "has no vision part" in done.warnings[0]


def test_bf16_and_q8_keep_most_of_the_change(tmp_path: Path) -> None:
    adapter = _trained("llama", tmp_path)
    sixteen = _export(adapter, tmp_path / "bf16", dtype="bf16").verification.figures
    eight = _export(adapter, tmp_path / "q8", quantization="q8_0").verification.figures
    assert 0 < sixteen["logits_error"] < eight["logits_error"] < 0.2
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(_file(tmp_path / "q8")).tensors}
    assert types["blk.0.attn_q.weight"] == "Q8_0" and types["blk.0.attn_norm.weight"] == "F32"


def test_a_16_bit_file_that_loses_a_part_of_the_change_says_so(tmp_path: Path) -> None:
    """A base in bf16 lies on the grid of its values: a change that is small against their steps is rounded away."""
    adapter = _trained("llama", tmp_path, size=5e-5)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    done = _export(adapter, tmp_path / "out")
    assert _file(tmp_path / "out").name.endswith("-BF16.gguf")
    assert done.verification.figures["surviving_delta"] < 0.9 and "--dtype fp32" in done.warnings[0]
    exact = _export(adapter, tmp_path / "exact", dtype="fp32")
    assert not exact.warnings and exact.verification.figures["surviving_delta"] > 0.999


def test_a_change_that_the_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    adapter = _trained("llama", tmp_path, size=0.002)
    with pytest.raises(UserInputError, match="would undo") as refused:
        _export(adapter, tmp_path / "q4", quantization="q4_0", min_surviving_delta=0.99)
    assert "--quantization q8_0" in refused.value.fix and not (tmp_path / "q4").exists()


def test_rows_in_the_wrong_order_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a converter gets wrong most easily: without their new order, q and k turn the wrong pairs."""
    adapter = _trained("llama", tmp_path)
    monkeypatch.setattr(gguf_tensors, "permuted", lambda rows, heads: rows)
    with pytest.raises(ShardtuneError, match="does not compute what adapter and base do"):
        _export(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_and_settings_are_in_the_file(tmp_path: Path) -> None:
    adapter = _trained("qwen3", tmp_path)
    _export(adapter, tmp_path / "out")
    reader = gguf.GGUFReader(_file(tmp_path / "out"))
    value = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = chat_tokenizer("chatml")
    assert value["tokenizer.ggml.tokens"][: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert value["tokenizer.ggml.tokens"][-1] == f"[PAD{len(tokenizer) + 4}]"
    assert value["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert value["tokenizer.ggml.pre"] == "gpt-2" and value["tokenizer.chat_template"] == tokenizer.chat_template
    assert value["qwen3.attention.key_length"] == 16 and value["qwen3.block_count"] == 2


def test_a_token_with_a_space_or_of_any_script_is_written_and_found_as_it_is(tmp_path: Path) -> None:
    """transformers' own reader respells them, and even takes " the" for the token that has stood for it before."""
    adapter = _trained("qwen3", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    assert "\u0120the" in tokenizer.get_vocab()
    new = ["sum is", " the", "\u5317\u4eac"]
    tokenizer.add_tokens(new)
    tokenizer.add_tokens(["<\uff5cend of it\uff5c>"], special_tokens=True)
    tokenizer.save_pretrained(adapter)
    _export(adapter, tmp_path / "out")
    fields = gguf.GGUFReader(_file(tmp_path / "out")).fields
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert [types[tokens.index(one)] for one in new] == [gguf.TokenType.USER_DEFINED] * 3


def test_a_token_that_the_file_has_otherwise_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = _trained("qwen3", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.add_tokens(["sum is"])
    tokenizer.save_pretrained(adapter)
    monkeypatch.setattr(
        "gguf.GGUFWriter.add_token_list",
        lambda self, tokens: self.add_array("tokenizer.ggml.tokens", [one.replace(" ", "\u0120") for one in tokens]),
    )
    with pytest.raises(ShardtuneError, match="the tokenizer gives"):
        _export(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_on_conversations_states_the_template_of_training_and_where_an_answer_ends(tmp_path: Path) -> None:
    run = run_on_chats(tmp_path)
    config = yaml.safe_load((run / "config.yaml").read_text())
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }} says {{ m['content'] }}<|im_end|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    config["data"]["chat_template"] = str(tmp_path / "own.jinja")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "base")
    _export(run, tmp_path / "out")
    reader = gguf.GGUFReader(_file(tmp_path / "out"))
    value = {name: field.contents() for name, field in reader.fields.items()}
    assert value["tokenizer.chat_template"] == template != tokenizer.chat_template
    assert value["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert value["tokenizer.ggml.eot_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_damage_to_a_tensor_is_found(tmp_path: Path) -> None:
    plan = GgufExport(ExportRequest(find_tuned(str(_trained("qwen2", tmp_path))), "gguf", tmp_path / "out"))
    (tmp_path / "out").mkdir()
    log = ConsoleLog(to_stderr=True)
    plan.write(tmp_path / "out", log)
    file = _file(tmp_path / "out")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(ShardtuneError, match="has other bytes"):
        plan.verify(tmp_path / "out", log)


def _split(expression: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def test_how_text_is_split_is_named_or_refused() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    backend = tokenizer.backend_tokenizer
    assert gguf_tokenizer(tokenizer, 500).pre == "gpt-2"
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    assert gguf_tokenizer(tokenizer, 500).pre == "smollm"
    backend.pre_tokenizer = _split(transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX)
    assert gguf_tokenizer(tokenizer, 500).pre == "qwen2"
    for other in (_split(r"\w+"), pre_tokenizers.ByteLevel(True), pre_tokenizers.Whitespace()):
        backend.pre_tokenizer = other
        with pytest.raises(UserInputError, match="not known to split text"):
            gguf_tokenizer(tokenizer, 500)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a window": ({"sliding_window": 8}, "window of 8 tokens"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                  "original_max_position_embeddings": 64}}, "of type yarn"),
    "another activation": ({"hidden_act": "gelu"}, "activation is gelu"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserInputError) as refused:
        _export(_trained("mistral", tmp_path, **changes), tmp_path / "out")
    assert message in refused.value.why


def test_llama_3_s_stretched_frequencies_are_those_of_transformers() -> None:
    config = toy_text_config("llama", head_dim=64, max_position_embeddings=1024, rope_parameters=_LLAMA3)
    inv_freq = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    plain = 1.0 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    factors = rope_factors(config)
    assert factors is not None and len({round(one, 3) for one in factors}) > 3
    torch.testing.assert_close(plain / torch.tensor(factors), inv_freq, rtol=1e-5, atol=0)


def test_options_that_no_type_has_are_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"quantization": "q4_k_m"}, "not written here"),
        ({"quantization": "q8_0", "dtype": "bf16"}, "cannot be combined"),
        ({"dtype": "fp8"}, "no FP8"),
    ):
        with pytest.raises(UserInputError, match=message):
            gguf_file.file_type(options.get("dtype"), options.get("quantization"), "bfloat16")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("kind", [*MODELS, "llama with stretched frequencies"])
def test_llama_cpp_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    import llama_cpp
    import numpy as np

    rope = {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 16}}
    kind, *stretched = kind.split(" with ")
    adapter = _trained(kind, tmp_path, **(rope if stretched else {}))
    _export(adapter, tmp_path / "out")
    tokenizer = chat_tokenizer("chatml")
    text = "The weather in Zürich: 3.14 <|im_start|>user\n"
    ids = tokenizer(text)["input_ids"]
    llama = llama_cpp.Llama(str(_file(tmp_path / "out")), logits_all=True, verbose=False, n_ctx=64)
    assert llama.tokenize(text.encode(), add_bos=False, special=True) == ids
    llama.eval(ids)
    found = np.array(llama.scores[: len(ids)])
    llama.close()
    cls = getattr(transformers, MODELS[kind][0])
    base = cls.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(base, adapter)(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()  # keys and values are float16
