"""How is the GPU doing? Utilization, clock, power, temperature, memory and throttle reasons, from NVML, once a second.

Read in a thread, since the driver may be slow. What cannot be read is absent: no NVML, a slice of a GPU (MIG) without
that counter, a driver error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Bits of nvmlDeviceGetCurrentClocksEventReasons. "gpu_idle" is left out: an idle GPU is not slowed down by anything.
THROTTLE_REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


class GpuMeter:
    """Reads one GPU while it is open. `latest` is what was read last, empty if nothing can be.

    Args:
        device: The index torch gives it. NVML numbers all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES hides, so
            it is found by its UUID.
        nvml: The `pynvml` module, or a stand-in.
        every: Seconds between readings.
    """

    def __init__(self, device: int, nvml: Any = None, every: float = 1.0, uuid: str | None = None) -> None:
        self._device, self._every = device, every
        self._nvml = nvml if nvml is not None else _pynvml()
        self._uuid = uuid
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.latest: dict[str, object] = {}
        self.why_not: str | None = None

    def open(self) -> None:
        if self._nvml is None:
            self.why_not = "nvidia-ml-py is not installed"
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.why_not = f"NVML: {error}"
            return
        handle = self._handle()
        if handle is None:
            self._nvml.nvmlShutdown()
            return
        self.latest = self.read(handle)
        self._thread = threading.Thread(target=self._read_on, args=(handle,), name="gpu-meter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join(timeout=10)
            self._thread = None
            self._nvml.nvmlShutdown()

    def _handle(self) -> Any:
        uuid = self._uuid or gpu_uuid(self._device)
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            self.why_not = f"NVML does not know the GPU {uuid}: {error}"
            return None

    def _read_on(self, handle: Any) -> None:
        while not self._stop.wait(self._every):
            self.latest = self.read(handle)

    def read(self, handle: Any) -> dict[str, object]:
        nvml, values = self._nvml, {}
        readings: dict[str, Callable[[], object]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_watts": lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "memory_used": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "throttle": lambda: throttle_reasons(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        }
        for name, reading in readings.items():
            try:
                values[name] = reading()
            except nvml.NVMLError:
                continue
        return values


def throttle_reasons(bits: int) -> list[str]:
    """Names of the throttle reasons. An unknown bit is given as a number."""
    known = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~(sum(THROTTLE_REASONS) | 0x001)
    return known + ([f"{rest:#x}"] if rest else [])


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def gpu_uuid(device: int | torch.device) -> str:
    """The GPU's UUID for NVML, whose indices differ under CUDA_VISIBLE_DEVICES."""
    import torch

    known = str(torch.cuda.get_device_properties(device).uuid)
    return known if known.startswith(("GPU-", "MIG-")) else f"GPU-{known}"
