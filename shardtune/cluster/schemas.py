"""Would an API server take these objects? Checked offline, by published schemas; unknown fields are refused.

- Kinds of Kubernetes itself, and every pod template as a Pod (CRDs may not look inside): by kubernetes-validate.
- Kinds that a CRD of the site describes: by that CRD. It comes before everything else.
- TrainJob and TrainingRuntime otherwise: by the models of kubeflow-trainer-api, which drop unknown fields silently;
  here they are refused.
- Anything else is reported as not checked.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtune.cluster.crd_schemas import crd_of, served_versions, version_schema
from shardtune.cluster.manifests import Manifest
from shardtune.config.suggestions import nearest
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

Path = tuple[str | int, ...]
_TRAINER_MODELS = {
    "TrainJob": ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
    "TrainingRuntime": ("trainer_v1alpha1_training_runtime", "TrainerV1alpha1TrainingRuntime"),
}
# What the published schemas leave open, and an API server does not: quantities, and fields that have a few words. Of
# these, the ones that people write themselves (tolerations, affinity, an overlay).
_QUANTITY = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
_CORE = "io.k8s.api.core.v1."
_FIELD_WORDS = {
    (f"{_CORE}Container", "imagePullPolicy"): ("Always", "IfNotPresent", "Never"),
    (f"{_CORE}ContainerPort", "protocol"): ("TCP", "UDP", "SCTP"),
    (f"{_CORE}PodSpec", "restartPolicy"): ("Always", "OnFailure", "Never"),
    (f"{_CORE}PodSpec", "dnsPolicy"): ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    (f"{_CORE}Toleration", "operator"): ("Exists", "Equal", "Lt", "Gt"),
    (f"{_CORE}Toleration", "effect"): ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    (f"{_CORE}TopologySpreadConstraint", "whenUnsatisfiable"): ("DoNotSchedule", "ScheduleAnyway"),
    (f"{_CORE}NodeSelectorRequirement", "operator"): ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
}
_TYPE_WORDS = {
    "object": "a mapping", "array": "a list", "string": "text", "integer": "an integer", "number": "a number",
    "boolean": "true or false", "null": "null",
}  # fmt: skip


@dataclass(frozen=True)
class SchemaProblem:
    """A field that an API server would refuse, or drop.

    Attributes:
        manifest: Kind and name of the object.
        path: Of the field, as `spec.template.spec.containers[0].image`; empty for the object itself.
        message: What is wrong with it.
    """

    manifest: str
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.manifest}: {self.path + ': ' if self.path else ''}{self.message}"


@dataclass(frozen=True)
class SchemaReport:
    """What was found, by which schema each object was checked, and what could not be checked.

    Attributes:
        checked: By kind and name, the schema.
        unchecked: Objects without a schema, with what is missing.
    """

    problems: tuple[SchemaProblem, ...]
    checked: Mapping[str, str]
    unchecked: Mapping[str, str]


def validate(
    manifests: Iterable[Manifest], crds: Sequence[Manifest] = (), kubernetes_version: str | None = None
) -> SchemaReport:
    """Check objects without a cluster.

    Args:
        crds: Of the site (`crd_schemas.read_crds`).
        kubernetes_version: `1.34`; None = the newest that kubernetes-validate knows.

    Raises:
        UserInputError: a package of the extra `cluster` is missing, or has no such version.
    """
    problems: list[SchemaProblem] = []
    checked: dict[str, str] = {}
    unchecked: dict[str, str] = {}
    for manifest in manifests:
        name = _mapping(manifest.get("metadata")).get("name", "without a name")
        label = f"{manifest.get('kind', 'object')} {name}"
        absent = [key for key in ("apiVersion", "kind") if not isinstance(manifest.get(key), str)]
        if absent:
            problems += [SchemaProblem(label, key, "is missing") for key in absent]
            continue
        found, by = _check_object(manifest, crds, kubernetes_version)
        if by is None:
            unchecked[label] = "only its metadata and pods are checked: no CRD of this kind was given (--crd-dir)"
        else:
            checked[label] = by
        for path, template in pod_templates(manifest):
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            found += [((*path, *inner), message) for inner, message in _core_problems(pod, kubernetes_version) or ()]
        # A pod template is seen by two schemas, often with the same result; the first one's words are kept.
        unique = dict(reversed(found))
        problems += [SchemaProblem(label, _text(path), unique[path]) for path in sorted(unique, key=_sort_key)]
    return SchemaReport(tuple(problems), checked, unchecked)


def pod_templates(manifest: Manifest) -> Iterator[tuple[Path, Manifest]]:
    """The pod templates in a workload of one of our kinds, each with its path."""
    kind, spec = manifest["kind"], _mapping(manifest.get("spec"))
    if kind == "PyTorchJob":
        for role, replica in _mapping(spec.get("pytorchReplicaSpecs")).items():
            yield from _template_in(replica, ("spec", "pytorchReplicaSpecs", role))
    if kind in ("JobSet", "TrainingRuntime"):
        above: Path = ("spec",) if kind == "JobSet" else ("spec", "template", "spec")
        inner = spec if kind == "JobSet" else _mapping(_mapping(spec.get("template")).get("spec"))
        jobs = inner.get("replicatedJobs")
        for index, replicated in enumerate(jobs if isinstance(jobs, list) else []):
            job = _mapping(_mapping(replicated).get("template")).get("spec")
            yield from _template_in(job, (*above, "replicatedJobs", index, "template", "spec"))


def _mapping(value: Any) -> Manifest:
    return value if isinstance(value, dict) else {}


def _template_in(holder: Any, path: Path) -> Iterator[tuple[Path, Manifest]]:
    if isinstance(holder, dict) and isinstance(holder.get("template"), dict):
        yield (*path, "template"), holder["template"]


# --- which schema


def _check_object(
    manifest: Manifest, crds: Sequence[Manifest], kubernetes_version: str | None
) -> tuple[list[tuple[Path, str]], str | None]:
    """The problems, and which schema found them; None = there is none for this kind."""
    crd = crd_of(crds, manifest)
    if crd is not None:
        version = manifest["apiVersion"].rpartition("/")[2]
        found = _crd_problems(crd, version, manifest) + _metadata_problems(manifest, kubernetes_version)
        return found, f"the site's CRD of {crd['spec']['names']['kind']} ({crd['spec']['group']})"
    if manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1" and manifest["kind"] in _TRAINER_MODELS:
        release = importlib.metadata.version("kubeflow-trainer-api") if _has("kubeflow_trainer_api") else ""
        return _trainer_problems(manifest), f"the models of kubeflow-trainer-api {release}"
    core = _core_problems(manifest, kubernetes_version)
    if core is not None:
        return core, f"the schemas of Kubernetes {_kubernetes_version(kubernetes_version)}"
    return _metadata_problems(manifest, kubernetes_version), None


def _crd_problems(crd: Manifest, version: str, manifest: Manifest) -> list[tuple[Path, str]]:
    schema = version_schema(crd, version)
    if schema is None:
        served = ", ".join(served_versions(crd)) or "no version"
        return [(("apiVersion",), f"the site's CRD serves {served}, not {version}")]
    from jsonschema.validators import Draft4Validator  # boolean exclusiveMinimum, as OpenAPI 3.0

    return _problems(Draft4Validator(schema), manifest)


def _metadata_problems(manifest: Manifest, kubernetes_version: str | None) -> list[tuple[Path, str]]:
    """Metadata is the same for every kind, and no CRD describes it."""
    bare = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest.get("metadata")}
    return _core_problems(bare, kubernetes_version) or []


def _core_problems(manifest: Manifest, kubernetes_version: str | None) -> list[tuple[Path, str]] | None:
    """None: it is not a kind of Kubernetes itself."""
    validator = _core_validator(manifest["apiVersion"], manifest["kind"], _kubernetes_version(kubernetes_version))
    return None if validator is None else _problems(validator, manifest)


def _trainer_problems(manifest: Manifest) -> list[tuple[Path, str]]:
    found = _problems(_trainer_validator(manifest["kind"]), manifest)
    if found:
        return found
    from pydantic import ValidationError as ModelError

    try:  # the schema does not have what the models check in code: the words that a field may have
        _trainer_model(manifest["kind"]).from_dict(manifest)
    except ModelError as error:
        return [((), f"{error.title}: {one['loc'][-1]}: {one['msg']}") for one in error.errors()]
    return []


# --- the schemas, read once


@functools.cache
def _kubernetes_version(asked: str | None) -> str:
    """The folder of kubernetes-validate's schemas to use: the newest, or the newest that is not newer than asked."""
    if not _has("kubernetes_validate"):
        raise UserInputError(
            "Manifests cannot be checked: the package kubernetes-validate is not installed.",
            fix="pip install 'shardtune[cluster]'",
        )
    folders = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    names = [re.fullmatch(r"v(\d+)\.(\d+)\.\d+-local-strict", one.name) for one in folders.iterdir()]
    known = sorted((int(name[1]), int(name[2])) for name in names if name)
    if asked is None:
        return "{}.{}".format(*known[-1])
    wanted = re.match(r"v?(\d+)\.(\d+)", asked)
    older = [one for one in known if wanted and one <= (int(wanted[1]), int(wanted[2]))]
    if not older:
        raise UserInputError(
            f"There are no schemas of Kubernetes {asked}.",
            fix=f"Use {known[0][0]}.{known[0][1]} or a later version.",
        )
    return "{}.{}".format(*older[-1])


