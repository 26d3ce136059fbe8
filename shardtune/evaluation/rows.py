"""Which rows are evaluated, and which part of each is the answer? Read, formatted, masked and cut as the run's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardtune.config import ConfigError, Place, load_config
from shardtune.config.field_checks import check_fields
from shardtune.config.overrides import read_overrides
from shardtune.config.schema import SourceSection
from shardtune.data.checks import empty_rows, empty_why
from shardtune.data.formats import loss_on, template_of
from shardtune.data.prepare import prepare
from shardtune.data.show_rows import special_ids
from shardtune.data.source import Source, check_dataset_path, has_split, sources_of
from shardtune.data.tokens import IGNORED
from shardtune.errors import UserInputError
from shardtune.evaluation.intervals import SEED
from shardtune.evaluation.training_rows import TrainedData, is_training_split, rows_in
from shardtune.inference.sampling import answer_ends, generation_defaults
from shardtune.inference.trained_format import recorded_format
from shardtune.model.load import model_folder
from shardtune.terminal import count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardtune.config.schema import DataSection
    from shardtune.data.prepare import PreparedSet, Progress
    from shardtune.data.prepared import Prepared
    from shardtune.inference.source import TunedModel

_DEFAULT_SPLITS = ("test", "validation", "train")  # of given data, the first that is there
_LOOKED_AT = 100  # rows, for the tokens that end their answers
_RELATIVE_IS_MISSING = re.compile(r"The dataset '[^/~].*' does not exist")
_FORMATS = ("data.format", "data.prompt_template", "data.text_field", "data.messages_field")


@dataclass(frozen=True)
class Question:
    """A row's last answer: what stands before it, and the answer up to its end token.

    Attributes:
        number: Of the row among those that are evaluated.
    """

    number: int
    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """What is evaluated.

    Attributes:
        prepared: All rows.
        chosen: Numbers of those that are evaluated, rising.
        name: The data as one says it.
        split: Of `name`; None: that is a file, which has none.
        is_own: The run's own validation rows.
        questions: Rows with an answer; empty where `no_answers` says why.
        without_question: Rows that have none, by the reason.
        ends: Tokens that end an answer.
        tail: What the template has behind an answer, before its end token.
        training_rows: How many of the chosen are also training rows; None: not known.
        is_training_split: Read from a file or split that the run was trained on.
        changed: What to say if the run's own validation rows are not what they were in training.
        other_format: What to say if these rows have another format than those it was trained on.
    """

    section: DataSection
    prepared_set: PreparedSet
    prepared: Prepared
    chosen: tuple[int, ...]
    name: str
    split: str | None
    is_own: bool
    questions: tuple[Question, ...]
    no_answers: str
    without_question: dict[str, int]
    ends: tuple[int, ...]
    tail: str = ""
    training_rows: int | None = None
    is_training_split: bool = False
    changed: str = ""
    other_format: str = ""

    @property
    def warnings(self) -> list[str]:
        """Why the numbers may say less about the model than they seem to."""
        found = [text for text in (self.changed, self.other_format) if text]
        counts = self.prepared.counts
        if (empty := empty_rows(counts)) is not None:
            of = f"{empty.rows:,} of {count(counts.read, 'row')} dropped as empty"
            found.append(f"{of}: {empty_why(self.prepared_set, empty)}")
        if self.training_rows:
            of = f"{self.training_rows:,} of {count(len(self.chosen), 'row')} are also training rows"
            found.append(f"{of}: the numbers say little about rows that the model has not seen.")
        elif self.is_training_split:
            found.append("The run was trained on this split, so the numbers say little about rows it has not seen.")
        return found


@dataclass(frozen=True)
class DataChoice:
    """What the command line asks for; None: the run's own validation rows."""

    data: str | None = None
    split: str | None = None
    max_rows: int | None = None
    overrides: tuple[str, ...] = ()


def data_section(tuned: TunedModel, choice: DataChoice) -> tuple[DataSection, bool]:
    """The data settings of the run with what the command line changes, and whether the rows are its validation rows.

    Raises:
        UserInputError: a setting is wrong, or it is not known what the rows are.
    """
    foreign = [text for text in choice.overrides if not text.strip().startswith("data.")]
    if foreign:
        raise UserInputError(
            f"-o {foreign[0]}: only settings of `data` apply to an evaluation.",
            fix="Leave it out. Another checkpoint: --checkpoint; another place of the base model: --model.",
        )
    if tuned.run is not None and tuned.config is not None:
        section = load_config(tuned.run / "config.yaml", choice.overrides).config.data
    else:
        section = _without_run(tuned, choice)
    if choice.data is None and choice.split is None:
        if section.val_split is None:
            raise UserInputError(
                "There is nothing to evaluate on: the run has no validation rows (data.val_split is null).",
                fix="Give --data FILE, or --split for another split of the run's own data, such as --split test.",
            )
        return section, True
    if choice.data is not None:
        given = _names(choice.overrides)
        section = section.model_copy(
            update={
                "dataset_name_or_path": choice.data,
                "dataset_config_name": section.dataset_config_name if "data.dataset_config_name" in given else None,
            }
        )
        with _said_by_options(tuned, own=False):
            check_dataset_path(section)
    with _said_by_options(tuned, own=choice.data is None):
        split = choice.split or _default_split(section)
        if choice.data is None and not isinstance(section.dataset_name_or_path, str):
            section = section.model_copy(update={"dataset_name_or_path": _sources_with(section, split)})
    return section.model_copy(update={"train_split": split, "val_split": None}), False


