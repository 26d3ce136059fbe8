"""What was meant by a value? Memory without a unit, durations, `a=b,c=d`, and variables that should not be there."""

from __future__ import annotations

import re
from decimal import Decimal

from shardtune.cluster.import_report import Imported, VerdictName
from shardtune.cluster.nccl_names import unknown_names
from shardtune.cluster.quantity import has_unit, mebibytes, parse_quantity
from shardtune.config.redact import hide_text, is_secret
from shardtune.launch.safe_defaults import SAFE_DEFAULTS

SECRET_OF_IMPORT = "training-secrets"
LIMIT_ABOVE_REQUEST = (
    "It differs from the request: what lies between is not reserved, and such pods are killed first when a node runs "
    "out of memory. Leave it out to reserve all of memory."
)
NOT_IN_THE_COMMAND = "It needs runai_submit: manifest (the default); runai_submit: cli refuses it."
_GIBI = 2**30
_SLOPPY_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp])(i?)b?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RANKS = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
     "NNODES", "NPROC_PER_NODE", "NUM_NODES", "JOB_COMPLETION_INDEX"}
)  # fmt: skip
_OF_OURS = ("SHARDTUNE_NODES", "SHARDTUNE_GRACE_SECONDS", "SHARDTUNE_SECRET")
_TCP_ONLY = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
_DEFAULTS = {
    "NCCL_IB_QPS_PER_CONNECTION": "1",
    "NCCL_IB_DISABLE": "0",
    "NCCL_P2P_DISABLE": "0",
    "PYTHONUNBUFFERED": "1",
}


def read_memory(text: str) -> tuple[str | None, str]:
    """A memory size as a quantity with a unit, and what was wrong with it ("" if nothing was).

    Example:
        >>> read_memory("96GB")
        ('96G', '`96GB` is not a quantity of Kubernetes.')
    """
    text = text.strip()
    try:
        number = parse_quantity(text)
    except ValueError:
        sloppy = _SLOPPY_UNIT.fullmatch(text)
        if sloppy is None:
            return None, f"`{text}` is not an amount of memory."
        unit = sloppy[2].upper() + ("i" if sloppy[3] else "")
        unit = "k" if unit == "K" else unit
        return f"{sloppy[1]}{unit}", f"`{text}` is not a quantity of Kubernetes."
    if has_unit(text) and not text.endswith("m"):
        small = f"{text} of memory is too little for training." if number < _GIBI else ""
        return text, small
    if number >= _GIBI:
        return mebibytes(float(number)), f"`{text}` is a number of bytes; written with a unit."
    return _guessed(number), f"`{text}` has no unit, so it means {text} bytes, and no server complains."


def _guessed(number: Decimal) -> str:
    """The unit that makes a host's memory of it: 96 → Gi, 3846 → Mi, 4000000 → Ki."""
    return f"{number:f}{'Gi' if number < 1024 else 'Mi' if number < 2**20 else 'Ki'}"


