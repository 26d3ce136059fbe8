"""An adapter for vLLM or SGLang is, as those read it, the one that was trained; what they would skip is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from export.exporting import Quiet
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from server_loaders import sglang_deltas, vllm_deltas
from toys import mistral4_config, save_toy, toy_text_config, toy_wrapper
from tuned_toys import tuned_toy

from shardtune.adapters.weight_changes import LowRank, weight_changes
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.export.log import ConsoleLog
from shardtune.export.request import ExportRequest
from shardtune.export.run import export_model
from shardtune.export.serving import prepare
from shardtune.inference.load import build_adapted
from shardtune.inference.source import find_tuned

# Ranks and scales that differ from module to module, which both servers ignore.
_PATTERNS: dict[str, Any] = {
    "r": 4, "lora_alpha": 12, "rank_pattern": {"o_proj": 2, "v_proj": 1}, "alpha_pattern": {"o_proj": 5},
}  # fmt: skip
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _train(base: Any, folder: Path, **settings: Any) -> Path:
    """An adapter that PEFT itself made, with random values."""
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **{**_PATTERNS, **settings}))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def _trained(kind: str, name: str, folder: Path, config: dict[str, Any] | None = None, **settings: Any) -> Path:
    cls = getattr(transformers, name)
    save_toy(cls, toy_text_config(kind, **(config or {})), folder / "base")
    return _train(cls.from_pretrained(folder / "base", dtype=torch.float32), folder / "adapter", **settings)


def _mistral4_release(folder: Path, **settings: Any) -> Path:
    """The wrapper with Mistral's own files beside, as it is released, and an adapter on its text model."""
    base = toy_wrapper(folder / "base", mistral4_config())
    (base / "params.json").write_text("{}")
    (base / "consolidated.safetensors").write_bytes(b"")
    text = transformers.Mistral4ForCausalLM(mistral4_config())
    text.name_or_path = str(base)
    text.config._name_or_path = str(base)
    return _train(text, folder / "adapter", **settings)


def _export(adapter: Path, target: str, out: Path) -> Path:
    request = ExportRequest(find_tuned(str(adapter)), target, out)  # type: ignore[arg-type]
    done = export_model(request, ConsoleLog(to_stderr=True))
    assert done.verification.figures["largest_difference"] <= 1e-6
    start = {
        "vllm": f"vllm serve {find_tuned(str(adapter)).base.model_name_or_path} ",
        "sglang": "python -m sglang.launch_server ",
    }
    serve = done.as_json()["serve"]
    assert serve.startswith(start[target]) and str(out) in serve
    return out


def _changes(adapter: Path) -> dict[str, LowRank]:
    adapted = build_adapted(find_tuned(str(adapter)), fp8=False)
    return weight_changes(adapted.model, adapted.tensors)  # type: ignore[return-value]


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


def test_a_dense_adapter_with_patterns_is_served_as_it_was_trained(tmp_path: Path) -> None:
    adapter = _trained("llama", "LlamaForCausalLM", tmp_path, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])
    linear = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    vllm = vllm_deltas(_export(adapter, "vllm", tmp_path / "v"), linear, ["qkv_proj", "gate_up_proj"])
    sglang = sglang_deltas(_export(adapter, "sglang", tmp_path / "s"), {"qkv_proj": (32, 16, 16)})
    for name, change in _changes(adapter).items():
        _close(vllm.pop(name.removesuffix(".weight")), change.delta())
        layer, module = int(name.split(".")[2]), name.split(".")[-2]
        joined = sglang[layer, {"o_proj": "o_proj", "up_proj": "gate_up_proj"}.get(module, "qkv_proj")]
        rows = {"q_proj": (0, 32), "v_proj": (48, 64), "o_proj": (0, 32), "up_proj": (64, 128)}[module]
        _close(joined[slice(*rows)], change.delta())
    assert all("k_proj" in name or "gate_proj" in name for name in vllm)  # filled up, for SGLang's sake
    assert not any(delta.any() for delta in vllm.values())