def read_rows(
    tuned: TunedModel,
    choice: DataChoice,
    tokenizer: PreTrainedTokenizerBase,
    *,
    progress: Progress | None = None,
) -> Rows:
    """Prepare the rows, from the cache where they are known, and find the answer in each.

    Raises:
        UserInputError: there are no such data, or they are not of the run's format.
    """
    section, is_own = data_section(tuned, choice)
    seed = tuned.config.train.seed if tuned.config is not None else SEED
    name = tuned.base.tokenizer_name_or_path or tuned.base.model_name_or_path
    with _said_by_options(tuned, own=choice.data is None):
        found = prepare(section, seed, tokenizer, name, progress=progress)
    prepared = found.val if is_own else found.train
    assert prepared is not None
    chosen = sample(len(prepared), choice.max_rows)
    no_answers = _no_answers(section, found)
    defaults, _ = generation_defaults(model_folder(tuned.base))
    ends = ends_of(prepared, chosen, tokenizer, defaults)
    questions, without = ([], {}) if no_answers else _questions(prepared, chosen, section.max_length, ends)
    if not no_answers and not questions:
        no_answers = "no row has an answer within data.max_length"
    tail = template_of(section, found.choice).tail if found.choice.name not in ("chat", "text") else ""
    split = str(section.val_split) if is_own else section.train_split
    is_file = choice.data is not None and choice.split is None and Path(choice.data).expanduser().is_file()
    if is_own and isinstance(section.val_split, float):
        split = f"held out ({section.val_split:g} of {section.train_split})"
    rows = Rows(
        section, found, prepared, chosen, _shown(section), None if is_file else split, is_own, tuple(questions),
        no_answers, without, ends, tail,
    )  # fmt: skip
    return _against_training(tuned, rows)


def _against_training(tuned: TunedModel, rows: Rows) -> Rows:
    """With what is known of them and the rows of the run's training."""
    if tuned.run is None or tuned.config is None:
        return rows
    section = tuned.config.data
    trained = TrainedData.of(tuned.run, section)
    changed = trained.differs_from(rows.prepared) if rows.is_own and rows.section == section else ""
    training = trained.prepared.train if trained.prepared is not None else None
    if rows.is_own and not changed:
        training = rows.prepared_set.train  # in the same format, even with -o
    return replace(
        rows,
        training_rows=rows_in(rows.chosen, rows.prepared, training) if training is not None else None,
        is_training_split=not rows.is_own and is_training_split(rows.section, section),
        changed=changed,
        other_format=_other_format(tuned.run, rows.prepared_set.choice.name),
    )


def _other_format(run: Path, name: str) -> str:
    trained = recorded_format(run)
    if trained is None or trained.name == name:
        return ""
    return (
        f"These are {name} rows, and the run was trained on {trained.name} rows ({trained.why}): "
        "the model is not asked as it was in training."
    )


def sample(rows: int, most: int | None) -> tuple[int, ...]:
    """All rows, or a seeded sample of them without repetition, in their order."""
    if most is None or most >= rows:
        return tuple(range(rows))
    drawn = np.random.default_rng([SEED, rows]).choice(rows, size=most, replace=False)
    return tuple(sorted(drawn.tolist()))


def ends_of(
    prepared: Prepared, chosen: Sequence[int], tokenizer: PreTrainedTokenizerBase, defaults: Sequence[int]
) -> tuple[int, ...]:
    """Tokens that end an answer; the format's are the special tokens that end the answers of these rows."""
    special, by_format = special_ids(tokenizer), set()
    for number in chosen[:_LOOKED_AT]:
        ids, labels = prepared.row(number)
        learnt = np.flatnonzero(labels != IGNORED)
        if len(learnt) and int(ids[learnt[-1]]) in special:
            by_format.add(int(ids[learnt[-1]]))
    return tuple(sorted(answer_ends(tokenizer, defaults, by_format)))


def question(
    number: int, ids: Sequence[int], labels: Sequence[int], ends: Sequence[int], *, may_be_cut: bool
) -> Question | str:
    """The last supervised stretch of a row as a question, or why it is none.

    Args:
        may_be_cut: The row is as long as a row may be, and rows were cut.
    """
    learnt = [label != IGNORED for label in labels]
    if True not in learnt:
        return "no answer"
    end = len(learnt) - learnt[::-1].index(True)
    start = end
    while start and learnt[start - 1]:
        start -= 1
    expected = list(ids[start:end])
    stop = next((place for place, token in enumerate(expected) if token in ends), None)
    if stop is None and may_be_cut and end == len(ids):
        return "answer cut off by data.max_length"
    if start == 0:
        return "no prompt"
    return Question(number, tuple(ids[:start]), tuple(expected[:stop]))


