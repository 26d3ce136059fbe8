"""Which settings can a scheduler not express? All of them are reported at once, each with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardtune.cluster.spec import ClusterJob
from shardtune.config.cluster_schema import ClusterSection
from shardtune.errors import UserInputError

# What only says where a job goes, or belongs to one scheduler by name: no other scheduler has to express it.
NAMES_A_SCHEDULER = frozenset(
    {"target", "profile", "context", "trainer_release", "runai_project", "runai_submit", "runai_kind", "sbatch"}
)


def is_set(settings: ClusterSection, name: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(getattr(settings, name) != ClusterSection.model_fields[name].get_default(call_default_factory=True))


def settings_in_use(settings: ClusterSection, names: Iterable[str]) -> list[str]:
    return [name for name in names if is_set(settings, name)]


def refuse_settings(job: ClusterJob, where: str, alternatives: Mapping[str, str], otherwise: str = "") -> None:
    """Raise if a setting of `alternatives` is set: a job must not run without something that was asked for.

    Args:
        where: What cannot express them, as the subject of a sentence: "Slurm".
        alternatives: By setting, what to do instead.
        otherwise: What to do instead of all of them.
    """
    found = settings_in_use(job.settings, alternatives)
    if not found:
        return
    listed = ", ".join(f"cluster.{name}" for name in found)
    advice = [f"cluster.{name}: {alternatives[name]}." for name in found]
    raise UserInputError(f"{where} cannot express {listed}.", fix="\n".join([*advice, otherwise]).strip())