@functools.cache
def _core_validator(api_version: str, kind: str, version: str) -> Validator | None:
    group, _, name = api_version.rpartition("/")
    file = "-".join(filter(None, (kind.lower(), group.partition(".")[0], name)))
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    source = folder / f"{file}.json"
    if not source.is_file():
        return None
    schema = json.loads(source.read_text(encoding="utf-8"))
    if schema["properties"].get("apiVersion", {}).get("enum", [api_version]) != [api_version]:
        return None  # another group whose name begins alike
    from jsonschema.validators import Draft202012Validator

    return Draft202012Validator(schema, registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Any:
    from referencing import Registry, Resource

    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    contents = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))
    kinds = contents["$defs"]
    kinds["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {"type": ["string", "number"], "pattern": _QUANTITY}
    kinds["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {"type": ["string", "integer"]}
    for (kind, field), words in _FIELD_WORDS.items():
        if field in kinds.get(kind, {}).get("properties", {}):
            kinds[kind]["properties"][field]["enum"] = [*words, "", None]
    return Resource.from_contents(contents) @ Registry()


@functools.cache
def _trainer_validator(kind: str) -> Validator:
    """The models' own JSON schema, with `additionalProperties: false` wherever a model lists its fields."""
    from jsonschema.validators import Draft202012Validator

    schema = _trainer_model(kind).model_json_schema(by_alias=True)
    strict = {name: _closed(definition) for name, definition in schema.pop("$defs").items()}
    return Draft202012Validator({**_closed(schema), "$defs": strict})


@functools.cache
def _trainer_model(kind: str) -> Any:
    if not _has("kubeflow_trainer_api"):
        raise UserInputError(
            f"A {kind} cannot be checked: the package kubeflow-trainer-api is not installed.",
            fix="pip install 'shardtune[cluster]', or give the site's CRDs with --crd-dir.",
        )
    module, name = _TRAINER_MODELS[kind]
    return getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), name)


