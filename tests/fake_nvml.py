"""NVML without a driver: cards that answer as real ones do, with pynvml's own structures, constants and errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class Card:
    """One card. A field that is None is a question the card does not answer."""

    name: str = "NVIDIA H200"
    memory: int = 150_754_820_096
    ecc: bool | None = True
    uncorrected: int | None = 0
    power_milliwatts: int | None = 700_000
    persistence: int | None = 1
    mig: int | None = 0
    lanes: int = 16
    # per link: None = down, "switch", or the number of the card at its other end
    links: list[str | int | None] = field(default_factory=lambda: ["switch"] * 18)
    lost: bool = False
    recent_uncorrected: int | None = 0  # since the driver was loaded
    remapped: tuple[int, int, int, int] | None = (0, 0, 0, 0)  # rows: corrected, uncorrected; pending, failed
    slowdown: int = 0  # nvmlClocksEventReason… bits
    used: int = 600_000_000
    processes: tuple[int, ...] = ()


def h200s(number: int = 8) -> list[Card]:
    return [Card() for _ in range(number)]


class FakeNvml:
    """What stands for the module `pynvml`. Its functions have the names and arguments of the real ones (tested)."""

    def __init__(self, cards: list[Card] | None, level: int = pynvml.NVML_TOPOLOGY_SYSTEM) -> None:
        self.cards, self.level = cards, level
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "nvmlClocksEventReason")):  # constants and errors
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        if self.cards is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards or [])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self._cards[index].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._cards[handle].name

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:08d}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return self._pci(0x10 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        memory = pynvml.c_nvmlMemory_t()
        memory.total, memory.used = self._cards[handle].memory, self._cards[handle].used
        return memory

    def nvmlDeviceGetEccMode(self, handle: int) -> list[int]:
        mode = int(self._known(self._cards[handle].ecc))
        return [mode, mode]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, errorType: int, counterType: int) -> int:
        assert errorType == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        card = self._cards[handle]
        return self._known(card.uncorrected if counterType == pynvml.NVML_AGGREGATE_ECC else card.recent_uncorrected)

    def nvmlDeviceGetRemappedRows(self, device: int) -> tuple[int, int, int, int]:
        return self._known(self._cards[device].remapped)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: int) -> int:
        return self._known(None)  # of cards before Ampere

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self._cards[handle].slowdown

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 91

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self._cards[handle].processes]

    def nvmlDeviceGetClockInfo(self, handle: int, type: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 345, pynvml.NVML_CLOCK_MEM: 3201}[type]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, type: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[type]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return self._known(self._cards[handle].power_milliwatts)

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        return self._known(self._cards[handle].persistence)

    def nvmlDeviceGetMigMode(self, device: int) -> list[int]:
        mode = self._known(self._cards[device].mig)
        return [mode, mode]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return self._cards[handle].lanes

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        return int(self._link(device, link) is not None)

    def nvmlDeviceGetNvLinkVersion(self, device: int, link: int) -> int:
        return pynvml.NVML_NVLINK_VERSION_4_0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int) -> Any:
        peer = self._known(self._link(device, link))
        return self._pci(0xE0 if peer == "switch" else 0x10 + int(peer))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        is_switch = self._link(handle, link) == "switch"
        return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if is_switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetFieldValues(self, handle: int, fieldIds: list[Any]) -> Any:
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, (number, link) in zip(values, fieldIds, strict=True):
            assert number == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
            self._link(handle, link)
            value.nvmlReturn, value.value.uiVal = pynvml.NVML_SUCCESS, 26562
        return values

    def nvmlDeviceGetP2PStatus(self, device1: int, device2: int, p2pIndex: int) -> int:
        assert p2pIndex == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        joined = any(peer in ("switch", device2) for peer in self._cards[device1].links)
        return pynvml.NVML_P2P_STATUS_OK if joined else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: int, device2: int) -> int:
        return self.level

    @property
    def _cards(self) -> list[Card]:
        assert self.cards is not None and self.open, "asked before nvmlInit or after nvmlShutdown"
        return self.cards

    def _link(self, handle: int, link: int) -> str | int | None:
        links = self._cards[handle].links
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return links[link]

    @staticmethod
    def _known(value: Any) -> Any:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    @staticmethod
    def _pci(bus: int) -> Any:
        pci = pynvml.nvmlPciInfo_t()
        pci.busId = f"00000000:{bus:02X}:00.0".encode()
        return pci
