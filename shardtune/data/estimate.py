"""How many rows and tokens will a run train on? From data prepared before, else estimated from a sample of the files.

Neither transformers nor `datasets` is imported: `shardtune plan` answers before they would be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.data.cache import RENDERING, cache_folder, settings_of
from shardtune.data.concatenate import choose_concatenation
from shardtune.data.file_sample import FileSample, sample_source
from shardtune.data.formats import FormatChoice, RowProblem, choose_format, renderer
from shardtune.data.messages import read_conversation
from shardtune.data.prepare import SET
from shardtune.data.prepared import SCHEMA, Prepared
from shardtune.data.source import Source, UnknownSplit, local_files, location_of, sources_of, unread_data
from shardtune.errors import UserInputError
from shardtune.terminal import count

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardtune.config.schema import DataSection, RunConfig
    from shardtune.data.chunks import Row

_CHARACTERS = 300_000  # that are tokenised, of a sample
_PER_TOKEN = 4.0  # characters, where there is no tokenizer.json
_PER_TURN = 5  # tokens that a chat template puts around a message
_PACKED = 20_000  # rows whose packing is computed; of more, that many of them


@dataclass(frozen=True)
class DataSize:
    """What an epoch trains on.

    Attributes:
        rows: Documents, after the length policy.
        tokens: In them, without padding.
        sequences: Rows of data.max_length that they make when packed.
        validation: Rows that are evaluated on.
        exact: Counted in prepared data.
        how: How that is known, for people.
    """

    rows: int
    tokens: int
    sequences: int
    validation: int
    exact: bool
    how: str

    def fill(self, length: int, *, packed: bool) -> float:
        """Share of the tokens of a row that are real."""
        return min(1.0, self.tokens / max(1, (self.sequences if packed else self.rows) * length))


@dataclass(frozen=True)
class SampledRows:
    """Rows of a sample as they are tokenised, before data.max_length.

    Attributes:
        lengths: In tokens, of rows with text.
        concatenated: Rows are joined and cut into sequences, so that their own lengths do not matter.
        unread: Files that hold such rows, too, but are in no split.
        how: How they were counted, for people.
    """

    choice: FormatChoice
    lengths: tuple[int, ...]
    concatenated: bool
    unread: tuple[str, ...]
    how: str


def sampled_rows(section: DataSection, tokenizer_folder: Path | None) -> SampledRows | None:
    """None for data that only `datasets` can read.

    Raises:
        UserInputError: rows that `train` would refuse.
    """
    tokenizer = _tokenizer(tokenizer_folder)
    sources = sources_of(section)
    samples = [_train_sample(section, source) for source in sources]
    known = [sample for sample in samples if sample is not None and sample.some]
    if len(known) < len(samples):
        return None
    each = [_lengths(section, sample, tokenizer) for sample in known]
    counted = (
        "counted with the model's tokenizer" if tokenizer is not None else f"at {_PER_TOKEN:g} characters per token"
    )
    return SampledRows(
        choice=each[0][0],
        lengths=tuple(length for _, lengths, _ in each for length in lengths.tolist()),
        concatenated=all(joined for _, _, joined in each),
        unread=tuple(
            name
            for source, sample, (choice, *_) in zip(sources, known, each, strict=True)
            for name in unread_data(source, choice.columns, lines=sample.lines)
        ),
        how=f"in a sample of {sum(len(sample.some) for sample in known):,} rows, {counted}",
    )


def data_size(config: RunConfig, tokenizer: Path | None) -> DataSize | None:
    """None where nothing is known: data that only `datasets` can read, and that is not prepared.

    Args:
        tokenizer: The folder with tokenizer.json, if it is on this machine.

    Raises:
        UserInputError: rows that `train` would refuse.
    """
    folder = _prepared_folder(config)
    return counted(folder, config.data) if folder is not None else _estimated(config.data, tokenizer)


def counted(folder: Path, section: DataSection) -> DataSize:
    """Of a prepared set."""
    train = Prepared.open(folder / "train")
    validation = Prepared.open(folder / "val").counts.rows if (folder / "val").is_dir() else 0
    rows, tokens = train.counts.rows, train.counts.tokens
    sequences = _sequences(train.lengths, tokens, section.max_length)
    return DataSize(rows, tokens, sequences, validation, True, f"counted in the prepared data, {folder}")


def _prepared_folder(config: RunConfig) -> Path | None:
    """The set that `train` would find in its cache, as far as that can be told without transformers: made of the same
    files with the same settings, by code that makes the same of them, for a tokenizer of the same name."""
    section = config.data
    sources = sources_of(section)
    given = Path(sources[0].path).expanduser()
    if len(sources) == 1 and (given / SET).is_file():
        return given
    name = config.model.tokenizer_name_or_path or config.model.model_name_or_path
    wanted = {"schema": SCHEMA, "rendering": list(RENDERING), "tokenizer": name, "settings": settings_of(section)}
    inputs = [[location_of(source), source.weight, source.split or section.train_split] for source in sources]
    newest = max((Path(file.name).stat().st_mtime for one in sources for file in local_files(one.path)), default=0.0)
    found = []
    for file in cache_folder(section).glob(f"*/{SET}"):
        about = _read(file)
        had = [[one.get("location"), one.get("weight"), one.get("split")] for one in about.get("sources", ())]
        if inputs == had and all(about.get(key) == value for key, value in wanted.items()):
            found.append((file.stat().st_mtime, file.parent))
    when, folder = max(found, default=(0.0, None))
    return folder if when > newest else None


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # being replaced, or damaged: `train` prepares it again
        return {}
    return content if isinstance(content, dict) else {}


def _estimated(section: DataSection, tokenizer_folder: Path | None) -> DataSize | None:
    tokenizer = _tokenizer(tokenizer_folder)
    found: list[tuple[DataSize, int]] = []
    for source in sources_of(section):
        sample = _train_sample(section, source)
        if sample is None or not sample.some:
            return None
        size, looked_at = _of_source(section, sample, tokenizer)
        found.append((_scaled(size, source.weight), looked_at))
    whole = replace(
        found[0][0],
        rows=sum(size.rows for size, _ in found),
        tokens=sum(size.tokens for size, _ in found),
        sequences=sum(size.sequences for size, _ in found),
    )
    per_token = "" if tokenizer is not None else f", at {_PER_TOKEN:g} characters per token (no tokenizer.json)"
    how = f"estimated from {count(sum(looked_at for _, looked_at in found), 'row')}{per_token}"
    return _with_validation(section, replace(whole, how=how))


def _with_validation(section: DataSection, size: DataSize) -> DataSize:
    if isinstance(section.val_split, float):
        return replace(_scaled(size, 1 - section.val_split), validation=round(size.rows * section.val_split))
    if section.val_split is None:
        return size
    rows, missing, sources = 0, [], sources_of(section)
    for source in sources:
        try:
            sample = sample_source(source, section.val_split, "data.val_split")
        except UnknownSplit as error:
            missing.append(error)
        else:
            rows += sample.rows if sample is not None else 0
    if len(missing) == len(sources):  # of a mixture, some sources may lack it
        raise missing[0]
    return replace(size, validation=rows)


def _train_sample(section: DataSection, source: Source) -> FileSample | None:
    return sample_source(source, source.split or section.train_split, "data.train_split")


def _scaled(size: DataSize, share: float) -> DataSize:
    parts = {name: max(1, round(getattr(size, name) * share)) for name in ("rows", "tokens", "sequences")}
    return replace(size, **parts)


def _of_source(section: DataSection, sample: FileSample, tokenizer: Tokenizer | None) -> tuple[DataSize, int]:
    """The size of a source, and how many of its rows were looked at."""
    import numpy as np

    _, lengths, concatenated = _lengths(section, sample, tokenizer)
    if not len(lengths):
        return DataSize(0, 0, 0, 0, False, ""), len(sample.some)
    of_all = sample.rows / len(sample.some)
    if concatenated:
        tokens = round(of_all * int(lengths.sum()))
        rows = max(1, -(-tokens // section.max_length))
        return DataSize(rows, tokens, rows, 0, False, ""), len(sample.some)
    kept = np.array(list(_kept(lengths.tolist(), section)) or [2])
    tokens = round(of_all * int(kept.sum()))
    sequences = _sequences(
        np.resize(kept, round(of_all * len(kept))) if of_all < 2 else kept, tokens, section.max_length
    )
    return DataSize(round(of_all * len(kept)), tokens, sequences, 0, False, ""), len(sample.some)


def _lengths(section: DataSection, sample: FileSample, tokenizer: Tokenizer | None) -> tuple[FormatChoice, Any, bool]:
    """The format, the length of each sampled row with text, and whether rows are joined."""
    import numpy as np

    columns = list(dict.fromkeys(name for row in sample.some for name in row))
    choice = choose_format(section, columns, sample.some)
    texts, added = _texts(section, choice, sample.some)
    per_token, edges = _tokens(section, choice, texts, tokenizer)
    lengths = np.array([round(len(text) / per_token) + more + edges for text, more in zip(texts, added, strict=True)])
    raw = [str(row.get(choice.columns[0]) or "") for row in sample.some]
    return choice, lengths, choose_concatenation(section, choice, raw, from_text_file=sample.lines) != "no"


def _kept(lengths: Sequence[int], section: DataSection) -> Iterator[int]:
    """Of each row, what `data.long_rows` leaves."""
    limit = section.max_length
    for length in lengths:
        if length <= limit or section.long_rows == "truncate":
            yield min(length, limit)
        elif section.long_rows == "split":
            yield from (min(limit, length - start) for start in range(0, length, limit))


def _texts(section: DataSection, choice: FormatChoice, rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    """The text of each row that has one, and the tokens that a chat template adds to it."""
    texts, added = [], []
    render = None if choice.name == "chat" else renderer(section, choice, None)  # type: ignore[arg-type]  # chat's alone
    for row in rows:
        whole = {**dict.fromkeys(choice.columns), **row}
        try:
            rendered, turns = _conversation(choice, whole) if render is None else (render(whole).text, 0)
        except RowProblem:
            continue
        if rendered.strip():
            texts.append(rendered)
            added.append(turns * _PER_TURN)
    return texts, added


def _conversation(choice: FormatChoice, row: Row) -> tuple[str, int]:
    pair = choice.columns[0] == "prompt"
    spoken = read_conversation(
        row[choice.columns[pair]],
        system=row.get("system"),
        tools=row.get("tools"),
        prompt=row["prompt"] if pair else None,
    )
    parts = [message.get("content", "") for message in spoken.messages]
    others = [{k: v for k, v in message.items() if k not in ("role", "content")} for message in spoken.messages]
    extra = [json.dumps(other) for other in (*others, spoken.tools) if other]
    texts = [part if isinstance(part, str) else json.dumps(part) for part in parts]
    return "\n".join([*texts, *extra]), len(parts)


def _tokenizer(folder: Path | None) -> Tokenizer | None:
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise UserInputError(
            f"'{folder / 'tokenizer.json'}' cannot be read.", why=str(error)[:200], fix="Copy the model again."
        ) from error


def _tokens(
    section: DataSection, choice: FormatChoice, texts: Sequence[str], tokenizer: Tokenizer | None
) -> tuple[float, int]:
    """Characters per token, and the tokens around a row."""
    end = int(section.append_eos and choice.name != "chat")
    if tokenizer is None:
        return _PER_TOKEN, end
    some, characters = [], 0
    for text in texts:
        some.append(text[: _CHARACTERS - characters])
        characters += len(some[-1])
        if characters >= _CHARACTERS:
            break
    tokens = sum(len(one) for one in tokenizer.encode_batch(some, add_special_tokens=False))
    around = 0 if choice.name == "chat" else len(tokenizer.encode(""))
    return characters / max(1, tokens), around + (end if around < 2 else 0)  # of two, one is the end


def _sequences(lengths: Any, tokens: int, capacity: int) -> int:
    """How many sequences the rows are packed into."""
    from shardtune.data.packing import pack

    some = lengths[:: -(-len(lengths) // _PACKED)]
    packed = pack(some, capacity)
    return (
        len(packed)
        if len(some) == len(lengths) and int(lengths.sum()) == tokens
        else max(1, round(tokens / (packed.efficiency(some, capacity) * capacity)))
    )
