"""How is a model exported? Plan, check the disk, write, verify, describe, publish."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shardtune import terminal
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import UserInputError
from shardtune.export.model_card import write_card
from shardtune.export.publish import check_out, staged
from shardtune.export.request import ExportLog, ExportRequest, ExportResult, default_out
from shardtune.export.targets import prepare
from shardtune.model.locate import folder_on_disk
from shardtune.run.folder import CHECKPOINTS

if TYPE_CHECKING:
    from shardtune.inference.source import TunedModel


def export_model(request: ExportRequest, log: ExportLog) -> ExportResult:
    """Write what is asked for; `request.out` appears when it is verified, or not at all.

    Raises:
        ShardtuneError: it cannot be exported so, or what was written is not what it should be.
    """
    began = time.monotonic()
    # Before the base is read: a mistake in --out is known at once.
    default = request.out == default_out(request.tuned, request.target)
    check_out(request.out, 0, (request.tuned.adapter,), default=default)
    with ExitStack() as stack:
        _keep_checkpoint(request.tuned, stack)
        if request.tuned.notice:
            log.warn(request.tuned.notice)
        export = prepare(request)
        check_out(request.out, export.nbytes, default=default)
        folder = stack.enter_context(staged(request.out))
        export.write(folder, log)
        verification = export.verify(folder, log)
        log.say("verified", verification.text)
        base = folder_on_disk(request.tuned.base)
        card = export.card()
        write_card(request, base, card, verification, list(log.warnings), folder)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = tuple(str(file.relative_to(folder)) for file in files)
        nbytes = sum(file.stat().st_size for file in files)
    log.say("written", f"{request.out} ({terminal.size(nbytes)})")
    return ExportResult(
        out=request.out,
        target=request.target,
        nbytes=nbytes,
        files=names,
        verification=verification,
        warnings=tuple(log.warnings),
        seconds=time.monotonic() - began,
        serve=card.serve,
    )


def _keep_checkpoint(tuned: TunedModel, stack: ExitStack) -> None:
    """A run that goes on deletes old checkpoints; this one is read again when the result is verified."""
    if tuned.run is None or tuned.step is None:
        return
    store = CheckpointStore(tuned.run / CHECKPOINTS, keep=None)
    if store.path(tuned.step).resolve() != tuned.adapter.resolve():
        return
    try:
        stack.enter_context(store.reading(tuned.step))
    except FileNotFoundError as error:
        raise UserInputError(
            f"Checkpoint {tuned.step} of the run '{tuned.run.name}' is gone.",
            why="The run goes on and keeps its newest ones only (train.save_total_limit).",
            fix="Give --checkpoint latest again.",
        ) from error
