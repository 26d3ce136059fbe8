"""What may be in an object of a CRD? Its schema, made as strict as `fieldValidation=Strict` of an API server.

Rules in CEL (x-kubernetes-validations) are not followed: only an API server knows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shardtune.cluster.manifests import Manifest
from shardtune.errors import UserInputError

_EMBEDDED = ("apiVersion", "kind", "metadata")  # every object has them, whether its schema names them or not
_COPIED = (
    "type", "format", "enum", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties",
    "allOf", "anyOf", "oneOf", "not",
)  # fmt: skip


def read_crds(folder: Path) -> list[Manifest]:
    """All CRDs in the YAML and JSON files of a folder (also as `kubectl get crd -o yaml` writes them), or in one file.

    Raises:
        UserInputError: there are none, a file cannot be read, or a kind is there twice.
    """
    if not folder.exists():
        raise UserInputError(f"There is no folder '{folder}' with CRDs.", fix="Check --crd-dir.")
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    found: dict[tuple[str, str], tuple[Path, Manifest]] = {}
    for file in files:
        if file.suffix not in (".yaml", ".yml", ".json"):
            continue
        for crd in _crds_in(file):
            key = (crd["spec"]["group"], crd["spec"]["names"]["kind"])
            if key in found:
                raise UserInputError(
                    f"Both '{found[key][0]}' and '{file}' describe {key[1]} ({key[0]}).",
                    why="They may be of different releases.",
                    fix="Keep the one that your cluster has: kubectl get crd -o yaml.",
                )
            found[key] = (file, crd)
    if not found:
        raise UserInputError(
            f"There is no CustomResourceDefinition in '{folder}'.",
            fix="Write those of your cluster there: kubectl get crd -o yaml > crds.yaml.",
        )
    return [crd for _, crd in found.values()]


def crd_of(crds: Sequence[Manifest], manifest: Mapping[str, Any]) -> Manifest | None:
    """The CRD that describes the kind of `manifest`, whatever version of it."""
    group = manifest["apiVersion"].rpartition("/")[0]
    for crd in crds:
        if (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (group, manifest["kind"]):
            return crd
    return None


def version_schema(crd: Manifest, version: str) -> Manifest | None:
    """The JSON schema (draft 4) of a version of the CRD; None if it is not served."""
    for one in crd["spec"]["versions"]:
        if one["name"] == version and one.get("served", True):
            strict = _strict(one["schema"]["openAPIV3Schema"])
            # An API server checks metadata by itself, as that of every object.
            properties = {**strict.get("properties", {}), "metadata": {"type": "object"}}
            return {**strict, "properties": {**{key: {} for key in _EMBEDDED}, **properties}}
    return None


def served_versions(crd: Manifest) -> list[str]:
    return [one["name"] for one in crd["spec"]["versions"] if one.get("served", True)]


def _crds_in(file: Path) -> list[Manifest]:
    try:
        text = file.read_text(encoding="utf-8")
        documents = list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserInputError(f"'{file}' cannot be read: {error}", fix="Check --crd-dir.") from None
    found = []
    for document in documents:
        listed = isinstance(document, dict) and str(document.get("kind", "")).endswith("List")
        for one in document.get("items") or [] if listed else [document]:
            if isinstance(one, dict) and one.get("kind") == "CustomResourceDefinition":
                found.append(_checked(one, file))
    return found


def _checked(crd: Manifest, file: Path) -> Manifest:
    """The CRD, if it has what is read of it."""
    if crd.get("apiVersion") != "apiextensions.k8s.io/v1":
        raise UserInputError(
            f"'{file}' holds a CRD of {crd.get('apiVersion')}.", fix="Use apiextensions.k8s.io/v1: kubectl get crd."
        )
    try:
        complete = crd["spec"]["group"] and crd["spec"]["names"]["kind"]
        for version in crd["spec"]["versions"]:
            complete = complete and version["name"] and version["schema"]["openAPIV3Schema"]
    except (KeyError, TypeError):
        complete = False
    if not complete:
        raise UserInputError(f"'{file}' holds a CRD without a group, a kind or a schema.", fix="Check the file.")
    return crd


def _strict(schema: Manifest) -> Manifest:
    """What is not named is not allowed, unless the schema keeps unknown fields."""
    strict: Manifest = {key: schema[key] for key in _COPIED if key in schema}
    if "pattern" in schema and _compiles(schema["pattern"]):
        strict["pattern"] = schema["pattern"]
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("anyOf", None)
        strict["type"] = ["integer", "string"]
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in schema:
        strict["properties"] = {name: _strict(inner) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    elif schema.get("type") == "object" and not keeps_unknown and schema.get("additionalProperties") is not True:
        strict["additionalProperties"] = False
    if schema.get("x-kubernetes-embedded-resource"):
        strict["properties"] = {**{key: {} for key in _EMBEDDED}, **strict.get("properties", {})}
    if schema.get("nullable"):
        types = strict.get("type", [])
        strict["type"] = [*([types] if isinstance(types, str) else types), "null"]
        if "enum" in strict:
            strict["enum"] = [*strict["enum"], None]
    return strict


def _compiles(pattern: str) -> bool:
    """Kubernetes' patterns are Go's; what Python cannot read is left to the API server."""
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
