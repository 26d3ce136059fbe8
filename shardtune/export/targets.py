"""Which targets are there? Each is a module with `prepare(request)`, imported when it is asked for."""

from __future__ import annotations

from shardtune.errors import UserInputError
from shardtune.export.base_name import check_base_name
from shardtune.export.request import Export, ExportRequest, TargetName

# By option: the targets that it has an effect on.
_OPTIONS: dict[str, tuple[str, tuple[TargetName, ...]]] = {
    "--dtype": ("dtype", ("merged", "gguf")),
    "--quantization": ("quantization", ("gguf",)),
    "--max-shard-size": ("max_shard_bytes", ("merged",)),
    "--min-surviving-delta": ("min_surviving_delta", ("merged", "gguf")),
}
_SERVED = "The adapter is one file in float32; the server casts it to the dtype of its base."
_WHY: dict[TargetName, str] = {
    "adapter": "The adapter is one file, written as training wrote it.",
    "vllm": _SERVED,
    "sglang": _SERVED,
    "gguf": "A GGUF model is one file.",
    "merged": "It is for --to gguf.",
}


def prepare(request: ExportRequest) -> Export:
    """The plan of the target that is asked for.

    Raises:
        UserInputError: the model cannot be exported so, or an option is wrong or has no effect on this target.
    """
    for option, (name, targets) in _OPTIONS.items():
        if getattr(request, name) is not None and request.target not in targets:
            raise UserInputError(
                f"{option} has no effect with --to {request.target}.",
                why=_WHY[request.target],
                fix=f"Leave {option} out.",
            )
    if request.base_name is not None:
        check_base_name(request.base_name)
    if request.target == "merged":
        from shardtune.export import merged

        return merged.prepare(request)
    if request.target == "adapter":
        from shardtune.export import adapter

        return adapter.prepare(request)
    if request.target == "gguf":
        from shardtune.export import gguf_export

        return gguf_export.prepare(request)
    from shardtune.export import serving

    return serving.prepare(request)