@pytest.mark.parametrize(
    ("kind", "name", "where", "projections"),
    [
        ("qwen3_moe", "Qwen3MoeForCausalLM", "mlp.experts", ("gate_proj", "down_proj", "up_proj")),
        ("mixtral", "MixtralForCausalLM", "block_sparse_moe.experts", ("w1", "w2", "w3")),
    ],
)
def test_experts_are_served_one_by_one(
    kind: str, name: str, where: str, projections: tuple[str, str, str], tmp_path: Path
) -> None:
    adapter = _trained(
        kind, name, tmp_path, {"head_dim": 8}, target_modules=["q_proj", "k_proj", "v_proj"],
        target_parameters=_EXPERTS, rank_pattern={"experts.down_proj": 2}, alpha_pattern={"experts.gate_up_proj": 7},
    )  # fmt: skip
    linear = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    vllm = vllm_deltas(_export(adapter, "vllm", tmp_path / "v"), linear, ["qkv_proj"], (where, projections), 4)
    head = 8 * 4
    sglang = sglang_deltas(_export(adapter, "sglang", tmp_path / "s"), {"qkv_proj": (head, 16, 16)}, 4)
    for parameter, change in _changes(adapter).items():
        layer = int(parameter.split(".")[2])
        if "experts" in parameter:
            fused = "gate_up" in parameter
            _close(vllm[f"model.layers.{layer}.{where}.{'w13' if fused else 'w2'}"], change.delta())
            _close(sglang[layer, "gate_up_proj_moe" if fused else "down_proj_moe"], change.delta())
        else:
            _close(vllm[parameter.removesuffix(".weight")], change.delta())


def test_one_half_of_the_experts_is_completed_with_zeros(tmp_path: Path) -> None:
    """vLLM asserts that each expert has gate, up and down; SGLang wraps experts only where both halves are targets."""
    adapter = _trained(
        "qwen3_moe", "Qwen3MoeForCausalLM", tmp_path, target_modules=["o_proj"],
        target_parameters=["mlp.experts.down_proj"], rank_pattern={}, alpha_pattern={},
    )  # fmt: skip
    out = _export(adapter, "vllm", tmp_path / "v")
    gated = ("mlp.experts", ("gate_proj", "down_proj", "up_proj"))
    deltas = vllm_deltas(out, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, ["qkv_proj"], gated, 4)
    assert not deltas["model.layers.1.mlp.experts.w13"].any()
    _close(deltas["model.layers.1.mlp.experts.w2"], _changes(adapter)["model.layers.1.mlp.experts.down_proj"].delta())
    sglang = sglang_deltas(_export(adapter, "sglang", tmp_path / "s"), {}, 4)
    assert not sglang[0, "gate_up_proj_moe"].any()


