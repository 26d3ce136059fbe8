"""How fast could this chip be? Vendors' peaks for dense bf16 matrix products, without sparsity."""

from __future__ import annotations

# TFLOP/s in bf16 with float32 accumulation, from the vendors' data sheets; where a sheet gives only the number "with
# sparsity", half of it. Boost clock, full power limit. Longer names first: the first that fits a device's name counts.
_PEAKS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H800 PCIE", 756.0),
    ("H800", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIE", 756.0),
    ("H100", 989.4),  # SXM ("H100 80GB HBM3")
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
)


def peak_tflops(device_name: str) -> float | None:
    """Of the whole chip; None for one that is not in the list, and for a slice of one (MIG)."""
    name = device_name.upper()
    if "MIG" in name:
        return None
    words = name.replace("-", " ").replace("_", " ").split()
    for chip, peak in _PEAKS:
        wanted = chip.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return peak
        if len(wanted) > 1 and wanted[0] in words and wanted[1] in words:  # "H100 80GB … PCIe"
            return peak
    return None
