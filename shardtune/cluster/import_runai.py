"""What does a `runai … submit` command ask for? Each flag becomes a setting of `cluster`, or is answered.

Flags of today's command (2.22 to 3.0), of release 2.20 and of the first generation (`runai submit-dist pytorch`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardtune.cluster.import_command import ReadScript, import_command
from shardtune.cluster.import_pod import import_image
from shardtune.cluster.import_report import Imported, validated
from shardtune.cluster.import_values import (
    LIMIT_ABOVE_REQUEST,
    NOT_IN_THE_COMMAND,
    import_capability,
    import_extended_resource,
    import_memory,
    import_network,
    import_uid,
    import_variable,
    read_duration,
    read_memory,
    read_pairs,
    read_path,
    secret_steps,
)
from shardtune.cluster.pod import CONTAINER, JOB_LABEL, NETWORKS
from shardtune.cluster.render_runai import NODE_POOLS, NODE_TYPE, PRIORITIES
from shardtune.cluster.runai_flags import (
    ASSET,
    FORMS,
    NO_EFFECT,
    NOT_SUPPORTED,
    ONE_POD,
    OTHER_SPELLINGS,
    SHORT,
    SWITCHES,
    WHOLE_GPUS,
)
from shardtune.cluster.spec import CONFIG_FOLDER, check_name
from shardtune.errors import UserInputError

_OURS = "app.kubernetes.io/managed-by=shardtune"  # label of jobs that were rendered here


@dataclass
class _Command:
    """A parsed command line: (flag as written, its canonical name, value), positional words, and what follows `--`."""

    form: str
    flags: list[tuple[str, str, str]] = field(default_factory=list)
    positional: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def last(self, name: str) -> str | None:
        return next((value for _, flag, value in reversed(self.flags) if flag == name), None)


def import_runai(argv: Sequence[str], read_script: ReadScript, *, keep_uid: bool = False) -> Imported:
    """The section `cluster` for a command line of Run:ai.

    Args:
        read_script: The text of a script that the container's command names, or None.
        keep_uid: Write a fixed uid and gid, which OpenShift's restricted-v2 refuses.

    Raises:
        UserInputError: this is no command that submits a job.
    """
    command = _parse(argv)
    found = Imported()
    found.section["target"] = "runai"
    handlers = _handlers(found, command, keep_uid)
    for written, name, value in command.flags:
        if name in handlers:
            handlers[name](written, value)
        elif name in NO_EFFECT:
            found.add(written, value, "no effect", NO_EFFECT[name])
        elif name in NOT_SUPPORTED:
            found.add(written, value, "not supported", NOT_SUPPORTED[name])
        elif name.startswith("--master-"):
            _import_master(found, command, written, name, value)
        else:
            found.add(written, value, "not known", _near(name, handlers))
    _import_name(found, command)
    if command.command:
        entry = command.last("--command") is not None
        import_command(found, "--command --" if entry else "--", command.command, read_script)
    project = found.section.get("runai_project")
    if not project:
        found.steps.append("set cluster.runai_project: the command has none (`runai project list` shows yours)")
    secret_steps(found, f"runai-{project}" if project else None)
    validated(found)
    return found


# --- the command line -----------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str]) -> _Command:
    words = list(argv)
    if not words or not words[0].rpartition("/")[2].startswith("runai"):
        raise UserInputError(
            f"'{' '.join(words[:3])}' is not a command of Run:ai.",
            fix="Write `shardtune cluster import -- runai training pytorch submit …`, or name a YAML file.",
        )
    words = words[1:]
    for form in FORMS:
        if words[: len(form.split())] == form.split():
            command = _Command(form)
            _parse_flags(words[len(form.split()) :], command)
            return command
    raise UserInputError(
        f"`runai {' '.join(words[:3])}` does not submit a training job.",
        fix=f"One of these can be imported: {', '.join(f'runai {form}' for form in FORMS)}.",
    )


def _parse_flags(words: list[str], command: _Command) -> None:
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            command.command = words[position:]
            return
        if not word.startswith("-") or word == "-":
            command.positional.append(word)
            continue
        written, equals, value = word.partition("=")
        if not word.startswith("--") and len(written) > 2:  # -g8
            written, value, equals = word[:2], word[2:].removeprefix("="), "="
        name = SHORT.get(written, written)
        name = OTHER_SPELLINGS.get(name, name)
        if not equals and name not in SWITCHES and position < len(words) and not _is_flag(words[position]):
            value = words[position]
            position += 1
        command.flags.append((written, name, value))


def _is_flag(word: str) -> bool:
    return word == "--" or (word.startswith("-") and not re.match(r"-\d", word))


def _near(name: str, handlers: dict[str, Callable[[str, str], None]]) -> str:
    close = difflib.get_close_matches(name, [*handlers, *NO_EFFECT, *NOT_SUPPORTED], n=1, cutoff=0.75)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"No release of the command that is known here has this flag.{hint} Nothing was written for it."


# --- flags ----------------------------------------------------------------------------------------------------------


def _handlers(found: Imported, command: _Command, keep_uid: bool) -> dict[str, Callable[[str, str], None]]:
    """By flag, what is done with its value. Each gets the flag as it was written."""

    def simple(setting: str) -> Callable[[str, str], None]:
        return lambda key, value: found.set(key, value, setting, value)

    return {
        "--image": lambda key, value: import_image(found, key, value),
        "--image-pull-policy": lambda key, value: _import_pull_policy(found, key, value),
        "--project": simple("runai_project"),
        "--name": lambda key, value: command.positional.insert(0, value),
        "--workers": lambda key, value: _import_workers(found, command, key, value),
        "--no-master": lambda key, value: found.add(key, value, "honoured", "The workers are all nodes."),
        "--gpu-devices-request": lambda key, value: _import_gpus(found, key, value),
        "--cpu-core-request": simple("cpu"),
        "--cpu-core-limit": lambda key, value: found.set(
            key, value, "cpu_limit", value, "A limit throttles the processes that feed the GPUs; it can be left out."
        ),
        "--cpu-memory-request": lambda key, value: import_memory(found, key, value, "memory"),
        "--cpu-memory-limit": lambda key, value: _import_memory_limit(found, command, key, value),
        "--large-shm": lambda key, value: found.add(
            key, value, "translated", "/dev/shm gets what the plan needs, at most half of the memory.",
            "shared_memory: auto",
        ),
        "--extended-resource": lambda key, value: _import_resource(found, key, value),
        "--annotation": lambda key, value: _import_annotation(found, key, value),
        "--label": lambda key, value: _import_label(found, key, value),
        "--existing-pvc": lambda key, value: _import_claim(found, key, value, read_pairs(value)),
        "--pvc": lambda key, value: _import_old_claim(found, key, value),
        "--environment-variable": lambda key, value: _import_variable(found, key, value),
        "--environment": lambda key, value: _import_environment(found, key, value),
        "--env-secret": lambda key, value: _import_env_secret(found, key, value),
        "--env-pod-field-ref": lambda key, value: _import_field_ref(found, key, value),
        "--run-as-uid": lambda key, value: import_uid(found, key, value, "run_as_uid", keep_uid),
        "--run-as-gid": lambda key, value: import_uid(found, key, value, "run_as_gid", keep_uid),
        "--working-dir": lambda key, value: _import_working_dir(found, key, value),
        "--capability": lambda key, value: import_capability(found, key, value),
        "--node-type": lambda key, value: found.put(
            key, value, "node_selector", NODE_TYPE, value, verdict="translated"
        ),
        "--node-pools": lambda key, value: _import_node_pool(found, key, value),
        "--toleration": lambda key, value: _import_toleration(found, key, value),
        "--priority": lambda key, value: _import_priority(found, key, value),
        "--preemptibility": lambda key, value: found.put(
            key, value, "labels", "kai.scheduler/preemptibility", value, verdict="translated"
        ),
        "--required-pod-topology-key": lambda key, value: _import_topology(found, key, value),
        "--backoff-limit": lambda key, value: _import_restarts(found, command, key, value),
        "--termination-grace-period": lambda key, value: _import_grace(found, key, value),
        "--auto-deletion-time-after-completion": lambda key, value: _import_keep(found, key, value),
        "--configmap-map-volume": lambda key, value: _import_mounted(found, key, value, "configMap"),
        "--secret-volume": lambda key, value: _import_mounted(found, key, value, "secret"),
        "--empty-dir-volume": lambda key, value: _import_empty_dir(found, key, value),
        "--nfs": lambda key, value: _import_mounted(found, key, value, "nfs"),
        "--host-path": lambda key, value: _import_mounted(found, key, value, "hostPath"),
        "--host-ipc": lambda key, value: _keep(found, key, value, {"hostIPC": True}),
        "--host-network": lambda key, value: _keep(found, key, value, {"hostNetwork": True}),
    }  # fmt: skip


def _import_name(found: Imported, command: _Command) -> None:
    name, *more = command.positional or [""]
    for word in more:
        found.add(word, "", "not known", "A word that belongs to no flag.")
    if not name:
        return
    try:
        check_name(name)
    except UserInputError as error:
        found.add("NAME", name, "changed", f"Left out: {error.why} The name is made from the config file's name.")
        return
    found.section["job_name"] = name
    why = "A name stands for one run: leave it out, and each job gets one from its config file."
    found.add("NAME", name, "honoured", why, f"job_name: {name}")


def _keep(found: Imported, key: str, value: str, part: dict[str, Any]) -> None:
    """In the overlay, which a manifest can have and the command cannot."""
    found.overlay(key, value, part, f"No setting covers it; it is kept as it was. {NOT_IN_THE_COMMAND}")


def _import_priority(found: Imported, key: str, value: str) -> None:
    if value in PRIORITIES:
        found.set(key, value, "priority_class", value)
        return
    why = f"Left out: not one of {', '.join(PRIORITIES)}. Set priority_class to one of them."
    found.add(key, value, "not supported", why)


def _import_pull_policy(found: Imported, key: str, value: str) -> None:
    policies = {"always": "Always", "ifnotpresent": "IfNotPresent", "never": "Never"}
    if value.lower() in policies:
        found.set(key, value, "image_pull_policy", policies[value.lower()])
    else:
        found.add(key, value, "not supported", f"Not one of {', '.join(policies.values())}.")


def _import_working_dir(found: Imported, key: str, value: str) -> None:
    path, why, verdict = read_path(value)
    found.set(key, value, "working_dir", path, why, verdict)


def _import_workers(found: Imported, command: _Command, key: str, value: str) -> None:
    if not value.isdigit():
        found.add(key, value, "not supported", "Not a number.")
        return
    if command.form in ONE_POD:
        found.add(key, value, "not supported", f"`runai {command.form}` makes one pod.")
        return
    if command.last("--no-master") is not None:
        found.set(key, value, "nodes", int(value), verdict="translated")
        return
    why = f"Workers do not count the master: {value} and 1."
    found.set(key, value, "nodes", int(value) + 1, why, "translated")


def _import_gpus(found: Imported, key: str, value: str) -> None:
    if value.isdigit():
        found.set(key, value, "gpus_per_node", int(value))
    else:
        found.add(key, value, "not supported", WHOLE_GPUS)


def _import_memory_limit(found: Imported, command: _Command, key: str, value: str) -> None:
    request = command.last("--cpu-memory-request")
    limit = read_memory(value)[0]
    if request is not None and limit is not None and read_memory(request)[0] == limit:
        found.add(key, value, "honoured", "The same as the request, which is the default.")
        return
    if request is None and limit is not None:
        import_memory(found, key, value, "memory")
        return
    import_memory(found, key, value, "memory_limit")
    if "memory_limit" in found.section:
        found.warn("memory_limit", LIMIT_ABOVE_REQUEST)


def _import_resource(found: Imported, key: str, value: str) -> None:
    name, equals, amount = value.partition("=")
    if not equals or not amount:
        found.add(key, value, "not supported", "Write NAME=AMOUNT.")
        return
    import_extended_resource(found, key, name, amount)


def _import_annotation(found: Imported, key: str, value: str) -> None:
    name, equals, text = value.partition("=")
    if not equals:
        found.add(key, value, "not supported", "Write NAME=VALUE.")
    elif name == NETWORKS:
        import_network(found, key, text)
    else:
        found.put(key, value, "annotations", name, text)


def _import_label(found: Imported, key: str, value: str) -> None:
    name, equals, text = value.partition("=")
    if not equals:
        found.add(key, value, "not supported", "Write NAME=VALUE.")
    elif name.startswith(("app.kubernetes.io/", "shardtune.dev/")) or name == JOB_LABEL:
        found.add(key, value, "no effect", "shardtune submit sets it.")
    else:
        found.put(key, value, "labels", name, text)


def _import_claim(found: Imported, key: str, value: str, pairs: dict[str, str]) -> None:
    claim, path = pairs.get("claimname", ""), pairs.get("path", "")
    if not claim or not path:
        found.add(key, value, "not supported", "It needs claimname=NAME and path=PATH.")
        return
    absolute, why, verdict = read_path(path)
    volume: dict[str, object] = {"claim": claim, "path": absolute}
    if "ro" in pairs or "readonly" in pairs:
        volume["read_only"] = True
        why = f"{why} {NOT_IN_THE_COMMAND}".strip()
    found.append(key, value, "volumes", volume, why, verdict)


def _import_old_claim(found: Imported, key: str, value: str) -> None:
    """`NAME:/path[:ro]` of the first generation; a third kind, `CLASS:3Gi:/path`, makes a new claim."""
    parts = value.split(":")
    if len(parts) >= 2 and parts[0] and parts[1].startswith("/"):
        pairs = {"claimname": parts[0], "path": parts[1], **({"ro": ""} if parts[2:] == ["ro"] else {})}
        _import_claim(found, key, value, pairs)
    else:
        found.add(key, value, "not supported", NOT_SUPPORTED["--new-pvc"])


def _import_variable(found: Imported, key: str, value: str) -> None:
    name, equals, text = value.partition("=")
    if equals:
        import_variable(found, key, name, text)
    else:
        found.add(key, value, "not supported", "It has no value; write NAME=VALUE.")


def _import_environment(found: Imported, key: str, value: str) -> None:
    """A variable in 2.20, an asset today."""
    if "=" in value:
        _import_variable(found, key, value)
    else:
        found.add(key, value, "not supported", ASSET)


def _import_env_secret(found: Imported, key: str, value: str) -> None:
    name, _, rest = value.partition("=")
    secret, _, place = rest.partition(",key=")
    if name and secret and place:
        found.put(key, value, "secret_env", name, f"{secret}/{place}")
    else:
        found.add(key, value, "not supported", "Write NAME=SECRET,key=KEY.")


def _import_field_ref(found: Imported, key: str, value: str) -> None:
    name, _, path = value.partition("=")
    variable = {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    _keep(found, key, value, {"containers": [{"name": CONTAINER, "env": [variable]}]})


def _import_node_pool(found: Imported, key: str, value: str) -> None:
    annotations = found.section.setdefault("annotations", {})
    annotations[NODE_POOLS] = f"{annotations.get(NODE_POOLS, '')} {value}".strip()
    why = "As an annotation, which Run:ai 3.0 reads; with runai_submit: cli it becomes --node-pools again."
    found.add(key, value, "translated", why, f"annotations.{NODE_POOLS}: {annotations[NODE_POOLS]}")


def _import_toleration(found: Imported, key: str, value: str) -> None:
    names = {"seconds": "tolerationSeconds"}
    pairs = read_pairs(value)
    if not pairs.get("operator") and not pairs.get("key"):
        found.add(key, value, "not supported", "Write operator=…,key=….")
        return
    toleration = {names.get(name, name): int(text) if name == "seconds" else text for name, text in pairs.items()}
    found.append(key, value, "tolerations", toleration)


def _import_topology(found: Imported, key: str, value: str) -> None:
    found.check["topology"] = "with Run:ai it needs runai_submit: cli."
    found.set(key, value, "topology", value.partition("=")[0], verdict="translated")


def _import_restarts(found: Imported, command: _Command, key: str, value: str) -> None:
    if not value.isdigit():
        found.add(key, value, "not supported", "Not a number.")
        return
    workers = command.last("--workers") or "0"
    nodes = int(workers) + (command.last("--no-master") is None) if workers.isdigit() else 1
    if any(name == "--label" and text == _OURS for _, name, text in command.flags):  # what `restart_limit` made
        found.set(key, value, "restarts", max(0, int(value) - 1) // max(1, nodes), verdict="translated")
        return
    why = "Restarts of the whole job. The limit counts those of each pod, so it will be restarts × nodes + 1."
    found.set(key, value, "restarts", int(value), why, "translated")


def _import_grace(found: Imported, key: str, value: str) -> None:
    seconds = read_duration(value)
    if seconds is None or seconds < 1:
        found.add(key, value, "not supported", "Not a duration such as 120s or 5m.")
        return
    found.set(key, value, "grace_seconds", int(seconds), "Left out, it follows from the plan.", "translated")


def _import_keep(found: Imported, key: str, value: str) -> None:
    seconds = read_duration(value)
    if seconds is None:
        found.add(key, value, "not supported", "Not a duration such as 24h.")
        return
    found.set(key, value, "keep_hours", round(seconds / 3600, 4), verdict="translated")


def _import_empty_dir(found: Imported, key: str, value: str) -> None:
    pairs = read_pairs(value)
    if pairs.get("path") == "/dev/shm":
        found.set(key, value, "shared_memory", pairs.get("size-limit") or "auto", verdict="translated")
        return
    volume: dict[str, str] = {}
    if pairs.get("medium"):
        volume["medium"] = pairs["medium"]
    if pairs.get("size-limit"):
        volume["sizeLimit"] = pairs["size-limit"]
    _mount(found, key, value, pairs.get("name") or "scratch", {"emptyDir": volume}, pairs.get("path", ""), False)


def _import_mounted(found: Imported, key: str, value: str, kind: str) -> None:
    """A volume that is no claim: kept in the overlay."""
    pairs = read_pairs(value)
    if kind == "configMap" and pairs.get("path") == CONFIG_FOLDER:
        found.add(key, value, "no effect", "shardtune submit mounts run.yaml itself.")
        return
    name = pairs.get("name", "")
    sources: dict[str, tuple[dict[str, str], str]] = {
        "configMap": ({"name": name}, pairs.get("path", "")),
        "secret": ({"secretName": name}, pairs.get("path", "")),
        "nfs": ({"server": pairs.get("server", ""), "path": pairs.get("path", "")}, pairs.get("mountpath", "")),
        "hostPath": ({"path": pairs.get("path", "")}, pairs.get("mount", "")),
    }
    source, target = sources[kind]
    if not all(source.values()) or not target:
        found.add(key, value, "not supported", "A part is missing: where it comes from, or where it is mounted.")
        return
    read_only = kind in ("nfs", "hostPath") and "readwrite" not in pairs
    label = re.sub(r"[^a-z0-9]+", "-", (name or target).lower()).strip("-")[:40] or kind.lower()
    _mount(found, key, value, label, {kind: source}, target, read_only)


def _mount(
    found: Imported, key: str, value: str, name: str, source: dict[str, object], target: str, read_only: bool
) -> None:
    mount: dict[str, object] = {"name": name, "mountPath": target, **({"readOnly": True} if read_only else {})}
    container = {"name": CONTAINER, "volumeMounts": [mount]}
    _keep(found, key, value, {"volumes": [{"name": name, **source}], "containers": [container]})


def _import_master(found: Imported, command: _Command, key: str, name: str, value: str) -> None:
    """The master is a node like the others here."""
    if name in ("--master-command", "--master-args"):
        found.add(key, value, "no effect", "All nodes run the same command.")
    elif name == "--master-no-pvcs":
        found.add(key, value, "changed", "All nodes mount the same volumes; node 0 writes the checkpoints.")
    elif value in [other for _, flag, other in command.flags if flag == f"--{name.removeprefix('--master-')}"]:
        found.add(key, value, "honoured", "The same as for the workers.")
    else:
        found.add(key, value, "changed", "Left out: all nodes are alike; the workers' value is used.")
