"""Which GPUs are there, how are they connected, and are they healthy? Read from NVML, the library below nvidia-smi.

What a GPU, driver or container does not report is left out, never zero. Memory in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TOPOLOGY = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvidia-smi's words
_NVLINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}


def describe_gpus(nvml: Any = None) -> dict[str, Any]:
    """`driver`, `cuda_driver`, `gpus` (a list), `unreachable_gpus`, `topology` (a matrix of nvidia-smi's codes).

    Without a driver there is only `no_gpu`, the reason.

    Args:
        nvml: The module `pynvml`, or what stands for it in a test.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"no_gpu": str(error)}
    try:
        return _Nvml(nvml).describe()
    finally:
        nvml.nvmlShutdown()


def visible_gpus(cards: Sequence[dict[str, Any]], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; NVML itself sees all. As CUDA reads it: the first entry
    that names no GPU ends the list."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or "MIG-" in wanted:  # NVML does not list parts of a GPU
        return list(cards)
    found: list[dict[str, Any]] = []
    for entry in filter(None, (word.strip() for word in wanted.split(","))):
        card = next((card for card in cards if _is_named(card, entry)), None)
        if card is None:
            break
        found.append(card)
    return found


def _is_named(card: Mapping[str, Any], entry: str) -> bool:
    if entry.isdigit():
        return bool(card["index"] == int(entry))
    return str(card.get("uuid", "")).startswith(entry)


class _Nvml:
    """Queries all GPUs. Any query may be unsupported."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def ask(self, question: str, *args: Any) -> Any:
        """The result of one NVML call; None where this GPU, driver or NVML does not support it."""
        function: Callable[..., Any] | None = getattr(self.nvml, question, None)
        if function is None:
            return None
        try:
            return function(*args)
        except self.nvml.NVMLError:
            return None

    def describe(self) -> dict[str, Any]:
        handles: dict[int, Any] = {}
        lost = []
        for index in range(self.ask("nvmlDeviceGetCount") or 0):
            try:
                handles[index] = self.nvml.nvmlDeviceGetHandleByIndex(index)
            except self.nvml.NVMLError as error:  # a GPU that has fallen off the bus, or is not ours
                lost.append({"index": index, "error": str(error)})
        if not handles and not lost:
            return {"no_gpu": "NVML reports no GPU"}
        cuda = self.ask("nvmlSystemGetCudaDriverVersion_v2")
        addresses = {
            index: self._address(self.ask("nvmlDeviceGetPciInfo", handle)) for index, handle in handles.items()
        }
        gpus = [self._gpu(index, handle, addresses) for index, handle in handles.items()]
        found = {
            "driver": self.ask("nvmlSystemGetDriverVersion"),
            "cuda_driver": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            "gpus": gpus,
            "unreachable_gpus": lost,
            "topology": self._topology(list(handles.values()), gpus) if len(handles) > 1 else None,
        }
        return _known(found)

    def _gpu(self, index: int, handle: Any, addresses: dict[int, str | None]) -> dict[str, Any]:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        power = self.ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        mig = self.ask("nvmlDeviceGetMigMode", handle)
        persistence = self.ask("nvmlDeviceGetPersistenceMode", handle)
        return _known(
            {
                "index": index,
                "name": self.ask("nvmlDeviceGetName", handle),
                "uuid": self.ask("nvmlDeviceGetUUID", handle),
                "pci": addresses[index],
                "memory": memory.total if memory is not None else None,
                "memory_used": memory.used if memory is not None else None,
                "ecc": self._ecc(handle),
                "clocks": self._clocks(handle),
                "power_limit_watts": power / 1000 if power is not None else None,
                "persistence": bool(persistence) if persistence is not None else None,
                "mig": bool(mig[0]) if mig is not None else None,
                "pcie": _known(
                    {
                        "generation": self.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
                        "max_generation": self.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
                        "width": self.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
                        "max_width": self.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
                    }
                ),
                "nvlink": self._links(handle, addresses),
            }
        )

    def _ecc(self, handle: Any) -> dict[str, Any]:
        nvml, mode = self.nvml, self.ask("nvmlDeviceGetEccMode", handle)
        if mode is None:
            return {}
        uncorrected = self.ask(
            "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
        )
        return _known({"enabled": bool(mode[0]), "uncorrected": uncorrected})

    def _clocks(self, handle: Any) -> dict[str, Any]:
        found = {}
        for name, kind in (("sm", self.nvml.NVML_CLOCK_SM), ("memory", self.nvml.NVML_CLOCK_MEM)):
            found[f"{name}_mhz"] = self.ask("nvmlDeviceGetClockInfo", handle, kind)
            found[f"{name}_max_mhz"] = self.ask("nvmlDeviceGetMaxClockInfo", handle, kind)
        return _known(found)

    def _links(self, handle: Any, addresses: dict[int, str | None]) -> list[dict[str, Any]]:
        links = []
        for link in range(self.nvml.NVML_NVLINK_MAX_LINKS):
            state = self.ask("nvmlDeviceGetNvLinkState", handle, link)
            if state is None:  # there is no such link
                continue
            one: dict[str, Any] = {"link": link, "active": bool(state)}
            if state:
                version = self.ask("nvmlDeviceGetNvLinkVersion", handle, link)
                one["version"] = _NVLINK_VERSIONS.get(version) if version is not None else None
                one["megabytes_per_second"] = self._link_speed(handle, link)
                one["peer"] = self._peer(handle, link, addresses)
            links.append(_known(one))
        return links

    def _link_speed(self, handle: Any, link: int) -> int | None:
        """One direction."""
        answer = self.ask("nvmlDeviceGetFieldValues", handle, [(self.nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)])
        if answer is None or answer[0].nvmlReturn != 0:  # NVML_SUCCESS; a field has an answer of its own
            return None
        return int(answer[0].value.uiVal) or None

    def _peer(self, handle: Any, link: int, addresses: dict[int, str | None]) -> str | None:
        address = self._address(self.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
        if address is not None:
            for index, own in addresses.items():
                if own == address:
                    return f"GPU {index}"
        kind = self.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == self.nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return "switch"
        return address

    def _topology(self, handles: list[Any], gpus: list[dict[str, Any]]) -> list[list[str]]:
        """How each pair is connected: `NV18` (18 NVLinks), or the nearest common ancestor (PIX to SYS); else `?`."""
        return [
            ["X" if i == j else self._between(handles, gpus, i, j) for j in range(len(handles))]
            for i in range(len(handles))
        ]

    def _between(self, handles: list[Any], gpus: list[dict[str, Any]], i: int, j: int) -> str:
        nvml = self.nvml
        joined = self.ask("nvmlDeviceGetP2PStatus", handles[i], handles[j], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if joined == nvml.NVML_P2P_STATUS_OK:
            peers = [link.get("peer") for link in gpus[i].get("nvlink", []) if link["active"]]
            direct = peers.count(f"GPU {gpus[j]['index']}")
            return f"NV{direct or peers.count('switch') or '?'}"
        level = self.ask("nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])
        return _TOPOLOGY.get(level, "?")

    @staticmethod
    def _address(pci: Any) -> str | None:
        if pci is None:
            return None
        text = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
        return text.lower() or None


def _known(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None and value != {} and value != []}