def read_duration(text: str) -> float | None:
    """Seconds of `90`, `30s`, `1h30m`; None for anything else."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not re.fullmatch(rf"(?:{_DURATION.pattern})+", text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def read_pairs(text: str) -> dict[str, str]:
    """`claimname=a,path=/b,ro` → {claimname: a, path: /b, ro: ""}."""
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def import_memory(found: Imported, key: str, text: str, setting: str, why: str = "") -> None:
    """`memory` or `memory_limit`.

    Args:
        why: Why this flag or field gives this setting, where it is not the one of that name.
    """
    becomes, wrong = read_memory(text)
    if becomes is None:
        found.add(key, text, "not supported", f"{wrong} Write a number with a unit, such as 256Gi.")
    elif not wrong:
        found.set(key, text, setting, becomes, why, "translated" if why else "honoured")
    else:
        guess = becomes != text
        if guess:
            found.warn(setting, f"{key} was {text}; {becomes} is a guess.")
        advice = "Taken as this; check it." if guess else "Check it; `shardtune plan` says what the run needs."
        found.set(key, text, setting, becomes, f"{wrong} {advice} {why}".strip(), "changed")


def read_path(path: str) -> tuple[str, str, VerdictName]:
    """A path in the container made absolute, with the reason and the verdict."""
    if path.startswith("/"):
        return path, "", "honoured"
    return f"/{path.removeprefix('./')}", "A path in a container must be absolute.", "changed"


def import_uid(found: Imported, key: str, text: str, setting: str, keep: bool) -> None:
    """A fixed uid or gid: written only if the user says so."""
    if not str(text).isdigit():
        found.add(key, text, "not supported", "Not a number.")
    elif keep:
        found.set(key, text, setting, int(text), "OpenShift's restricted-v2 refuses a fixed id: it needs another SCC.")
    else:
        why = "OpenShift's restricted-v2 refuses a fixed id, and the image runs under any."
        found.left_out[f"{setting}: {int(text)}"] = f"{why} Where files on a volume belong to this id, put it back:"
        found.add(key, text, "changed", f"Left out: {why} --keep-uid writes it.")


def import_capability(found: Imported, key: str, name: str) -> None:
    name = name.upper().removeprefix("CAP_")
    why = ""
    if name == "IPC_LOCK":
        why = "It does nothing for a process that is not root; memlock has to come from the container runtime."
    found.append(key, name, "capabilities", name, why)


def import_network(found: Imported, key: str, value: str) -> None:
    """The annotation of secondary networks."""
    for name in filter(None, (part.strip() for part in value.split(","))):
        found.append(key, value, "networks", name, verdict="translated")


def import_extended_resource(found: Imported, key: str, name: str, amount: str) -> None:
    found.put(key, f"{name}={amount}", "extended_resources", name, str(amount))
    if "rdma" not in found.section and re.search(
        r"rdma|infiniband|mellanox|(^|[/_-])(ib|hca|roce)", name, re.IGNORECASE
    ):
        kind = "roce" if re.search("roce|eth", name, re.IGNORECASE) else "infiniband"
        why = f"taken from {name}. NCCL_NET=IB comes with it: a fall-back to TCP is an error, not a slow run."
        found.warn("rdma", why)
        found.set(key, name, "rdma", kind, f"{why[0].upper()}{why[1:]} Check it.", "translated")


# --- variables ------------------------------------------------------------------------------------------------------


def import_variable(found: Imported, key: str, name: str, value: str) -> None:
    """One environment variable: kept, moved to where it belongs, or left out with the reason. Values of secrets are
    shown nowhere."""
    text = f"{name}={value}"
    if not _VARIABLE.fullmatch(name):
        found.add(key, name, "not supported", "Not the name of a variable; write NAME=VALUE.")
    elif secret := re.fullmatch(r"SECRET:([^,]+),(.+)", value):
        found.put(key, text, "secret_env", name, f"{secret[1]}/{secret[2]}", verdict="translated")
    elif name in _OF_OURS:
        found.add(key, name, "no effect", "shardtune submit sets it.")
    elif (is_secret(name) and value) or hide_text(value) != value:
        _import_secret(found, key, name)
    elif name == "CUDA_VISIBLE_DEVICES":
        found.add(key, text, "changed", "Left out: it hides GPUs from the pod; processes find theirs by local rank.")
    elif name in _RANKS or name.startswith("PET_"):
        found.add(key, text, "no effect", "Left out: the scheduler and the launcher set it in each pod.")
    elif name.startswith(("ACCELERATE_", "FSDP_")):
        found.add(key, text, "no effect", "Left out: accelerate's; parallel.accelerate_config reads its file.")
    elif advice := unknown_names([name]):
        found.add(key, text, "no effect", f"Left out: nothing reads it. {advice[name]}")
    elif SAFE_DEFAULTS.get(name, ("",))[0] == value or _DEFAULTS.get(name) == value:
        found.add(key, text, "no effect", "Left out: it is the default.")
    elif name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        found.set(key, text, "pip_index_url", value, verdict="translated")
    else:
        _import_plain(found, key, name, value)


def _import_secret(found: Imported, key: str, name: str) -> None:
    found.section.setdefault("secret_env", {})[name] = f"{SECRET_OF_IMPORT}/{name}"
    why = (
        "A secret in plain text can be read in every description of the job and in shell histories: revoke it. Now "
        "it comes from a Secret, which you have to create. The value is shown nowhere."
    )
    found.add(key, f"{name}=***", "changed", why, f"secret_env.{name}: {SECRET_OF_IMPORT}/{name}")


def _import_plain(found: Imported, key: str, name: str, value: str) -> None:
    why = ""
    if name == "NCCL_SOCKET_IFNAME":
        why = "It chooses the interface for TCP, not InfiniBand (NCCL_IB_HCA does); a wrong name stops the start."
    elif name in _TCP_ONLY:
        why = "It matters over TCP only."
    elif name == "NCCL_IB_DISABLE" and value == "1":
        why = "It switches RDMA off."
    elif name == "PYTORCH_CUDA_ALLOC_CONF":
        found.put(key, f"{name}={value}", "env", "PYTORCH_ALLOC_CONF", value, "The current name.", "translated")
        return
    if "$" in value:
        why = f"{why} A variable of the shell in it is not expanded in a pod.".strip()
    found.put(key, f"{name}={value}", "env", name, value, why)


def secret_steps(found: Imported, namespace: str | None) -> None:
    """The command that makes the Secret which `_import_secret` refers to.

    The values go through a pipe: arguments of kubectl could be read by every user of the machine.
    """
    names = [
        name for name, where in found.section.get("secret_env", {}).items() if where.startswith(f"{SECRET_OF_IMPORT}/")
    ]
    if names:
        where = f" -n {namespace}" if namespace else ""
        values = " ".join(f'"${name}"' for name in names)
        if len(names) == 1:
            text, source = "%s", f"--from-file={names[0]}=/dev/stdin"
        else:
            text, source = "".join(f"{name}=%s\\n" for name in names), "--from-env-file=/dev/stdin"
        create = f"kubectl{where} create secret generic {SECRET_OF_IMPORT} {source}"
        found.steps.append(f"printf '{text}' {values} | {create}")
