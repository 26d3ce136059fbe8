"""Which format did a model's training rows have? From its run's events and config. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from shardtune.config.schema import DataSection
from shardtune.data.formats import FormatChoice, FormatName
from shardtune.data.template import Template
from shardtune.errors import UserInputError
from shardtune.inference.source import TunedModel
from shardtune.report.read import Tail, event_files, listed, mapping, text

NOT_TRAINED_HERE = "the adapter is outside of any run, so it is not known how it was trained"


@dataclass(frozen=True)
class TrainedFormat:
    """What questions have to look like.

    Attributes:
        section: The `data` section of the run's config; its defaults for an adapter outside of any run.
        choice: The format of the rows, as training found it.
        known: Training itself has recorded it; False: a chat is assumed.
    """

    section: DataSection
    choice: FormatChoice
    known: bool = True


def trained_format(tuned: TunedModel, *, raw: bool = False) -> TrainedFormat:
    """How the model was asked in training.

    An adapter outside of any run is assumed to have learnt conversations: there is nothing else to go by.

    Args:
        raw: The prompt is a text to be continued, however the model was trained.

    Raises:
        UserInputError: the run does not say.
    """
    section = tuned.config.data if tuned.config is not None else None
    if raw:
        plain = (section or _any_data()).model_copy(update={"format": "text", "prompt_template": None})
        return TrainedFormat(plain, FormatChoice("text", "--raw", ("text",)))
    if section is None or tuned.run is None:
        choice = FormatChoice("chat", NOT_TRAINED_HERE, ("messages",))
        return TrainedFormat(_any_data(), choice, known=False)
    recorded = recorded_format(tuned.run) or _configured(section)
    if recorded is None:
        raise UserInputError(
            f"It is not known which format the rows of the run '{tuned.run.name}' had.",
            why="data.format is auto, and the run's events, which record what that came to, are missing.",
            fix="Copy events-rank0.jsonl back into its folder, or use --raw, which continues the prompt as it is.",
        )
    return TrainedFormat(section, recorded)


def _any_data() -> DataSection:
    return DataSection(dataset_name_or_path="none")


def recorded_format(run: Path) -> FormatChoice | None:
    """What the `data` event of the run's first rank says, which stands near the start of its file."""
    for path in event_files(run).values():
        tail = Tail(path)
        while (news := tail.read()).events or news.unreadable:
            for event in news.events:
                if event["event"] == "data":
                    return _choice(mapping(event.get("format")))
        break
    return None


def _choice(found: dict[str, object]) -> FormatChoice | None:
    name, columns = text(found.get("name")), tuple(map(str, listed(found.get("columns"))))
    if name not in get_args(FormatName) or not columns:
        return None
    return FormatChoice(name, text(found.get("why")), columns)  # type: ignore[arg-type]


def _configured(section: DataSection) -> FormatChoice | None:
    if section.prompt_template is not None:
        columns = Template.parse(section.prompt_template).columns
        return FormatChoice("prompt", f"data.prompt_template, the answer is '{columns[-1]}'", tuple(columns))
    if section.format == "text" or section.text_field is not None:
        return FormatChoice("text", "data.format: text", (section.text_field or "text",))
    if section.format == "chat" or section.messages_field is not None:
        return FormatChoice("chat", "data.format: chat", (section.messages_field or "messages",))
    return None