def _closed(definition: Manifest) -> Manifest:
    if "actual_instance" in definition.get("properties", {}):  # how the generator writes "text or a number"
        return {"type": ["string", "number"]}
    closed = {key: value for key, value in definition.items() if key not in ("title", "description")}
    return {**closed, "additionalProperties": False} if "properties" in closed else closed


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# --- what is wrong, in words


def _problems(validator: Validator, manifest: Manifest) -> list[tuple[Path, str]]:
    return [found for error in validator.iter_errors(manifest) for found in _words(error)]


def _words(error: ValidationError) -> Iterator[tuple[Path, str]]:
    """One problem for each field at fault, at the path of the field itself."""
    path: Path = tuple(error.absolute_path)
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = list(error.schema.get("properties", {}))
        for name in sorted(set(error.instance) - set(known)):
            close = nearest(name, known)
            yield (*path, name), "unknown field" + (f"; did you mean `{close}`?" if close else "")
    elif error.validator == "required":
        for name in error.validator_value:
            if name not in error.instance:
                yield (*path, name), "is missing"
    elif error.validator == "type":
        kinds = [error.validator_value] if isinstance(error.validator_value, str) else list(error.validator_value)
        yield path, f"must be {_either(kinds)}, is {_shown(error.instance)}"
    elif error.validator == "enum":
        words = ", ".join(str(word) for word in error.validator_value if word not in ("", None))
        yield path, f"must be one of {words}, is {_shown(error.instance)}"
    elif error.validator == "pattern" and "[KMGTPE]i" in error.validator_value:
        yield path, f"{_shown(error.instance)} is not a quantity of Kubernetes, such as 96Gi or 500m"
    elif error.validator == "pattern":
        yield path, f"{_shown(error.instance)} does not match {error.validator_value}"
    elif error.validator in ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"):
        limit = {"min": "at least", "max": "at most"}[error.validator[:3]]
        counted = {"L": " characters", "I": " items"}.get(error.validator[3:4], "")
        yield path, f"must be {limit} {error.validator_value}{counted}, is {_shown(error.instance)}"
    elif error.validator in ("anyOf", "oneOf"):
        yield from _alternative(error, path)
    else:
        yield path, error.message


def _alternative(error: ValidationError, path: Path) -> Iterator[tuple[Path, str]]:
    """Of alternatives, what is wrong with the one that was meant: where the check came furthest. `null` is not it."""
    by_alternative: dict[Any, list[ValidationError]] = {}
    for one in error.context or ():
        if one.schema.get("type") != "null":
            by_alternative.setdefault(one.relative_schema_path[0], []).append(one)
    if not by_alternative:
        yield path, error.message
        return
    meant = max(by_alternative.values(), key=lambda errors: max(len(one.absolute_path) for one in errors))
    for one in meant:
        yield from _words(one)


def _either(kinds: Iterable[str]) -> str:
    words = [_TYPE_WORDS.get(kind, kind) for kind in dict.fromkeys(kinds) if kind != "null"]
    return " or ".join(words)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the text '{value}'" if len(value) <= 60 else "a longer text"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    return json.dumps(value)


def _text(path: Path) -> str:
    """`spec.containers[0].env`; names with dots or slashes, such as labels, in quotes."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w-]+", part):
            text += f".{part}" if text else part
        else:
            text += f"['{part}']"
    return text


def _sort_key(path: Path) -> tuple[tuple[bool, str, int], ...]:
    return tuple((isinstance(part, int), str(part), part if isinstance(part, int) else 0) for part in path)
