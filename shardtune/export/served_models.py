"""Which modules of which models does a server apply LoRA to, and under which names? Read in its source. No torch here.

What is not listed is refused: a server that does not know a name may skip it without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

ServerName = Literal["vllm", "sglang"]

UNKNOWN = "It is not known to take LoRA there."

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_COMPRESSED = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHARED = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")
_SHARED_ONE = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")
# Modules that servers compute as one. SGLang joins their adapters only where each has one (it looks for q_proj,
# gate_proj and q_a_proj first), so all members get one, of zeros where nothing trained.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


@dataclass(frozen=True)
class Experts:
    """How a server names the routed experts: `{module}.{expert}.{gate}`."""

    module: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def projections(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down


@dataclass(frozen=True)
class ServedModel:
    """What a server does for one model type. Module names are those below a decoder layer.

    Attributes:
        modules: Linear modules that take LoRA.
        experts: None: adapters on routed experts are refused.
        text_alone: The text model can be served by itself.
        wrappers: Vision+text models (their `model_type`) that can be served whole.
        mistral_format: The server's class reads Mistral's own files: params.json and consolidated*.safetensors.
        refused: Why a module takes no LoRA, where that is known.
        needs: What config.json has to set for a module's adapter, and why.
        flags: What the server has to be started with besides, word by word.
    """

    modules: tuple[str, ...]
    experts: Experts | None = None
    text_alone: bool = True
    wrappers: tuple[str, ...] = ()
    mistral_format: bool = False
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    needs: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    flags: tuple[str, ...] = ()

    def why_not(self, module: str, config: object) -> str | None:
        """Why an adapter on a linear module is not applied; None: it is.

        Args:
            config: The text model's.
        """
        if module not in self.modules:
            return self.refused.get(module, UNKNOWN)
        name, why = self.needs.get(module, ("", ""))
        return f"{why} This model's config.json has no {name}." if name and not getattr(config, name, None) else None


@dataclass(frozen=True)
class Server:
    """One server.

    Attributes:
        title: As people call it.
        source: What was read.
        ranks: Values that its --max-lora-rank takes; None: any.
        package: Its name on PyPI.
    """

    title: str
    source: str
    models: Mapping[str, ServedModel]
    ranks: tuple[int, ...] | None
    package: str


def joined_with(module: str) -> tuple[str, ...]:
    """The modules that servers compute together with this one, and itself."""
    parent, _, own = module.rpartition(".")
    members = next((group for group in _JOINED if own in group), (own,))
    return tuple(f"{parent}.{member}" for member in members)


_ABSORBED = (
    "While decoding, attention multiplies with its base weight directly: the adapter would act on prompts alone."
)
_DENSE = ServedModel((*_ATTENTION, *_MLP))
_DENSE_LAYERS = (
    "mlp_only_layers",
    "vLLM's class knows the parts of gate_up_proj only where it lists dense layers there.",
)
_ALL_SPARSE = dict.fromkeys(_MLP, "SGLang's class makes a mixture of experts of every layer.")
_HEAD_DIM = ("head_dim", "SGLang takes the sizes of its buffers from it.")
_GATED_WIDTH = (
    "SGLang takes the width of the shared expert from intermediate_size, which is that of other layers: the adapter "
    "would not fit its buffers."
)

_VLLM = {
    "llama": _DENSE,
    "mistral": ServedModel(_DENSE.modules, wrappers=("mistral3",)),
    "ministral3": ServedModel(_DENSE.modules, wrappers=("mistral3",)),
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "gemma": _DENSE,
    "gemma2": _DENSE,
    "gemma3_text": ServedModel(_DENSE.modules, wrappers=("gemma3",)),
    "qwen2_moe": ServedModel((*_ATTENTION, *_MLP, *_SHARED_ONE), Experts()),
    "qwen3_moe": ServedModel((*_ATTENTION, *_MLP), Experts(), needs=dict.fromkeys(_MLP[:2], _DENSE_LAYERS)),
    "mixtral": ServedModel(_ATTENTION, Experts("block_sparse_moe.experts", "w1", "w3", "w2")),
    "glm4_moe": ServedModel((*_ATTENTION, *_MLP, *_SHARED), Experts()),
    "deepseek_v3": ServedModel(
        (*_COMPRESSED, "self_attn.q_b_proj", "self_attn.q_proj", "self_attn.o_proj", *_MLP, *_SHARED),
        Experts(),
        refused={"self_attn.kv_b_proj": _ABSORBED},
    ),
    # Its class is Pixtral's around DeepSeek's; a wrapper names the parts of q/k/v and gate/up alone.
    "mistral4": ServedModel(
        ("self_attn.q_b_proj", "self_attn.o_proj", *_MLP, *_SHARED),
        Experts(),
        text_alone=False,
        wrappers=("mistral3",),
        mistral_format=True,
        refused={
            "self_attn.kv_b_proj": _ABSORBED,
            **dict.fromkeys(
                _COMPRESSED, "In vLLM q_a_proj and kv_a_proj_with_mqa are one module, and its class for this model does"
                " not name the parts: it refuses such an adapter.",
            ),
        },
        flags=(
            "--tokenizer-mode", "mistral", "--config-format", "mistral", "--load-format", "mistral",
        ),
    ),
}  # fmt: skip

# Shared experts must stay modules of their own, or their adapters have nothing to act on.
_UNFUSED = "--disable-shared-experts-fusion"
_NO_Q = {"self_attn.q_proj": "SGLang joins q_proj with k_proj and v_proj, which attention with compressed keys lacks."}
_MLA = (*_COMPRESSED, "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj", *_MLP, *_SHARED)

_SGLANG = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "ministral3": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "gemma": _DENSE,
    "gemma2": _DENSE,
    "gemma3_text": _DENSE,
    "qwen2_moe": ServedModel(_ATTENTION, refused=dict.fromkeys((*_MLP, *_SHARED_ONE, "mlp.experts"), _GATED_WIDTH)),
    "qwen3_moe": ServedModel(_ATTENTION, Experts(), refused=_ALL_SPARSE),
    # Names are matched by layer and projection; its module is block_sparse_moe, but w1, w2 and w3 are no target names.
    "mixtral": ServedModel(
        _ATTENTION, Experts("block_sparse_moe.experts"), needs=dict.fromkeys(_ATTENTION, _HEAD_DIM)
    ),
    "glm4_moe": ServedModel((*_ATTENTION, *_MLP, *_SHARED), Experts(), flags=(_UNFUSED,)),
    "deepseek_v3": ServedModel(_MLA, Experts(), refused=_NO_Q, flags=(_UNFUSED,)),
    "mistral4": ServedModel(
        _MLA, Experts(), text_alone=False, wrappers=("mistral3",), mistral_format=True, refused=_NO_Q,
        flags=("--model-config-parser", "mistral", "--load-format", "mistral", _UNFUSED),
    ),
}  # fmt: skip

SERVERS: Mapping[ServerName, Server] = {
    "vllm": Server(
        "vLLM",
        "vllm-project/vllm at a014e35f38c8 (2026-08-22)",
        _VLLM,
        (1, 8, 16, 32, 64, 128, 256, 320, 512),
        "vllm",
    ),
    "sglang": Server("SGLang", "sgl-project/sglang at cce0a1244b5a (2026-08-23)", _SGLANG, None, "sglang"),
}
