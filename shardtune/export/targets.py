"""Which targets are there? Each is a module with `prepare(request)`, imported when it is asked for."""

from __future__ import annotations

from shardtune.export.request import Export, ExportRequest


def prepare(request: ExportRequest) -> Export:
    """The plan of the target that is asked for.

    Raises:
        UserInputError: the model cannot be exported so.
    """
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
