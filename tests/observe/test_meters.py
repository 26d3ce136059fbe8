from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardtune.observe import host_meter
from shardtune.observe.gpu_meter import GpuMeter, throttle_reasons
from shardtune.observe.host_meter import HostMeter


class Nvml:
    """NVML of a machine with one GPU, which may refuse any question."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *refuses: str) -> None:
        self.refuses, self.open, self.power = refuses, 0, 640_123
        self.asked = threading.Event()

    def _answer(self, name: str, answer: Any) -> Any:
        if name in self.refuses:
            raise self.NVMLError(name)
        return answer

    def nvmlInit(self) -> None:
        self._answer("init", None)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return str(self._answer("handle", uuid))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer("utilization", SimpleNamespace(gpu=98))

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return int(self._answer("clock", 1980))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if self.power == 1000:
            self.asked.set()
        return int(self._answer("power", self.power))

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return int(self._answer("temperature", 66))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self._answer("memory", 5 << 30))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return int(self._answer("throttle", 0x5))


def test_all_is_read_that_nvml_tells() -> None:
    nvml = Nvml()
    meter = GpuMeter(0, nvml, uuid="GPU-1")
    meter.open()
    assert meter.latest == {
        "utilization": 98, "sm_clock_mhz": 1980, "power_watts": 640.1, "temperature_c": 66, "throttle": ["sw_power_cap"],
        "memory_used": 5 << 30,
    }  # fmt: skip
    meter.close()
    assert nvml.open == 0


def test_what_a_gpu_does_not_tell_is_absent_and_the_rest_is_there() -> None:
    meter = GpuMeter(0, Nvml("utilization", "throttle"), uuid="MIG-1")
    meter.open()
    meter.close()
    assert set(meter.latest) == {"sm_clock_mhz", "power_watts", "temperature_c", "memory_used"}


@pytest.mark.parametrize(("refuses", "why"), [("init", "NVML: init"), ("handle", "NVML does not know the GPU GPU-1")])
def test_without_a_driver_or_the_gpu_nothing_is_read_and_it_says_why(refuses: str, why: str) -> None:
    nvml = Nvml(refuses)
    meter = GpuMeter(0, nvml, uuid="GPU-1")
    meter.open()
    assert meter.latest == {} and why in str(meter.why_not) and nvml.open == 0
    meter.close()


def test_it_reads_on_in_a_thread_of_its_own_until_it_is_closed() -> None:
    nvml = Nvml()
    meter = GpuMeter(0, nvml, every=0.01, uuid="GPU-1")
    meter.open()
    nvml.power = 1000
    assert nvml.asked.wait(60)
    meter.close()
    assert meter.latest["power_watts"] == 1.0
    assert not any(thread.name == "gpu-meter" for thread in threading.enumerate())


def test_throttle_reasons_have_names_and_an_idle_gpu_has_none() -> None:
    assert throttle_reasons(0x1) == []
    assert throttle_reasons(0x68) == ["hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown"]
    assert throttle_reasons(0x1004) == ["sw_power_cap", "0x1000"]


def test_the_host_tells_memory_and_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = HostMeter()
    clock, spent = meter._last
    monkeypatch.setattr("time.perf_counter", lambda: clock + 2)
    monkeypatch.setattr("time.process_time", lambda: spent + 3)
    told = meter.read()
    assert told["cpu_percent"] == 150 and told["rss"] > 1_000_000


def test_a_host_without_proc_has_no_memory_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_meter, "_STATM", Path("/nowhere"))
    assert "rss" not in HostMeter().read()
