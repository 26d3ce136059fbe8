"""What in the data would harm training? Errors and warnings, reported before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardtune.config.suggestions import nearest
from shardtune.data.histogram import share
from shardtune.data.inspect import NAMES, stored_rows
from shardtune.data.messages import KNOWN_ROLES
from shardtune.data.show_rows import evenly_spaced, visible
from shardtune.data.source import some_of
from shardtune.errors import UserInputError
from shardtune.terminal import count

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from shardtune.data.prepare import PreparedSet
    from shardtune.data.prepared import CountedRemark, Prepared, PreparedCounts

_MANY = 0.2  # of the rows: repeated, or cut
_SOME_EMPTY = 0.01  # of the rows: a few blank ones are common; more suggests that the wrong column is read
_LEAKED = 0.5  # of the validation rows: then validation measures memory
_CHECKED = 2000  # rows whose beginning is read: a second begin token comes from the template, so in all rows or none
_PLACES = 3


@dataclass(frozen=True)
class Finding:
    """A problem in the data. An error stops the run before training."""

    level: Literal["error", "warning"]
    what: str
    why: str
    fix: str


def enforce(findings: list[Finding]) -> list[Finding]:
    """Raise one error with all problems of level error; otherwise return the warnings."""
    errors = [finding for finding in findings if finding.level == "error"]
    if len(errors) == 1:
        raise UserInputError(errors[0].what, why=errors[0].why, fix=errors[0].fix)
    if errors:
        reasons = "".join(f"\n- {f.what}\n    why: {f.why}\n    fix: {f.fix}" for f in errors)
        raise UserInputError(f"The data cannot be trained on, for {len(errors)} reasons:{reasons}")
    return [finding for finding in findings if finding.level == "warning"]


@dataclass(frozen=True)
class ModelLimits:
    """The model's limits; None where unknown, and then not checked.

    Attributes:
        vocabulary: Rows of its embedding.
        positions: Longest row it was trained for.
    """

    vocabulary: int | None
    positions: int | None = None


def model_positions(config: PretrainedConfig) -> int | None:
    """The longest row a model was made for, by its config: `max_position_embeddings`, or what rope scaling makes of it.

    A scaled rope says from which length (`original_max_position_embeddings`) it was stretched, and by which factor.
    """
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated <= 0:
        return None
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    each = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]  # one for all layers, or per kind
    scaled = [
        int((rope.get("original_max_position_embeddings") or stated) * rope["factor"])
        for rope in each
        if isinstance(rope.get("factor"), int | float)
    ]
    return max([stated, *scaled])


def refusals_and_warnings(
    prepared_set: PreparedSet,
    tokenizer: PreTrainedTokenizerBase,
    limits: ModelLimits,
    new_tokens: Mapping[str, int] | None = None,
) -> list[Finding]:
    """All that is wrong with a prepared set, errors first.

    Args:
        new_tokens: Ids of the tokens of `model.new_tokens`, by their text.
    """
    vocabulary = limits.vocabulary
    if new_tokens and vocabulary is not None:
        vocabulary = max(vocabulary, max(new_tokens.values()) + 1)
    found = list(_unread(prepared_set))
    for name, prepared in (("train", prepared_set.train), ("val", prepared_set.val)):
        if prepared is not None:
            found += _unsupervised(prepared.counts, name)
            found += _unknown_tokens(prepared.counts, name, vocabulary)
            found += _double_begin(prepared, name, tokenizer)
            found += _skipped(prepared.counts, name)
            found += _empty(prepared_set, prepared.counts, name)
            found += _remarked(prepared.counts, name)
    found += _no_end(prepared_set)
    found += _leaked(prepared_set)
    found += _repeated(prepared_set.train)
    found += _cut(prepared_set.train)
    found += _beyond_positions(prepared_set, limits.positions)
    found += _never_seen(prepared_set.train, new_tokens or {})
    return sorted(found, key=lambda finding: finding.level)  # "error" < "warning"; otherwise as found


def _unread(prepared_set: PreparedSet) -> Iterator[Finding]:
    sources = prepared_set.about.get("sources", ())
    files = list(dict.fromkeys(file for source in sources for file in source.get("unread", ())))
    if files:
        yield Finding(
            "warning",
            f"{count(len(files), 'file')} with the columns of the data {'is' if len(files) == 1 else 'are'} not read: "
            f"{some_of(files)}.",
            "Of a folder, only files of the most frequent format are read and, where some files are named after a "
            "split (train, validation, test), only these.",
            "Convert or rename the files, list them in data.dataset_name_or_path, or remove them.",
        )


def _unsupervised(counts: PreparedCounts, name: str) -> Iterator[Finding]:
    if not counts.supervised:
        yield Finding(
            "error",
            f"No {NAMES[name]} row has a supervised token.",
            f"{counts.read:,} rows were read; {counts.dropped_unsupervised:,} had no supervised token within "
            f"max_length, {counts.dropped_short:,} were empty.",
            "Check data.train_on, data.format and the template; raise data.max_length if prompts fill it.",
        )
        return
    if counts.without_assistant:
        yield Finding(
            "warning",
            f"{_rows(counts.without_assistant, name)} dropped: no supervised assistant turn.",
            "A conversation without an assistant turn has nothing to train on.",
            "Check the roles in these rows, or set data.train_on: all to train on every turn.",
        )
    if counts.dropped_unsupervised > counts.without_assistant:
        yield Finding(
            "warning",
            f"{_rows(counts.dropped_unsupervised - counts.without_assistant, name)} dropped: no supervised token.",
            "They have no answer, or the prompt alone fills max_length.",
            "Check these rows, or raise data.max_length.",
        )


def _unknown_tokens(counts: PreparedCounts, name: str, vocabulary: int | None) -> Iterator[Finding]:
    if vocabulary is not None and counts.largest_id >= vocabulary:
        yield Finding(
            "error",
            f"The {NAMES[name]} data contains token id {counts.largest_id}, but the model has only {vocabulary} "
            "embeddings.",
            "The tokenizer does not belong to this model, or tokens were added to it.",
            "Set model.tokenizer_name_or_path to the model's own tokenizer; list tokens the model should learn in "
            "model.new_tokens.",
        )


def _double_begin(prepared: Prepared, name: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    begin = tokenizer.bos_token_id
    if begin is None:
        return
    checked = evenly_spaced(len(prepared), _CHECKED)
    twice = [number for number in checked if prepared.row(number)[0][:2].tolist() == [begin, begin]]
    if twice:
        yield Finding(
            "error",
            f"{len(twice):,} of {len(checked):,} {NAMES[name]} rows checked begin with {tokenizer.bos_token} twice.",
            f"The data or the template contains it and the tokenizer adds another (first in row {twice[0]}). The model "
            "was not pretrained on that.",
            f"Remove {tokenizer.bos_token} from the data, data.prompt_template or data.chat_template.",
        )


def _skipped(counts: PreparedCounts, name: str) -> Iterator[Finding]:
    if counts.skipped_errors:
        yield Finding(
            "warning",
            f"{_rows(counts.skipped_errors, name)} skipped as unreadable (data.on_error: skip).",
            "The first: " + "; ".join(visible(" ".join(place.split())) for place in counts.errors[:_PLACES]),
            "Fix them, or set data.on_error: stop to stop at the first one.",
        )


def _empty(prepared_set: PreparedSet, counts: PreparedCounts, name: str) -> Iterator[Finding]:
    empty = empty_rows(counts)
    if empty is not None:
        yield Finding(
            "warning",
            f"{_rows(empty.rows, name)} ({share(empty.rows, counts.read)}) dropped as empty.",
            empty_why(prepared_set, empty),
            "Check the column's name and content in these rows, or remove the rows.",
        )


def empty_rows(counts: PreparedCounts) -> CountedRemark | None:
    """Rows dropped as empty, where they are more than the few blank ones that are common."""
    empty = next((remark for remark in counts.remarks if remark.kind == "empty row"), None)
    return empty if empty is not None and empty.rows > _SOME_EMPTY * counts.read else None


def empty_why(prepared_set: PreparedSet, empty: CountedRemark) -> str:
    choice = prepared_set.choice
    column = f"The column '{choice.columns[-1 if choice.name.startswith('prompt') else 0]}'"
    if len(prepared_set.about.get("sources", ())) > 1:
        column = "The text, answer or conversation column"
    return f"{column} is missing, null or blank; first in {visible(empty.first)}."


def _remarked(counts: PreparedCounts, name: str) -> Iterator[Finding]:
    for remark in counts.remarks:
        rows, first = _rows(remark.rows, name), f"First in {visible(remark.first)}."
        if remark.kind == "empty turn":
            yield Finding(
                "warning",
                f"{rows} with an assistant turn that renders to nothing.",
                "Its content is null or empty (or the template drops it). Training on it would teach the model to "
                f"answer nothing, so it is not supervised unless data.train_on is all. {first}",
                "Check these turns, or remove them.",
            )
        elif remark.kind == "lost tool calls":
            yield Finding(
                "warning",
                f"{rows} with tool calls that the chat template does not render.",
                "The model does not learn to call these tools; a turn that has only tool calls is not supervised. "
                f"{first}",
                "Set data.chat_template to one that renders tool_calls, or write the calls into the content.",
            )
        elif remark.kind == "unknown role":
            meant = nearest(remark.detail, KNOWN_ROLES)
            yield Finding(
                "warning",
                f"{rows} with a message of the unknown role '{visible(remark.detail)}'.",
                f"It may be rendered, but is not supervised unless data.train_on is all. {first}",
                f"Did you mean '{meant}'?" if meant else f"The known roles are {', '.join(KNOWN_ROLES)}.",
            )


def _no_end(prepared_set: PreparedSet) -> Iterator[Finding]:
    counts = prepared_set.train.counts
    if not counts.supervised or not counts.without_eos:
        return
    meant = prepared_set.choice.name == "text" or not _setting(prepared_set.train, "append_eos", True)
    if counts.without_eos >= counts.rows:
        yield Finding(
            "warning" if meant else "error",
            "No training row has a supervised end-of-sequence token.",
            "The model never learns to stop generating.",
            "Set data.append_eos: true; for chat, check that the template ends the assistant's turn with the "
            "tokenizer's end token; raise data.max_length if rows are truncated.",
        )
    elif not _setting(prepared_set.train, "concatenate", False):  # a stretch of a corpus may hold no end
        lost = counts.cut + counts.split
        yield Finding(
            "warning",
            f"{_rows(counts.without_eos, 'train')} ({share(counts.without_eos, counts.rows)}) without a supervised "
            "end-of-sequence token.",
            f"{count(lost, 'row')} truncated or split at data.max_length, which removes the end."
            if lost
            else "Their text ends without one.",
            "Raise data.max_length." if lost else "Set data.append_eos: true, or check the end of these rows.",
        )


def _leaked(prepared_set: PreparedSet) -> Iterator[Finding]:
    if prepared_set.val is None or not prepared_set.overlap:
        return
    rows, leaked = prepared_set.val.counts.rows, prepared_set.overlap
    held_out = isinstance(prepared_set.about.get("settings", {}).get("val_split"), float)
    yield Finding(
        "error" if leaked > _LEAKED * rows else "warning",
        f"{leaked:,} of {rows:,} validation rows are also in the training data ({share(leaked, rows)}).",
        "The validation loss then measures memorisation, and falls even while the model gets worse on new text.",
        "Raise data.max_length: these rows differ only in what is truncated, or in columns that are not read."
        if held_out
        else "Remove them from one of the two splits, or hold out a share of the training rows instead "
        "(data.val_split: 0.05): rows with the same content then stay on one side.",
    )


def _repeated(prepared: Prepared) -> Iterator[Finding]:
    repeated, stored = prepared.counts.duplicates, stored_rows(prepared)
    if repeated > _MANY * stored:
        yield Finding(
            "warning",
            f"{_rows(repeated, 'train')} ({share(repeated, stored)}) identical to an earlier row.",
            "Duplicated rows weigh more in training and are memorised.",
            "Remove the duplicates, unless they are meant as a weight.",
        )


def _cut(prepared: Prepared) -> Iterator[Finding]:
    cut, stored = prepared.counts.cut, stored_rows(prepared)
    if cut > _MANY * stored:
        p95 = prepared.manifest.get("uncut_p95")  # of the rows' lengths before they were cut
        enough = f"Set data.max_length: {p95}, which fits 95 % of the rows" if p95 else "Raise data.max_length"
        yield Finding(
            "warning",
            f"{_rows(cut, 'train')} ({share(cut, stored)}) truncated at data.max_length.",
            f"Their ends are not trained on, nor where to stop: only {share(stored - cut, stored)} of the rows fit.",
            f"{enough}, or set data.long_rows: split or drop.",
        )


def _beyond_positions(prepared_set: PreparedSet, positions: int | None) -> Iterator[Finding]:
    max_length = prepared_set.about.get("settings", {}).get("max_length", 0)
    if positions is not None and max_length > positions:
        yield Finding(
            "warning",
            f"data.max_length is {max_length:,}, but the model supports rows of at most {positions:,} tokens.",
            "Positions beyond that were never trained (max_position_embeddings in its config.json, with RoPE scaling).",
            f"Set data.max_length: {positions} or less, or use a model with a longer context.",
        )


def _never_seen(prepared: Prepared, new_tokens: Mapping[str, int]) -> Iterator[Finding]:
    missing = prepared.absent(new_tokens.values()) if new_tokens else set()
    if missing:
        names = ", ".join(token for token, number in new_tokens.items() if number in missing)
        yield Finding(
            "warning",
            f"model.new_tokens: {names} {'is' if len(missing) == 1 else 'are'} in no training row.",
            "A token that never occurs is not trained: its embedding stays close to its initial value.",
            "Check how it is written in the data and the templates, or remove it from model.new_tokens.",
        )


def _rows(number: int, name: str) -> str:
    return count(number, f"{NAMES[name]} row")


def _setting(prepared: Prepared, name: str, default: bool) -> bool:
    return bool(prepared.manifest.get(name, default))
