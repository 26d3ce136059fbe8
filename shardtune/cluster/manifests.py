"""What is sent to a cluster? Plain dicts: the workload, and what is made beside it and belongs to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """A rendered job.

    Attributes:
        workload: The object whose controller makes the pods. It owns `support`.
        support: What has to exist before its pods start: ConfigMap, Secret, Service, TrainingRuntime. Values of the
            Secret are empty here; they are made when the job is submitted, and printed nowhere.
        templates: The pod templates inside `workload` by role (`node`, `master`, `worker`), the same dicts.
    """

    workload: Manifest
    support: tuple[Manifest, ...]
    templates: Mapping[str, Manifest]

    def __iter__(self) -> Iterator[Manifest]:
        """In the order in which they are created."""
        yield from self.support
        yield self.workload

    @property
    def name(self) -> str:
        return str(self.workload["metadata"]["name"])
