"""What does each key of an accelerate config file become here? The table behind the translation and its docs page.

Read in accelerate 1.15 (`commands/config/config_args.py`, `commands/launch.py`, `utils/launch.py`,
`FullyShardedDataParallelPlugin`, `fsdp_utils.py`). A test asks the installed accelerate for its keys, so that a key a
new version adds fails there instead of being ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

VerdictName = Literal["honoured", "implied by FSDP2", "no effect", "conflicts"]
ValueKind = Literal["switch", "choice", "number", "names", "section", "anything"]

# Keys of `Key.values` beside the spelled-out values: every other value, a section with nothing in it, and a number that
# is the number of processes.
ANY = "anything else"
EMPTY = "empty"
ALL_PROCESSES = "num_processes"


class _FromFile:
    """Stands for the value as it is written in the file."""

    def __repr__(self) -> str:
        return "<value>"


FROM_FILE = _FromFile()


@dataclass(frozen=True)
class Meaning:
    """What one value of one key becomes: a verdict and maybe a shardtune setting, or a problem that stops the run.

    `also` is a second setting that it implies, unless another key decides it.
    """

    verdict: VerdictName | Literal["problem"]
    why: str
    path: str = ""
    value: Any = None
    change: str = ""
    also: tuple[str, Any] | None = None


@dataclass(frozen=True)
class Key:
    """One key accelerate knows (or people write), how its value is read, and what each value means.

    Args:
        section: "" for the top level, else the mapping it stands in.
        aliases: Values accelerate also takes (enum numbers), by the name they stand for.
        expects: Words for the values allowed where they are not a list of choices.
        many_machines: Added to the reason when num_machines > 1; {nodes}, {address} and {port} are filled in.
        overridden_by: A shardtune setting that makes a problem with this key moot if the user sets it.
    """

    name: str
    kind: ValueKind
    values: Mapping[str, Meaning]
    section: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    expects: str = ""
    minimum: int = 0
    many_machines: str = ""
    overridden_by: str = ""

    @property
    def allowed(self) -> str:
        """The values this key takes, in words."""
        if self.expects:
            return self.expects
        return "true or false" if self.kind == "switch" else ", ".join(v for v in self.values if v not in (ANY, EMPTY))


def _honoured(why: str, path: str = "", value: Any = None, also: tuple[str, Any] | None = None) -> Meaning:
    return Meaning("honoured", why, path, value, also=also)


def _implied(why: str) -> Meaning:
    return Meaning("implied by FSDP2", why)


def _no_effect(why: str) -> Meaning:
    return Meaning("no effect", why)


def _problem(why: str, change: str) -> Meaning:
    return Meaning("problem", why, change=change)


_SHARD, _SHARD_SIZE, _RESHARD = "parallel.shard", "parallel.shard_size", "parallel.reshard_after_forward"
_RESHARD_TRUE = "A layer's gathered weights are freed after its forward pass."
_RESHARD_FALSE = "Gathered weights are kept from forward to backward: less traffic, more memory."
_HYBRID = "The base is sharded inside each machine and replicated between machines."
# Both keys take these words: today's `accelerate config` writes FSDP1's under fsdp_reshard_after_forward, where
# `accelerate launch` then overrules them with its default FULL_SHARD.
_STRATEGIES = {
    "FULL_SHARD": _honoured(_RESHARD_TRUE, _RESHARD, True, also=(_SHARD, "full")),
    "SHARD_GRAD_OP": _honoured(_RESHARD_FALSE, _RESHARD, False, also=(_SHARD, "full")),
    "NO_SHARD": _honoured("Every process holds the whole base; only adapters are communicated.", _SHARD, "replicate"),
    "HYBRID_SHARD": _honoured(f"{_HYBRID} {_RESHARD_TRUE}", _SHARD, "hybrid", also=(_RESHARD, True)),
    "HYBRID_SHARD_ZERO2": _honoured(f"{_HYBRID} {_RESHARD_FALSE}", _SHARD, "hybrid", also=(_RESHARD, False)),
}
_STRATEGY_NUMBERS = {str(number): name for number, name in enumerate(_STRATEGIES, start=1)}

_CHECKPOINTS = "Checkpoints always hold the gathered adapter, never the base model."
_STATE_DICTS = {
    "FULL_STATE_DICT": _no_effect(
        f"{_CHECKPOINTS} (In accelerate this gathers the whole base model on rank 0 at each save.)"
    ),
    "LOCAL_STATE_DICT": _no_effect(f"{_CHECKPOINTS} (FSDP2 has no local state dict.)"),
    "SHARDED_STATE_DICT": _no_effect(f"{_CHECKPOINTS} (In the Trainer this makes save_model() write no adapter.)"),
}

_FSDP_KEYS = (
    Key(
        "fsdp_version",
        "choice",
        {
            "1": _no_effect("Sharding is always FSDP2; this file's FSDP1 settings are translated."),
            "2": _honoured("Sharding is FSDP2."),
        },
    ),
    Key("fsdp_sharding_strategy", "choice", _STRATEGIES, aliases=_STRATEGY_NUMBERS),
    Key(
        "fsdp_reshard_after_forward",
        "choice",
        {
            "true": _honoured(_RESHARD_TRUE, _RESHARD, True),
            "false": _honoured(_RESHARD_FALSE, _RESHARD, False),
            **_STRATEGIES,
        },
        expects="true or false (or FSDP1's FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD)",
    ),
    Key(
        "fsdp_auto_wrap_policy",
        "choice",
        {
            "TRANSFORMER_BASED_WRAP": _honoured("Each decoder layer is an FSDP unit."),
            "SIZE_BASED_WRAP": _no_effect("FSDP units are decoder layers, whatever their size."),
            "NO_WRAP": _no_effect("FSDP units are decoder layers; a single unit would gather the whole model at once."),
        },
    ),
    Key(
        "fsdp_transformer_layer_cls_to_wrap",
        "names",
        {
            ANY: _honoured(
                "Layers of this class are the units. The decoder layer of another architecture is read as this "
                "model's, and the run says so.",
                "parallel.transformer_layer_cls_to_wrap",
                FROM_FILE,
            )
        },
        expects="a class name, several separated by commas, or a list",
    ),
    Key(
        "fsdp_min_num_params",
        "anything",
        {ANY: _no_effect("Belongs to SIZE_BASED_WRAP; FSDP units are decoder layers, whatever their size.")},
    ),
    Key(
        "fsdp_offload_params",
        "switch",
        {
            "true": _honoured(
                "Parameter shards, gradients and optimizer state stay in host memory (slow; no effect on a CPU).",
                "parallel.offload_params",
                True,
            ),
            "false": _honoured("Everything stays on the device.", "parallel.offload_params", False),
        },
    ),
    Key(
        "fsdp_forward_prefetch",
        "switch",
        {
            "true": _honoured(
                "The next layer is gathered while the current one computes (accelerate ignores this with FSDP2).",
                "parallel.forward_prefetch",
                1,
            ),
            "false": _honoured("No layer is gathered ahead in the forward pass.", "parallel.forward_prefetch", 0),
        },
    ),
    Key(
        "fsdp_backward_prefetch",
        "choice",
        {
            "BACKWARD_PRE": _honoured(
                "The next layer is gathered before this one's gradients are computed.", "parallel.backward_prefetch", 1
            ),
            # FSDP2 prefetches in its pre-backward hook only. What BACKWARD_POST buys over PRE is memory (one layer
            # gathered at a time), and that is what no prefetch keeps.
            "BACKWARD_POST": _honoured(
                "FSDP2 cannot gather after the gradients; without prefetch it needs as little memory.",
                "parallel.backward_prefetch",
                0,
            ),
            "NO_PREFETCH": _honoured(
                "No layer is gathered ahead in the backward pass.", "parallel.backward_prefetch", 0
            ),
        },
        aliases={"1": "BACKWARD_PRE", "2": "BACKWARD_POST"},
    ),
    Key(
        "fsdp_state_dict_type",
        "choice",
        _STATE_DICTS,
        aliases={str(number): name for number, name in enumerate(_STATE_DICTS, start=1)},
    ),
    Key(
        "fsdp_state_dict_cpu_offload",
        "switch",
        {
            "true": _no_effect(
                "Only the adapter (megabytes) is gathered for a save; accelerate drops this key silently."
            ),
            "false": _no_effect(
                "Only the adapter (megabytes) is gathered for a save; accelerate drops this key silently."
            ),
        },
    ),
    Key(
        "fsdp_cpu_ram_efficient_loading",
        "switch",
        {
            "true": _no_effect(
                "Each process reads the checkpoint itself, nothing is broadcast. (accelerate allocates full-size "
                "zeros on the other ranks.)"
            ),
            "false": _no_effect("Each process reads the checkpoint itself, as requested."),
        },
    ),
    Key(
        "fsdp_sync_module_states",
        "switch",
        {
            "true": _implied("All ranks start from the same weights: the same files, the same seed for adapters."),
            "false": _no_effect("All ranks start from the same weights anyway."),
        },
    ),
    Key(
        "fsdp_use_orig_params",
        "switch",
        {
            "true": _implied("FSDP2 always keeps the original parameters, frozen and trained side by side."),
            "false": _no_effect("FSDP2 has no flattened parameters, which false asks for."),
        },
    ),
    Key(
        "fsdp_limit_all_gathers",
        "switch",
        {
            "true": _implied("FSDP2 bounds the gathers in flight by its prefetch; it needs no limiter."),
            "false": _no_effect("FSDP2 bounds the gathers in flight by its prefetch; there is no limiter to turn off."),
        },
    ),
    Key(
        "fsdp_activation_checkpointing",
        "switch",
        {
            "true": _honoured(
                "Done by shardtune's own checkpointing (accelerate's saves an empty adapter with LoRA).",
                "train.gradient_checkpointing",
                True,
            ),
            # Files for the Trainer say false because the Trainer's own gradient_checkpointing is on: both on raises.
            "false": _no_effect("Turns off accelerate's own wrapping only; train.gradient_checkpointing decides."),
        },
    ),
    Key(
        "fsdp_activation_checkpointing_offload",
        "switch",
        {
            "true": _honoured(
                "Inputs of checkpointed layers are kept in host memory (GPU only).",
                "train.offload_activations",
                True,
            ),
            "false": _honoured("The layers' inputs stay on the device.", "train.offload_activations", False),
        },
    ),
    Key(
        "fsdp_ignored_modules",
        "anything",
        {ANY: _no_effect("These are held like all other parameters (parallel.shard): same results.")},
    ),
)

_NOT_THIS_VERSION = "is not supported: the model is sharded and replicated only (parallel.shard)"
_ONLY_WITH = "Only matters with {} above 1, which is not supported."


def _degree(name: str, what: str) -> Key:
    return Key(
        f"parallelism_config_{name}",
        "number",
        {
            "1": _no_effect("1 means off."),
            ANY: _problem(f"{what} {_NOT_THIS_VERSION}", "Set it to 1, or remove parallelism_config."),
        },
        expects="a whole number from 1",
        minimum=1,
    )


_PARALLELISM_KEYS = (
    Key(
        "parallelism_config_dp_replicate_size",
        "number",
        {
            "1": _no_effect("1 means off."),
            ALL_PROCESSES: _honoured("Every process holds the whole base.", _SHARD, "replicate"),
            ANY: _honoured("That many replicas of the base.", _SHARD, "hybrid"),
        },
        expects="a whole number from 1",
        minimum=1,
    ),
    Key(
        "parallelism_config_dp_shard_size",
        "number",
        {
            "1": _no_effect("1 means off."),
            ALL_PROCESSES: _honoured("The base is sharded over all processes.", _SHARD, "full"),
            ANY: _honoured("Processes that share one replica.", _SHARD_SIZE, FROM_FILE, also=(_SHARD, "hybrid")),
        },
        expects="a whole number from 1",
        minimum=1,
    ),
    _degree("tp_size", "tensor parallelism"),
    _degree("cp_size", "context parallelism"),
    _degree("sp_size", "sequence parallelism"),
    *(
        Key(f"parallelism_config_{name}", "anything", {ANY: _no_effect(_ONLY_WITH.format(size))})
        for name, size in (
            ("cp_backend", "cp_size"),
            ("cp_comm_strategy", "cp_size"),
            ("sp_backend", "sp_size"),
            ("sp_seq_length", "sp_size"),
            ("sp_seq_length_is_variable", "sp_size"),
            ("sp_attn_implementation", "sp_size"),
        )
    ),
)

_NOT_FSDP = (
    "Set distributed_type: FSDP (with an fsdp_config), or remove this file: shardtune shards with FSDP2 by default."
)
_NO_DEVICE = "shardtune computes on NVIDIA GPUs or the CPU"
_FP16 = _problem(
    "fp16 is not supported: it needs loss scaling and overflows where bf16 does not",
    "Set mixed_precision: bf16.",
)
_EMPTY_SECTION = _no_effect("Empty.")
# A launcher or scheduler tells each process where it belongs; a file that is the same on every machine cannot.
_RENDEZVOUS = "Taken from the environment of each process: RANK, MASTER_ADDR, MASTER_PORT (or PET_*)."
_SEE_MACHINES = "See num_machines for the command."
_ON_EACH_MACHINE = (
    "On each machine: shardtune train CONFIG --nnodes {nodes} --node-rank R --master-addr {address} "
    "--master-port {port}"
)

_TOP_KEYS = (
    Key(
        "compute_environment",
        "choice",
        {
            "LOCAL_MACHINE": _honoured("Runs where it is started."),
            "AMAZON_SAGEMAKER": _problem(
                "shardtune does not submit to SageMaker", "Start `shardtune train` inside the SageMaker job instead."
            ),
        },
    ),
    Key(
        "distributed_type",
        "choice",
        {
            "FSDP": _honoured("FSDP2, on GPUs and on the CPU (where accelerate silently uses DDP)."),
            "MULTI_GPU": _no_effect("FSDP2 has the same results; parallel.shard: replicate is like DDP."),
            "MULTI_CPU": _honoured("FSDP2, on the CPU.", "parallel.device", "cpu"),
            "NO": _no_effect("FSDP2 is used for a single process too; num_processes sets the number."),
            "DEEPSPEED": _problem("DeepSpeed is not supported", _NOT_FSDP),
            "MEGATRON_LM": _problem("Megatron-LM is not supported", _NOT_FSDP),
            **{
                name: _problem(f"{_NO_DEVICE}, not on {device}", "Set distributed_type: FSDP, or MULTI_CPU.")
                for name, device in (
                    ("XLA", "TPUs"),
                    ("TPU", "TPUs"),
                    ("MULTI_NPU", "Ascend NPUs"),
                    ("MULTI_MLU", "Cambricon MLUs"),
                    ("MULTI_SDAA", "SDAA devices"),
                    ("MULTI_MUSA", "MUSA devices"),
                    ("MULTI_XPU", "Intel XPUs"),
                    ("MULTI_HPU", "Gaudi HPUs"),
                    ("MULTI_NEURON", "Neuron cores"),
                )
            },
        },
        expects="FSDP, MULTI_GPU, MULTI_CPU or NO",
    ),
    Key(
        "mixed_precision",
        "choice",
        {
            "bf16": _honoured("Computes in bfloat16; the adapters' master weights stay float32.", "train.bf16", True),
            "no": _honoured("Computes in the dtypes the weights are held in.", "train.bf16", False),
            "fp16": _FP16,
            "fp8": _problem(
                "FP8 is not set by accelerate's file",
                "Set mixed_precision: bf16, and model.base_precision: fp8 or train.fp8_compute: true in your own YAML.",
            ),
        },
        expects="bf16 or no",
        overridden_by="train.bf16",
    ),
    Key(
        "fp16",
        "switch",
        {"true": _FP16, "false": _no_effect("An old name of mixed_precision: fp16, off.")},
        overridden_by="train.bf16",
    ),
    Key(
        "num_processes",
        "number",
        {
            "-1": _no_effect("-1 leaves the number to the launcher; parallel.nproc applies."),
            # Divided by num_machines: see accelerate_file._share_of_processes.
            ANY: _honoured("Processes started on this machine.", "parallel.nproc", FROM_FILE),
        },
        expects="a whole number from 1",
        minimum=1,
        overridden_by="parallel.nproc",
    ),
    Key(
        "num_machines",
        "number",
        {
            "1": _honoured("All processes start on this machine."),
            ANY: _honoured("`shardtune train` starts the processes of one machine.", "cluster.nodes", FROM_FILE),
        },
        expects="a whole number from 1",
        minimum=1,
        many_machines=_ON_EACH_MACHINE,
    ),
    *(
        Key(name, "anything", {ANY: _no_effect(_RENDEZVOUS)}, many_machines=_SEE_MACHINES)
        for name in ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network")
    ),
    Key(
        "use_cpu",
        "switch",
        {
            "true": _honoured("Computes on the CPU, sharded there too.", "parallel.device", "cpu"),
            "false": _honoured("parallel.device stays auto: a GPU if there is one."),
        },
    ),
    Key(
        "gpu_ids",
        "anything",
        {
            "all": _honoured("All GPUs the processes can see."),
            ANY: _no_effect("shardtune does not select GPUs: set CUDA_VISIBLE_DEVICES to these."),
        },
    ),
    Key(
        "enable_cpu_affinity",
        "switch",
        {
            "true": _no_effect("Processes are not pinned to cores; use numactl."),
            "false": _honoured("Processes are not pinned to cores."),
        },
    ),
    Key(
        "debug",
        "switch",
        {
            "true": _no_effect(
                "It checks shapes in accelerate's own collectives, which FSDP2 does not use; "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL checks FSDP2's."
            ),
            "false": _no_effect("Off; it checks accelerate's own collectives only."),
        },
    ),
    Key(
        "main_training_function",
        "anything",
        {ANY: _no_effect("Names a function in a user's script for TPU launches; here the program is shardtune.")},
    ),
    *(
        Key(
            name,
            "section",
            {EMPTY: _EMPTY_SECTION, ANY: _no_effect(why)},
            expects="a mapping of settings",
        )
        for name, why in (
            ("deepspeed_config", "Belongs to distributed_type: DEEPSPEED."),
            ("megatron_lm_config", "Belongs to distributed_type: MEGATRON_LM."),
            ("fp8_config", "Belongs to mixed_precision: fp8, which is not supported."),
            (
                "dynamo_config",
                "Accelerate would compile the whole model; layers are compiled one by one: train.compile.",
            ),
            ("mpirun_config", "Processes are started by torch's elastic launcher, not by mpirun."),
        )
    ),
    *(
        Key(name, "section", {EMPTY: _EMPTY_SECTION}, expects="a mapping of settings")
        for name in ("fsdp_config", "parallelism_config")
    ),
    Key(
        "dynamo_backend",
        "anything",
        {
            "NO": _no_effect("Accelerate compiles nothing; whether layers are compiled one by one is train.compile."),
            ANY: _no_effect("Accelerate would compile the whole model; layers are compiled one by one: train.compile."),
        },
    ),
    *(
        Key(name, "anything", {ANY: _no_effect("For TPUs only.")})
        for name in (
            "downcast_bf16",
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_env",
            "command_file",
            "commands",
        )
    ),
    *(
        Key(name, "anything", {ANY: _no_effect("For SageMaker only.")})
        for name in (
            "ec2_instance_type",
            "iam_role_name",
            "image_uri",
            "profile",
            "region",
            "base_job_name",
            "pytorch_version",
            "transformers_version",
            "py_version",
            "sagemaker_inputs_file",
            "sagemaker_metrics_file",
            "additional_args",
        )
    ),
)

SECTIONS: dict[str, dict[str, Key]] = {
    "": {key.name: key for key in _TOP_KEYS},
    "fsdp_config": {key.name: key for key in _FSDP_KEYS},
    "parallelism_config": {key.name: key for key in _PARALLELISM_KEYS},
}

# Spellings found in articles and older files. accelerate drops each silently; the meaning is clear.
OTHER_SPELLINGS = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_cpu_offload": "fsdp_offload_params",
}

# In every file that `accelerate config` writes, with these values, whatever was answered; none has an effect here.
WRITTEN_BY_DEFAULT = {
    "debug": "false",
    "downcast_bf16": "no",
    "enable_cpu_affinity": "false",
    "machine_rank": "0",
    "main_training_function": "main",
    "rdzv_backend": "static",
    "same_network": "true",
    "tpu_env": "[]",
    "tpu_use_cluster": "false",
    "tpu_use_sudo": "false",
}


@dataclass(frozen=True)
class LaunchDefault:
    """The value that `accelerate launch` writes to a variable of its own accord.

    Args:
        report: A value like this still gets its verdict. False where it only repeats shardtune's own default, or
            turns something off.
    """

    value: str
    report: bool = False


# `accelerate launch` writes all of these for every FSDP run, whether or not somebody set them.
LAUNCH_DEFAULTS = {
    "ACCELERATE_MIXED_PRECISION": LaunchDefault("no", report=True),
    "ACCELERATE_USE_CPU": LaunchDefault("false"),
    "ACCELERATE_DYNAMO_BACKEND": LaunchDefault("no"),
    "FSDP_VERSION": LaunchDefault("1", report=True),
    "FSDP_SHARDING_STRATEGY": LaunchDefault("full_shard"),
    "FSDP_RESHARD_AFTER_FORWARD": LaunchDefault("true"),
    "FSDP_OFFLOAD_PARAMS": LaunchDefault("false"),
    "FSDP_MIN_NUM_PARAMS": LaunchDefault("100000000"),
    "FSDP_FORWARD_PREFETCH": LaunchDefault("false", report=True),
    "FSDP_USE_ORIG_PARAMS": LaunchDefault("true", report=True),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": LaunchDefault("true", report=True),
    "FSDP_SYNC_MODULE_STATES": LaunchDefault("true", report=True),
    "FSDP_ACTIVATION_CHECKPOINTING": LaunchDefault("false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": LaunchDefault("false"),
}

# Variable -> key of the file it comes from. The engines come first: they decide whether the rest means anything.
ENGINE_VARIABLES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
}
FSDP_VARIABLES = {
    **{
        name.upper(): name
        for name in SECTIONS["fsdp_config"]
        # These three never reach the workers: accelerate writes no variable for them.
        if name not in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_limit_all_gathers", "fsdp_state_dict_cpu_offload")
    },
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
}
PARALLELISM_VARIABLES = {name.upper(): name for name in SECTIONS["parallelism_config"]}

# What a worker takes out of its environment: transformers, and any Accelerator of a user's callback, would act on each
# behind the config's back (ACCELERATE_USE_FSDP changes how transformers loads, ACCELERATE_MIXED_PRECISION what
# TrainingArguments say). ACCELERATE_DEBUG_MODE and ACCELERATE_CPU_AFFINITY stay: they work, and change no result.
ACCELERATE_VARIABLES: tuple[str, ...] = (
    *ENGINE_VARIABLES,
    *VARIABLES,
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_DYNAMO_MODE",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    *FSDP_VARIABLES,
    *PARALLELISM_VARIABLES,
)
