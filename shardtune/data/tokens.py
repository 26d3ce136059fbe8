"""Which tokens are seen and which carry loss? Rows become `input_ids` and `labels`; what is left out is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardtune.config.schema import DataSection
from shardtune.data.source import read_split, require_columns
from shardtune.data.template import Template
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that carries no loss, as in torch's cross entropy


@dataclass(frozen=True)
class TokenCounts:
    """What a split holds after tokenising. `tokens` and `supervised` count kept rows only."""

    rows: int
    tokens: int
    supervised: int
    cut: int
    dropped_short: int
    dropped_unsupervised: int
    largest_id: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def tokenise_split(
    section: DataSection, split: str, key: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset, TokenCounts]:
    """A split as `input_ids` and `labels` (equal lengths, at most `max_length`; labels not yet shifted).

    Rows under two tokens predict nothing and are dropped (padded with an end token they would falsify the loss), and
    so are rows whose supervised part was cut off; both are counted.

    Raises:
        UserInputError: a column is missing, or no row is left.
    """
    rows = read_split(section, split, key).with_format(None)
    template = Template.parse(section.prompt_template) if section.prompt_template is not None else None
    columns = template.columns if template else [section.text_field]
    require_columns(rows, columns, "data.prompt_template" if template else "data.text_field", split)
    try:
        encoded = rows.map(
            _encoder(section, template, tokenizer),
            batched=True,
            remove_columns=rows.column_names,
            desc=None,
            load_from_cache_file=False,  # fingerprints of tokenizers are not stable between processes
            keep_in_memory=True,
        )
    except UnicodeDecodeError as error:  # pyarrow takes the bytes of a JSON file unseen
        raise UserInputError(
            f"The split '{split}' of '{section.dataset_name_or_path}' is not UTF-8.",
            why=str(error),
            fix="Save the file as UTF-8 (for example: iconv -f latin1 -t utf-8).",
        ) from error
    status = encoded["status"]
    kept = encoded.filter(lambda batch: [s == "ok" for s in batch], input_columns="status", batched=True)
    counts = TokenCounts(
        rows=len(kept),
        tokens=sum(kept["n_tokens"]),
        supervised=sum(kept["n_supervised"]),
        cut=sum(kept["was_cut"]),
        dropped_short=sum(s == "short" for s in status),
        dropped_unsupervised=sum(s == "unsupervised" for s in status),
        largest_id=max(kept["largest_id"], default=0),
    )
    if not counts.rows:
        raise UserInputError(
            f"No row of the split '{split}' is left to train on ({len(encoded)} were read).",
            why=f"{counts.dropped_short} were empty or a single token, {counts.dropped_unsupervised} had no token that "
            "carries loss within data.max_length.",
            fix="Check data.text_field or data.prompt_template, and data.max_length.",
        )
    return kept.select_columns(["input_ids", "labels"]), counts


def _encoder(
    section: DataSection, template: Template | None, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    completion_only = template is not None and section.train_on in ("auto", "completion")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if completion_only and not tokenizer.is_fast:
        raise UserInputError(
            "This tokenizer cannot tell which tokens belong to the answer.",
            why=f"{type(tokenizer).__name__} does not say which characters a token stands for.",
            fix="Use a folder with tokenizer.json (model.tokenizer_name_or_path), or set data.train_on: all.",
        )
    if section.append_eos and eos is None:
        raise UserInputError(
            "data.append_eos is true, but the tokenizer has no end-of-sequence token.",
            why="The model would never learn to stop.",
            fix="Set eos_token in its tokenizer_config.json, or data.append_eos: false.",
        )

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        prompts, texts = _texts(batch, section, template)
        tokens = tokenizer(texts, return_offsets_mapping=completion_only)
        out: dict[str, list[Any]] = {
            name: [] for name in ("input_ids", "labels", "status", "was_cut", "n_tokens", "n_supervised", "largest_id")
        }
        for index, prompt in enumerate(prompts):
            ids = list(tokens["input_ids"][index])
            # A token belongs to the answer when it ends behind the prompt; one that straddles the seam is learnt.
            ends = [end for _, end in tokens["offset_mapping"][index]] if completion_only else []
            labels = [t if e > len(prompt) else IGNORED for t, e in zip(ids, ends, strict=True)] if ends else list(ids)
            if bos is not None and ids[:2] == [bos, bos]:  # the template wrote it and the tokenizer added it
                ids, labels = ids[1:], labels[1:]
            if section.append_eos and texts[index]:
                # Some tokenizers add it themselves, at no place in the text: it is to be learnt all the same.
                seen = len(ids) - (ids[-1:] == [eos])
                ids, labels = [*ids[:seen], eos], [*labels[:seen], eos]
            _append(out, ids, labels, section.max_length, empty=not texts[index].strip())
        return out

    return encode


def _texts(batch: dict[str, list[Any]], section: DataSection, template: Template | None) -> tuple[list[str], list[str]]:
    columns = template.columns if template else [section.text_field]
    prompts, texts = [], []
    for values in zip(*(batch[column] for column in columns), strict=True):
        _require_text(columns, values)
        if any(value is None for value in values):
            prompts.append("")
            texts.append("")  # counted as an empty row
        elif template is None:
            prompts.append("")
            texts.append(str(values[0]))
        else:
            prompt, completion = template.render(dict(zip(columns, values, strict=True)))
            prompts.append(prompt)
            texts.append(prompt + completion)
    return prompts, texts


def _require_text(columns: list[str], values: tuple[Any, ...]) -> None:
    """A list of messages or a date would be trained on as Python prints it."""
    for column, value in zip(columns, values, strict=True):
        if value is None or isinstance(value, str | int | float):
            continue
        date = hasattr(value, "isoformat")
        raise UserInputError(
            f"The column '{column}' holds values of the type {type(value).__name__}, not text.",
            why=f"The first is {str(value)[:80]}."
            + (" Where all strings of a JSON column look like dates, they are read as dates." if date else ""),
            fix="Store the text as it is to be learnt, in a column of strings (parquet and csv keep dates as written)."
            if date
            else "Name a column of strings in data.text_field or data.prompt_template.",
        )


def _append(out: dict[str, list[Any]], ids: list[int], labels: list[int], limit: int, *, empty: bool) -> None:
    cut = len(ids) > limit
    ids, labels = ids[:limit], labels[:limit]
    # The first token is never predicted, so its label counts for nothing.
    supervised = sum(label != IGNORED for label in labels[1:])
    status = "short" if empty or len(ids) < 2 else "ok" if supervised else "unsupervised"
    out["input_ids"].append(ids)
    out["labels"].append(labels)
    out["status"].append(status)
    out["was_cut"].append(cut)
    out["n_tokens"].append(len(ids))
    out["n_supervised"].append(supervised)
    out["largest_id"].append(max(ids, default=0))
