"""How is a model exported? Plan, check the disk, write, verify, describe, publish."""

from __future__ import annotations

import time

from shardtune import terminal
from shardtune.export.model_card import write_card
from shardtune.export.publish import check_out, staged
from shardtune.export.request import Exported, ExportLog, ExportRequest
from shardtune.export.targets import prepare
from shardtune.model.locate import folder_on_disk


def export_model(request: ExportRequest, log: ExportLog) -> Exported:
    """Write what is asked for; `request.out` appears when it is verified, or not at all.

    Raises:
        ShardtuneError: it cannot be exported so, or what was written is not what it should be.
    """
    began = time.monotonic()
    # Before the base is read: a mistake in --out is known at once.
    check_out(request.out, 0, (request.tuned.adapter,))
    export = prepare(request)
    check_out(request.out, export.nbytes)
    with staged(request.out) as folder:
        export.write(folder, log)
        verification = export.verify(folder, log)
        log.say("verified", verification.text)
        base = folder_on_disk(request.tuned.base)
        write_card(request, base, export.card(), verification, list(log.warnings), folder)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = tuple(str(file.relative_to(folder)) for file in files)
        nbytes = sum(file.stat().st_size for file in files)
    log.say("written", f"{request.out} ({terminal.size(nbytes)})")
    return Exported(
        out=request.out,
        target=request.target,
        nbytes=nbytes,
        files=names,
        verification=verification,
        warnings=tuple(log.warnings),
        seconds=time.monotonic() - began,
    )
