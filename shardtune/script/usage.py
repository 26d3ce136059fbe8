"""How much of the machine does a script use, whatever it does? An event every few seconds, from a thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from shardtune.observe.events import EventLog
from shardtune.observe.gpu_meter import GpuMeter
from shardtune.observe.gpus import describe_gpus, visible_gpus
from shardtune.observe.host_meter import HostMeter

EVERY = 10.0  # seconds


class UsageLog:
    """Writes `usage` events until it is closed, and one when it is: a short script has one, too.

    Args:
        local_rank: Of this rank on its node; as most scripts do, its GPU is taken to be the one of that number.
    """

    def __init__(self, events: EventLog, local_rank: int, environ: Mapping[str, str], every: float = EVERY) -> None:
        self._events, self._every = events, every
        self._host, self._gpu = HostMeter(), _gpu_meter(local_rank, environ)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._log_on, name="shardtune-usage", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join(5.0)
        if self._gpu is not None:
            self._gpu.close()

    def _log_on(self) -> None:
        while not self._end.wait(self._every):
            self._log()
        self._log()

    def _log(self) -> None:
        fields: dict[str, Any] = {"host": self._host.read()}
        if self._gpu is not None and self._gpu.latest:
            fields["gpu"] = self._gpu.latest
        self._events.write("usage", **fields)


def _gpu_meter(local_rank: int, environ: Mapping[str, str]) -> GpuMeter | None:
    """Found without torch: asking it would start CUDA before the script has chosen its device."""
    cards = visible_gpus(describe_gpus().get("gpus", []), environ)
    if local_rank >= len(cards) or "uuid" not in cards[local_rank]:
        return None
    meter = GpuMeter(local_rank, uuid=str(cards[local_rank]["uuid"]))
    meter.open()
    return meter
