"""From the config to a prepared set: read → format → tokenise → mask → length policy, once, with all cores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardtune import __version__
from shardtune.data.cache import RENDERING, cache_folder, fingerprint, prepared_once, settings_of, tokenizer_identity
from shardtune.data.chunks import Chunk, Row, count_rows, location
from shardtune.data.concatenate import Concatenation, choose_concatenation, concatenation_note, document_edges
from shardtune.data.formats import FormatChoice, RowProblem, choose_format, renderer, space_before_answer
from shardtune.data.output import Document, Output, taken_rows
from shardtune.data.prepared import SCHEMA, Prepared, PreparedWriter
from shardtune.data.source import (
    FileSplit,
    Split,
    bad_row_error,
    has_split,
    location_of,
    open_split,
    sources_of,
    unread_data,
)
from shardtune.data.stages import Recipe, Result, Side, end_ids
from shardtune.data.tokens import Encoder
from shardtune.data.workers import Task, process_in_order
from shardtune.errors import UserInputError
from shardtune.machine import usable_cores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardtune.config.schema import DataSection

SET = "set.json"
_SAMPLE = 200  # rows read to choose a format
_FEW_ROWS = 2000  # below this, starting workers takes longer than the work
_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True)
class ProgressInfo:
    """How far the preparation is."""

    step: Literal["checking", "waiting", "train", "val"]  # waiting: another process prepares the same set
    rows: int = 0  # read
    tokens: int = 0  # written
    share: float = 0.0  # of what there is to read, from 0 to 1
    seconds: float = 0.0  # since the step began

    @property
    def seconds_left(self) -> float | None:
        return self.seconds * (1 - self.share) / self.share if self.share > 0 else None


Progress = Callable[[ProgressInfo], None]


@dataclass(frozen=True)
class PreparedSet:
    """All that a run trains and evaluates on."""

    train: Prepared
    val: Prepared | None
    choice: FormatChoice  # of the first source; `about["sources"]` has each
    folder: Path
    from_cache: bool
    overlap: int  # validation rows whose tokens are also in train
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, *, from_cache: bool = True) -> PreparedSet:
        """A set on disk. Raises UserInputError when it is not whole, or of another version."""
        try:
            about = json.loads((folder / SET).read_text(encoding="utf-8"))
            choice = FormatChoice(about["choice"]["name"], about["choice"]["why"], tuple(about["choice"]["columns"]))
            overlap, has_val = int(about["overlap"]), bool(about["has_val"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserInputError(
                f"'{folder}' is not a complete prepared dataset.",
                why=f"{SET}: {type(error).__name__}: {error}",
                fix="Copy all of its files again, or prepare it again: shardtune data prepare CONFIG",
            ) from error
        val = Prepared.open(folder / "val") if has_val else None
        return cls(Prepared.open(folder / "train"), val, choice, folder, from_cache, overlap, about)

    def with_sources(self, choices: Sequence[FormatChoice], unread: Sequence[Sequence[str]]) -> PreparedSet:
        """With what is said about the sources now: files that are not read may have come since it was prepared."""
        sources = [
            {**old, "format": asdict(choice), "unread": files}
            for old, choice, files in zip(self.about["sources"], choices, unread, strict=True)
        ]
        return replace(self, choice=choices[0], about={**self.about, "sources": sources})


def prepare(
    section: DataSection,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_name: str,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> PreparedSet:
    """The prepared set of a config, from the cache or made now.

    `data.dataset_name_or_path` may also be a prepared set itself (a folder with set.json), for machines that have
    neither the data nor a network.

    Args:
        seed: Draws the rows of sources with a weight that is not whole.
        tokenizer_name: For the manifest, so that a person knows it.
        workers: Processes to use; None = one per core, and none for small data.
        progress: Called about twice a second.

    Raises:
        UserInputError: the data cannot be read, or no row is left.
    """
    report = progress or (lambda info: None)
    given = _given_set(section, tokenizer)
    if given is not None:
        return given
    report(ProgressInfo("checking"))
    train, val = _open_splits(section)
    samples = [split.sample(_SAMPLE) for split in train]
    choices = [_choose(section, tokenizer, *each) for each in zip(train, samples, strict=True)]
    _refuse_unused_template(section, choices)
    splits = [*(("train", s) for s in train), *(("val", s) for s in val)]
    key = fingerprint(section, seed, splits, choices, tokenizer)
    folder = cache_folder(section) / key
    about = {
        "shardtune": __version__,
        "rendering": list(RENDERING),
        "fingerprint": key,
        "tokenizer": tokenizer_name,
        "tokenizer_identity": tokenizer_identity(tokenizer),
        "settings": settings_of(section),
    }
    job = _Job(section, seed, tokenizer, train, val, samples, choices, about, workers, report)
    from_cache = prepared_once(folder, job.fill, _is_whole, lambda: report(ProgressInfo("waiting")))
    own = [split for split in (*train, *val) if isinstance(split, FileSplit)]
    read = {Path(file.name).resolve() for split in own for file in split.files}
    unread = [
        [
            name
            for name in unread_data(split.source, choice.columns, lines=_is_lines(split))
            if Path(name).resolve() not in read
        ]
        for split, choice in zip(train, choices, strict=True)
    ]
    return PreparedSet.open(folder, from_cache=from_cache).with_sources(choices, unread)


def sample_rows(section: DataSection, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Token ids of the first rows that validation reads, or training where it has no split of its own.

    Only the beginning of the data is read, and nothing is cached.

    Raises:
        UserInputError: the data cannot be read.
    """
    given = _given_set(section, tokenizer)
    if given is not None:
        rows = given.val if given.val is not None else given.train
        return [rows.row(number)[0].tolist() for number in range(min(count, len(rows)))]
    train, val = _open_splits(section)
    split = (val or train)[0]
    sample = split.sample(_SAMPLE)
    choice = choose_format(section, list(dict.fromkeys(name for row in sample for name in row)), sample)
    render, encoder = renderer(section, choice, tokenizer), Encoder(section, tokenizer, choice)
    rendered = []
    for row in sample:
        with suppress(RowProblem):  # training skips it, or has stopped at it
            rendered.append(render({**dict.fromkeys(choice.columns), **row}))
    encoded = encoder.encode([one for one in rendered if one.text.strip()][:count])
    return [one.ids for one in encoded]