def test_mistral_4_is_served_inside_its_release(tmp_path: Path) -> None:
    adapter = _mistral4_release(
        tmp_path, target_modules=["q_b_proj", "o_proj"], target_parameters=_EXPERTS, rank_pattern={"o_proj": 2}
    )
    out = _export(adapter, "vllm", tmp_path / "v")
    # PixtralForConditionalGeneration: its own mapping names no part of fused_qkv_a_proj.
    deltas = vllm_deltas(
        out, {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_up_proj", "down_proj"},
        ["qkv_proj", "gate_up_proj"], ("mlp.experts", ("gate_proj", "down_proj", "up_proj")), 4,
        {"model.language_model.": "language_model.model."},
    )  # fmt: skip
    changes = _changes(adapter)
    for layer in range(2):
        text = f"model.layers.{layer}."
        _close(deltas[f"language_model.{text}mlp.experts.w13"], changes[f"{text}mlp.experts.gate_up_proj"].delta())
        _close(deltas[f"language_model.{text}self_attn.o_proj"], changes[f"{text}self_attn.o_proj.weight"].delta())
    readme = prepare(ExportRequest(find_tuned(str(adapter)), "vllm", out)).command("F")
    assert "--config-format mistral" in readme and "--max-lora-rank 8 " in readme


def test_compressed_attention_is_served_by_sglang_and_refused_for_vllm(tmp_path: Path) -> None:
    adapter = _mistral4_release(
        tmp_path, target_modules=["q_a_proj", "kv_b_proj"], rank_pattern={"kv_b_proj": 2}, alpha_pattern={}
    )
    sizes = {"fused_qkv_a_proj_with_mqa": (16, 24)}
    sglang = sglang_deltas(_export(adapter, "sglang", tmp_path / "s"), sizes)
    changes = _changes(adapter)
    _close(sglang[1, "fused_qkv_a_proj_with_mqa"][:16], changes["model.layers.1.self_attn.q_a_proj.weight"].delta())
    assert not sglang[1, "fused_qkv_a_proj_with_mqa"][16:].any()
    _close(sglang[1, "kv_b_proj"], changes["model.layers.1.self_attn.kv_b_proj.weight"].delta())
    with pytest.raises(UserInputError, match=r"would not apply the adapter on 'self_attn\.") as refused:
        prepare(ExportRequest(find_tuned(str(adapter)), "vllm", tmp_path / "v"))
    assert "--to merged" in refused.value.fix


def test_what_sglang_computes_with_queries_that_are_not_compressed_is_refused(tmp_path: Path) -> None:
    adapter = _trained(
        "deepseek_v3", "DeepseekV3ForCausalLM", tmp_path, {"q_lora_rank": None}, target_modules=["kv_a_proj_with_mqa"],
        rank_pattern={}, alpha_pattern={},
    )  # fmt: skip
    with pytest.raises(UserInputError, match=r"'self_attn\.kv_a_proj_with_mqa'") as refused:
        _export(adapter, "sglang", tmp_path / "s")
    assert "together with q_a_proj" in str(refused.value.why)
    _export(adapter, "vllm", tmp_path / "v")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"target_modules": ["q_proj"], "use_dora": True}, "DoRA"),
    "trained in full": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "trained in full"),
    "rows of tokens": (
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5]}}, "new tokens",
    ),
    "the head": ({"target_modules": ["lm_head"]}, "would not apply the adapter on 'lm_head'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_servers_do_not_load_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    settings, message = REFUSED[case]
    adapter = _trained("llama", "LlamaForCausalLM", tmp_path, **{"rank_pattern": {}, "alpha_pattern": {}, **settings})
    for target in ("vllm", "sglang"):
        with pytest.raises(UserInputError, match=message) as refused:
            _export(adapter, target, tmp_path / target)
        assert "--to merged" in refused.value.fix
        assert not (tmp_path / target).exists()


def test_dense_layers_that_peft_addresses_by_their_weight_are_modules_again(tmp_path: Path) -> None:
    """PEFT takes gate_proj of a mixture for the experts', so dense layers are adapted through target_parameters."""
    adapter = _trained(
        "qwen3_moe", "Qwen3MoeForCausalLM", tmp_path, {"mlp_only_layers": [0]}, target_modules=["o_proj"],
        target_parameters=["mlp.gate_proj.weight"], rank_pattern={}, alpha_pattern={},
    )  # fmt: skip
    linear = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    deltas = vllm_deltas(_export(adapter, "vllm", tmp_path / "v"), linear, ["qkv_proj", "gate_up_proj"])
    base = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = base.model.layers[0].mlp.gate_proj.weight.detach().clone()
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload().model.layers[0].mlp.gate_proj.weight
    torch.testing.assert_close(deltas["model.layers.0.mlp.gate_proj"], merged.detach() - before, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserInputError, match=r"SGLang would not apply the adapter on 'mlp\.gate_proj'") as refused:
        _export(adapter, "sglang", tmp_path / "s")
    assert "--to vllm" in refused.value.fix


def test_dense_layers_that_vllm_does_not_see_in_the_config_are_refused(tmp_path: Path) -> None:
    """Its class names the parts of gate_up_proj where `mlp_only_layers` has entries, whatever else makes layers dense."""
    adapter = _trained(
        "qwen3_moe", "Qwen3MoeForCausalLM", tmp_path, {"decoder_sparse_step": 2}, target_modules=["o_proj"],
        target_parameters=["mlp.gate_proj.weight"], rank_pattern={}, alpha_pattern={},
    )  # fmt: skip
    with pytest.raises(UserInputError, match=r"the adapter on 'mlp\.gate_proj'") as refused:
        _export(adapter, "vllm", tmp_path / "v")
    assert "has no mlp_only_layers" in str(refused.value.why) and "--to sglang" not in refused.value.fix


def test_attention_of_a_mixtral_is_refused_where_sglang_cannot_size_its_buffers(tmp_path: Path) -> None:
    """Released Mixtrals have no head_dim, and SGLang multiplies with what transformers says then: None."""
    adapter = _trained(
        "mixtral", "MixtralForCausalLM", tmp_path, target_modules=["o_proj"], target_parameters=_EXPERTS,
        rank_pattern={}, alpha_pattern={},
    )  # fmt: skip
    with pytest.raises(UserInputError, match=r"'self_attn\.o_proj'") as refused:
        _export(adapter, "sglang", tmp_path / "s")
    assert "has no head_dim" in str(refused.value.why) and "train without" not in refused.value.fix
    _export(adapter, "vllm", tmp_path / "v")


def test_a_rank_that_vllm_does_not_take_is_refused(tmp_path: Path) -> None:
    adapter = _trained("llama", "LlamaForCausalLM", tmp_path, target_modules=["q_proj"], r=513, rank_pattern={})
    with pytest.raises(UserInputError, match="rank 513, and vLLM takes up to 512"):
        _export(adapter, "vllm", tmp_path / "v")


def test_the_text_model_of_a_wrapper_is_refused_where_its_vision_part_has_the_same_names(tmp_path: Path) -> None:
    text = toy_text_config("mistral", sliding_window=None)
    base = toy_wrapper(tmp_path / "base", text)
    model = transformers.MistralForCausalLM(text)
    model.config._name_or_path = model.name_or_path = str(base)
    adapter = _train(model, tmp_path / "adapter", target_modules=["o_proj"], rank_pattern={}, alpha_pattern={})
    out = _export(adapter, "vllm", tmp_path / "v")
    assert all("model.language_model.layers" in name for name in load_file(out / "adapter_model.safetensors"))
    with pytest.raises(UserInputError, match="not known to be right in SGLang"):
        _export(adapter, "sglang", tmp_path / "s")


def test_a_model_type_that_nobody_looked_up_is_refused(tmp_path: Path) -> None:
    adapter = _trained(
        "gpt_oss", "GptOssForCausalLM", tmp_path, target_modules=["q_proj"], rank_pattern={}, alpha_pattern={}
    )
    with pytest.raises(UserInputError, match="gpt_oss model vLLM applies LoRA to is not known"):
        _export(adapter, "vllm", tmp_path / "v")


def test_mistral_4_without_mistrals_files_is_refused(tmp_path: Path) -> None:
    adapter = _mistral4_release(tmp_path, target_modules=["o_proj"], rank_pattern={}, alpha_pattern={})
    (tmp_path / "base" / "params.json").unlink()
    with pytest.raises(UserInputError, match=r"params\.json"):
        _export(adapter, "vllm", tmp_path / "v")


@pytest.mark.parametrize(("worst", "said"), [(0.0, "(identical)"), (8e-9, "(largest difference 8e-09 of its size)")])
def test_a_difference_of_nothing_is_not_a_number(
    worst: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = _trained(
        "llama", "LlamaForCausalLM", tmp_path, target_modules=["q_proj"], rank_pattern={}, alpha_pattern={}
    )
    monkeypatch.setattr("shardtune.export.serving.relative_difference", lambda *_: worst)
    done = export_model(ExportRequest(find_tuned(str(adapter)), "vllm", tmp_path / "v"), ConsoleLog(to_stderr=True))
    assert done.verification.text.endswith(f"match the adapter's {said}")


def test_a_file_that_is_not_what_was_trained_is_not_published(tmp_path: Path) -> None:
    adapter = _trained(
        "llama", "LlamaForCausalLM", tmp_path, target_modules=["q_proj"], rank_pattern={}, alpha_pattern={}
    )
    plan = prepare(ExportRequest(find_tuned(str(adapter)), "vllm", tmp_path / "v"))
    log = ConsoleLog(to_stderr=True)
    plan.write(tmp_path / "v", log)
    plan.verify(tmp_path / "v", log)
    file = tmp_path / "v" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj.lora_B" in name)
    save_file({**tensors, name: tensors[name] * 1.0001}, file)
    with pytest.raises(ShardtuneError, match="differs from that of the adapter"):
        plan.verify(tmp_path / "v", log)
    save_file({**tensors, name: tensors[name] * float("nan")}, file)
    with pytest.raises(ShardtuneError, match="by nan of its size"):
        plan.verify(tmp_path / "v", log)
    save_file({key: t for key, t in tensors.items() if "layers.0" not in key}, file)
    with pytest.raises(ShardtuneError, match="1 parameters have none in the file"):
        plan.verify(tmp_path / "v", log)


def test_plain_peft_loads_a_dense_one_and_computes_the_same(tmp_path: Path) -> None:
    adapter = _trained("llama", "LlamaForCausalLM", tmp_path, target_modules=["q_proj", "o_proj", "down_proj"])
    out = _export(adapter, "vllm", tmp_path / "v")
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 4 and not config["rank_pattern"] and not config["alpha_pattern"]
    ids, logits = torch.tensor([[1, 5, 9, 20, 33]]), []
    for folder in (adapter, out):
        base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        with torch.no_grad():
            logits.append(PeftModel.from_pretrained(base, folder)(input_ids=ids).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)


def test_a_chat_template_of_its_own_goes_to_the_server(tmp_path: Path) -> None:
    adapter = _trained(
        "llama", "LlamaForCausalLM", tmp_path, target_modules=["q_proj"], rank_pattern={}, alpha_pattern={}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(adapter)
    out = _export(adapter, "sglang", tmp_path / "s")
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    command = prepare(ExportRequest(find_tuned(str(adapter)), "sglang", out)).command(str(out))
    assert f"--chat-template {out}/chat_template.jinja" in command and "--lora-strict-loading" in command


def _given(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("folder", ["my runs/v", "lr=1e-4/v", "a,b/v", "plain/v"])
def test_the_command_reaches_the_server_whatever_the_paths_are(folder: str, tmp_path: Path) -> None:
    home = tmp_path / folder
    adapter = _trained("llama", "LlamaForCausalLM", home, target_modules=["q_proj"], rank_pattern={}, alpha_pattern={})
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "base")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(adapter)
    tuned, out = find_tuned(str(adapter)), str(home / "out")
    vllm = shlex.split(prepare(ExportRequest(tuned, "vllm", Path(out))).command(out))
    sglang = shlex.split(prepare(ExportRequest(tuned, "sglang", Path(out))).command(out))
    assert vllm[2] == _given(sglang, "--model-path") == str(home / "base")
    modules = _given(vllm, "--lora-modules")  # entrypoints/openai/cli_args.py, LoRAParserAction
    if "=" in modules and "," not in modules:
        name, path = modules.split("=")
    else:
        name, path = json.loads(modules)["name"], json.loads(modules)["path"]
    assert (name, path) == ("adapter", out)
    assert _given(sglang, "--lora-paths").split("=", 1) == ["adapter", out]
    for command in (vllm, sglang):
        assert _given(command, "--chat-template") == f"{out}/chat_template.jinja"


def test_a_template_of_training_is_not_left_to_mistrals_own_tokenizer(tmp_path: Path) -> None:
    """That one ignores --chat-template, and vLLM takes it by itself where tekken.json lies beside the weights."""
    adapter = _mistral4_release(tmp_path, target_modules=["o_proj"], rank_pattern={}, alpha_pattern={})
    tuned, out = find_tuned(str(adapter)), tmp_path / "v"
    before = shlex.split(prepare(ExportRequest(tuned, "vllm", out)).command("F"))
    assert _given(before, "--tokenizer-mode") == "mistral"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(adapter)
    after = shlex.split(prepare(ExportRequest(tuned, "vllm", out)).command("F"))
    assert _given(after, "--tokenizer-mode") == "hf" and _given(after, "--config-format") == "mistral"
    dense = _trained(
        "mistral", "MistralForCausalLM", tmp_path / "7b", target_modules=["q_proj"], rank_pattern={}, alpha_pattern={}
    )
    tokenizer.save_pretrained(dense)
    tuned = find_tuned(str(dense))
    assert "--tokenizer-mode" not in prepare(ExportRequest(tuned, "vllm", out)).command("F")
    (tmp_path / "7b" / "base" / "tekken.json").write_text("{}")
    assert "--tokenizer-mode hf --chat-template" in prepare(ExportRequest(tuned, "vllm", out)).command("F")


# The names of heads and widths that vLLM's attention kernels have, and an adapter that changes what is answered.
_WIDE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_VLLM = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)


@pytest.mark.slow
@pytest.mark.skipif(_VLLM is None, reason="vLLM is not installed; VLLM_PYTHON names a Python that has it")
@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("llama", "LlamaForCausalLM", {"target_modules": _ALL, "use_rslora": True}),
        ("qwen3", "Qwen3ForCausalLM", {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}),
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"target_modules": ["o_proj"], "target_parameters": _EXPERTS}),
    ],
)
def test_vllm_itself_answers_as_peft_does(kind: str, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    adapter = _trained(kind, name, tmp_path, _WIDE, **{**settings, "alpha_pattern": {"o_proj": 5}})
    out = _export(adapter, "vllm", tmp_path / "v")
    request = {
        "base": str(tmp_path / "base"), "adapter": str(out), "max_lora_rank": 8, "vocabulary": 72,
        "experts": "target_parameters" in settings, "prompts": [[1, 5, 9], [1, 60, 61, 7, 12, 40], [1, *range(10, 40)]],
    }  # fmt: skip
    (tmp_path / "request.json").write_text(json.dumps(request))
    script, answers_file = Path(__file__).with_name("vllm_answers.py"), tmp_path / "answers.json"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(_VLLM), str(script), str(tmp_path / "request.json"), str(answers_file)],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(answers_file.read_text())
    if "skipped" in answers:
        pytest.skip(answers["skipped"])
    base = getattr(transformers, name).from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter)
    for place, prompt in enumerate(request["prompts"]):
        logprobs = {}
        for side in ("tuned", "base"):
            tokens = [token for token, _ in answers[side][place]]
            found = torch.tensor([values for _, values in answers[side][place]])
            with torch.no_grad(), model.disable_adapter() if side == "base" else nullcontext():
                logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(found, logits.log_softmax(-1), rtol=0, atol=0.02)
            logprobs[side] = found[0]
        assert (logprobs["tuned"] - logprobs["base"]).abs().max() > 0.5  # else nothing is compared


def test_the_command_of_the_server_names_base_and_adapter_by_their_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_toy("dense", tmp_path)
    monkeypatch.chdir(tmp_path)
    log = Quiet()
    done = export_model(ExportRequest(find_tuned("adapter", base="base"), "vllm", Path("v")), log)
    assert f"vllm serve {tmp_path / 'base'} " in str(done.serve) and f"adapter={tmp_path / 'v'}" in str(done.serve)
    assert f"serve {done.serve}" in log.lines
