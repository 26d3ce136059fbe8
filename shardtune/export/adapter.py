"""Target `adapter`."""

from __future__ import annotations

from shardtune.errors import UserInputError
from shardtune.export.request import Export, ExportRequest


def prepare(request: ExportRequest) -> Export:
    raise UserInputError(f"--to {request.target} is not implemented.")