def _is_whole(folder: Path) -> bool:
    if not (folder / SET).is_file():
        return False
    try:
        PreparedSet.open(folder)
    except UserInputError:
        return False
    return True


def _given_set(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> PreparedSet | None:
    """The prepared set that `data.dataset_name_or_path` names, if it names one."""
    sources = sources_of(section)
    folder = Path(sources[0].path).expanduser()
    if len(sources) != 1 or not (folder / SET).is_file():
        return None
    found = PreparedSet.open(folder)
    if found.about.get("tokenizer_identity") != tokenizer_identity(tokenizer):
        raise UserInputError(
            f"'{folder}' was prepared with another tokenizer.",
            why=f"It was prepared with {found.about.get('tokenizer')}; its token ids mean other tokens here.",
            fix="Use the same tokenizer (model.tokenizer_name_or_path), or prepare the data again.",
        )
    wanted, has = settings_of(section), found.about.get("settings", {})
    differ = sorted(name for name in wanted if wanted[name] != has.get(name))
    if differ:
        changed = ", ".join(
            f"{name} {json.dumps(has.get(name))} there and {json.dumps(wanted[name])} here" for name in differ
        )
        raise UserInputError(
            f"'{folder}' was prepared with other settings.",
            why=f"Under data: {changed}.",
            fix="Use the settings it was prepared with, or prepare the data again.",
        )
    return found


def _open_splits(section: DataSection) -> tuple[list[Split], list[Split]]:
    sources = sources_of(section)
    train = [open_split(source, source.split or section.train_split, "data.train_split") for source in sources]
    name = section.val_split
    if not isinstance(name, str):
        return train, []
    having = (
        [source for source in sources if has_split(source, name, "data.val_split")] if len(sources) > 1 else sources
    )
    # Where no source has it, the first says so.
    return train, [open_split(source, name, "data.val_split") for source in having or sources[:1]]


def _choose(section: DataSection, tokenizer: PreTrainedTokenizerBase, split: Split, sample: list[Row]) -> FormatChoice:
    """What the rows of a source are, and what one should know about how they are read."""
    choice = choose_format(section, list(dict.fromkeys(name for row in sample for name in row)), sample)
    joining = _joining(section, split, sample, choice)
    notes = [*split.notes(), space_before_answer(section, choice, sample, tokenizer), concatenation_note(joining)]
    return replace(choice, why="; ".join([choice.why, *filter(None, notes)]))


def _joining(section: DataSection, split: Split, sample: list[Row], choice: FormatChoice) -> Concatenation:
    texts = [str(row.get(choice.columns[0]) or "") for row in sample]
    return choose_concatenation(section, choice, texts, from_text_file=_is_lines(split))


def _is_lines(split: Split) -> bool:
    return isinstance(split, FileSplit) and all(file.kind == "text" for file in split.files)


def _refuse_unused_template(section: DataSection, choices: Sequence[FormatChoice]) -> None:
    if section.chat_template is not None and all(choice.name != "chat" for choice in choices):
        raise UserInputError(
            f"data.chat_template is set, but the data format is {choices[0].name}.",
            why=f"It renders conversations only. The format was chosen by: {choices[0].why}.",
            fix="Remove data.chat_template, or set data.format: chat and data.messages_field.",
        )


@dataclass
class _Job:
    """One preparation, from open splits to a filled folder."""

    section: DataSection
    seed: int
    tokenizer: PreTrainedTokenizerBase
    train: list[Split]
    val: list[Split]
    samples: list[list[Row]]  # the first rows of each split in `train`
    choices: list[FormatChoice]  # what they are
    about: dict[str, Any]
    workers: int | None
    report: Progress

    def fill(self, folder: Path) -> None:
        share = self.section.val_split if isinstance(self.section.val_split, float) else 0.0
        recipes = [self._recipe(*each, share) for each in zip(self.train, self.samples, self.choices, strict=True)]
        sides: list[Side] = ["train", "val"] if share or self.val else ["train"]
        output = Output({side: PreparedWriter(folder / side) for side in sides})
        marks = self._pass(self.train, recipes, output, "train")
        if self.val:
            self._pass(self.val, self._val_recipes(), output, "val")
        for side in sides:
            self._refuse_empty(side, output)
        weights = [split.source.weight for split in self.train]
        taken = taken_rows(marks, weights, self.seed) if any(weight != 1 for weight in weights) else None
        joined = any(recipe.joining != "no" for recipe in recipes)
        about = {**self.about, "append_eos": self.section.append_eos, "concatenate": joined}
        hashes = {side: writer.hashes() for side, writer in output.writers.items()}
        for side, writer in output.writers.items():
            extra = {"side": side, "uncut_p95": output.uncut_p95(side), **about}
            writer.close(output.counts(side), taken if side == "train" else None, extra)
        overlap = int(np.isin(hashes["val"], hashes["train"]).sum()) if "val" in hashes else 0
        self._write_set(folder, recipes, overlap)

    def _val_recipes(self) -> list[Recipe]:
        """Validation rows are what the training rows of the same source are."""
        known = {split.source: choice for split, choice in zip(self.train, self.choices, strict=True)}
        return [
            replace(self._recipe(split, split.sample(_SAMPLE), known[split.source], 0.0), side="val")
            for split in self.val
        ]

    def _recipe(self, split: Split, sample: list[Row], choice: FormatChoice, share: float) -> Recipe:
        section = self.section
        return Recipe(
            render=renderer(section, choice, self.tokenizer),
            encoder=Encoder(section, self.tokenizer, choice),
            tokenizer=self.tokenizer,
            columns=choice.columns,
            joining=_joining(section, split, sample, choice),
            max_length=section.max_length,
            long_rows=section.long_rows,
            ends=end_ids(self.tokenizer),
            held_out=share,
        )

    def _pass(self, splits: Sequence[Split], recipes: Sequence[Recipe], output: Output, step: Side) -> list[int]:
        """Read and write all splits; rows of the training side before each of them, and after the last."""
        marks: list[int] = []
        totals = [max(split.total, 1) for split in splits]
        reported, began = 0.0, time.monotonic()
        document: Document | None = None
        results = process_in_order(recipes, _tasks(splits), self._worker_count(splits))
        for number, chunk, result in results:
            if number == len(marks):  # the first of a source
                output.finish(document)
                marks.append(output.rows("train"))
                document = self._document(recipes[number])
            self._take_problems(chunk, result, output, recipes[number].side)
            output.take(chunk, result, document)
            if (now := time.monotonic()) - reported > _PROGRESS_SECONDS:
                reported = now
                share = min((number + chunk.position / totals[number]) / len(totals), 1.0)
                self.report(ProgressInfo(step, output.read(step), output.tokens(step), share, now - began))
        output.finish(document)
        self.report(ProgressInfo(step, output.read(step), output.tokens(step), 1.0, time.monotonic() - began))
        return [*marks, output.rows("train")]

    def _document(self, recipe: Recipe) -> Document | None:
        return Document(recipe, *document_edges(self.section, self.tokenizer)) if recipe.joining != "no" else None

    def _take_problems(self, chunk: Chunk, result: Result, output: Output, side: Side) -> None:
        for number, bad in result.problems:
            if self.section.on_error == "stop":
                raise bad_row_error(chunk, number, bad)
            output.skip(side, f"{location(chunk, number)}: {bad.message}")

    def _worker_count(self, splits: Sequence[Split]) -> int:
        if self.workers is not None:
            return self.workers
        return 1 if _few_rows(splits) else usable_cores()

    def _refuse_empty(self, side: Side, output: Output) -> None:
        if output.rows(side):
            return
        counts = output.counts(side)
        share = self.section.val_split
        if isinstance(share, float) and output.rows("val" if side == "train" else "train"):
            raise UserInputError(
                f"data.val_split: {share} leaves no row for {'validation' if side == 'val' else 'training'}.",
                why=f"{output.read('train') + output.read('val')} rows were read; a hash of its content assigns each.",
                fix="Choose another share, or name a separate split.",
            )
        split = self.section.train_split if side == "train" else self.section.val_split
        skipped = counts["skipped_errors"]
        reasons = {
            "were empty or a single token": counts["dropped_short"],
            "had no supervised assistant turn": counts["without_assistant"],
            "had no supervised token within data.max_length": counts["dropped_unsupervised"]
            - counts["without_assistant"],
            "were longer than data.max_length": counts["dropped_long"],
            f"could not be used (the first: {(*counts['errors'], '')[0]})": skipped,
        }
        raise UserInputError(
            f"No row of the split '{split}' is left to train on ({counts['read']} were read).",
            why="; ".join(f"{number} {what}" for what, number in reasons.items() if number) + ".",
            fix="Fix these rows; data.on_error: skip needs at least one that can be used."
            if skipped == counts["read"]
            else _advice(self.choices[0], counts, self.samples[0] if side == "train" else ()),
        )

    def _write_set(self, folder: Path, recipes: Sequence[Recipe], overlap: int) -> None:
        sources = [
            {
                **asdict(split.source),
                "location": location_of(split.source),
                "split": split.name,
                "format": asdict(choice),
                "joining": recipe.joining,
            }
            for split, choice, recipe in zip(self.train, self.choices, recipes, strict=True)
        ]
        content = {
            "schema": SCHEMA,
            **self.about,
            "choice": asdict(self.choices[0]),
            "overlap": overlap,
            "has_val": bool(self.val) or isinstance(self.section.val_split, float),
            "sources": sources,
            "val_sources": [{"path": split.source.path, "split": split.name} for split in self.val],
        }
        (folder / SET).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _advice(choice: FormatChoice, counts: Mapping[str, Any], sample: Sequence[Row]) -> str:
    if any(remark.kind == "lost tool calls" for remark in counts["remarks"]):
        return "Set data.chat_template to one that renders tool_calls; this one omits them."
    if counts["without_assistant"]:
        from shardtune.data.messages import roles

        found = roles(row.get(choice.columns[choice.columns[0] == "prompt"]) for row in sample)
        return (
            "Give each conversation a non-empty turn with the role assistant (ShareGPT format: gpt), or set "
            "data.train_on: all to train on every turn."
            + (f" The roles in the data are: {', '.join(found)}." if found else "")
        )
    if counts["dropped_unsupervised"] or counts["dropped_long"]:
        return "Raise data.max_length: prompts fill it, or rows exceed it."
    named = {"text": "data.text_field", "prompt": "data.prompt_template", "chat": "data.messages_field"}
    where = named.get(choice.name, "data.format")
    return f"Check the columns that are read ({', '.join(choice.columns)}), or set others in {where}."


def _tasks(splits: Sequence[Split]) -> Iterator[Task]:
    for number, split in enumerate(splits):
        for chunk in split.chunks():
            yield number, chunk


def _few_rows(splits: Sequence[Split]) -> bool:
    """By what a few rows take up of the whole."""
    rows = 0.0
    for split in splits:
        first = next(iter(split.chunks()), None)
        if first is not None and first.position:
            rows += count_rows(first) * split.total / first.position
    return rows < _FEW_ROWS