def _questions(
    prepared: Prepared, chosen: Sequence[int], max_length: int, ends: Sequence[int]
) -> tuple[list[Question], dict[str, int]]:
    found: list[Question] = []
    without: dict[str, int] = {}
    for number in chosen:
        ids, labels = (array.tolist() for array in prepared.row(number))
        may_be_cut = bool(prepared.counts.cut) and len(ids) == max_length
        one = question(number, ids, labels, ends, may_be_cut=may_be_cut)
        if isinstance(one, Question):
            found.append(one)
        else:
            without[one] = without.get(one, 0) + 1
    return found, without


def _no_answers(section: DataSection, found: PreparedSet) -> str:
    """Why rows of this kind have no answers to compare with; empty where they have."""
    if found.choice.name == "text":
        return "plain text has no answers"
    if loss_on(section, found.choice) == "all":
        return "every token is supervised (data.train_on: all), so no part of a row is known to be the answer"
    if found.choice.name != "chat" and not section.append_eos:
        return "nothing ends an answer (data.append_eos: false), so the model has not learnt where to stop"
    if (found.val is not None and found.val.counts.split) or found.train.counts.split:
        return "long rows were split (data.long_rows: split), so some parts have no prompt; -o data.long_rows=truncate"
    return ""


def _without_run(tuned: TunedModel, choice: DataChoice) -> DataSection:
    given = _names(choice.overrides)
    missing = [
        *([] if choice.data is not None else ["--data FILE"]),
        *([] if given.intersection(_FORMATS) else ["-o data.prompt_template=… (or -o data.format=chat, text)"]),
        *([] if "data.max_length" in given else ["-o data.max_length=N"]),
    ]
    if missing:
        raise UserInputError(
            f"'{tuned.adapter}' is outside of any run, so how its training rows were formatted is not known.",
            why="Loss and answers mean something only for rows that look like those it was trained on.",
            fix=f"Add {', '.join(missing)}.",
        )
    nowhere = Place("shardtune eval", kind="override")
    fixed = [f"model.model_name_or_path='{tuned.adapter}'", f"data.dataset_name_or_path='{choice.data}'"]
    tree, problems = read_overrides([*fixed, *choice.overrides], {})
    problems = [*problems, *check_fields(replace(tree, place=nowhere)).problems]
    if problems:
        raise ConfigError(problems, "-o")
    return check_fields(tree).config.data


def _names(overrides: Sequence[str]) -> set[str]:
    return {text.partition("=")[0].strip() for text in overrides}


def _sources_with(section: DataSection, split: str) -> list[SourceSection]:
    """Those of a mixture that have the split, each row once: a source's own split and weight are for training."""
    sources = sources_of(section)
    having = [source for source in sources if has_split(source, split, "--split")] or sources[:1]
    return [SourceSection(path=source.path, config_name=source.config_name) for source in having]


def _default_split(section: DataSection) -> str:
    source = Source(str(section.dataset_name_or_path), config_name=section.dataset_config_name)
    for name in _DEFAULT_SPLITS[:-1]:
        if has_split(source, name, "--split"):
            return name
    return _DEFAULT_SPLITS[-1]


@contextmanager
def _said_by_options(tuned: TunedModel, *, own: bool) -> Iterator[None]:
    """What the reading of data says about a config's settings, as one changes them here.

    Args:
        own: The data is what the run's config names.
    """
    try:
        yield
    except UserInputError as error:
        if own and _RELATIVE_IS_MISSING.match(error.what):
            raise UserInputError(
                error.what,
                why="The run's config has a path that is relative to the folder in which it was trained.",
                fix="Start the command in that folder, or give --data with the path.",
            ) from error
        what, why, fix = (_with_options(text) for text in (error.what, error.why, error.fix))
        if own and " was not found" in what:  # a Hub name, or a path of one word
            fix += " If the run's config has a relative path, start the command in the folder in which it was trained."
        if "data." in fix:
            of = f"those of the run {tuned.run.name}" if tuned.run is not None else "given with -o"
            fix += f" (The data settings are {of}; change one with -o, such as -o data.prompt_template=…)"
        raise UserInputError(what, why=why, fix=fix) from error


def _with_options(text: str) -> str:
    for setting, option in (("data.dataset_name_or_path", "--data"), ("data.train_split", "--split")):
        text = text.replace(setting, option)
    return text.replace(" is left to train on", " is left")


def _shown(section: DataSection) -> str:
    named = section.dataset_name_or_path
    if isinstance(named, str):
        return named
    return ", ".join(each if isinstance(each, str) else each.path for each in named)
