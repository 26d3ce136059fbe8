"""What in the data would spoil a training? Refusals and warnings, told before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardtune.config.suggestions import nearest
from shardtune.data.histogram import share
from shardtune.data.inspect import NAMES, stored_rows
from shardtune.data.messages import KNOWN_ROLES
from shardtune.data.show_rows import spread, visible
from shardtune.errors import UserInputError
from shardtune.terminal import count

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from shardtune.data.prepare import PreparedSet
    from shardtune.data.prepared import Prepared, PreparedCounts

_MANY = 0.2  # of the rows: repeated, or cut
_SOME_EMPTY = 0.01  # of the rows: sets have a blank one here and there; more is a column that is not what it seems
_LEAKED = 0.5  # of the validation rows: then validation measures memory
_LOOKED_AT = 2000  # rows whose beginning is read: a second begin token is the template's doing, so in all or none
_PLACES = 3


@dataclass(frozen=True)
class Finding:
    """Something about the data that its owner should know. An error refuses the training."""

    level: Literal["error", "warning"]
    what: str
    why: str
    fix: str


def enforce(findings: list[Finding]) -> list[Finding]:
    """Raise one error that tells all refusals; otherwise return the warnings."""
    errors = [finding for finding in findings if finding.level == "error"]
    if len(errors) == 1:
        raise UserInputError(errors[0].what, why=errors[0].why, fix=errors[0].fix)
    if errors:
        told = "".join(f"\n- {f.what}\n    why: {f.why}\n    fix: {f.fix}" for f in errors)
        raise UserInputError(f"The data cannot be trained on, for {len(errors)} reasons:{told}")
    return [finding for finding in findings if finding.level == "warning"]


@dataclass(frozen=True)
class ModelLimits:
    """What the model can read; None where that is not known, and is not checked.

    Attributes:
        vocabulary: Rows of its embedding.
        positions: Longest row it was made for.
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
    found: list[Finding] = []
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


def _unsupervised(counts: PreparedCounts, name: str) -> Iterator[Finding]:
    if not counts.supervised:
        yield Finding(
            "error",
            f"No {NAMES[name]} row has a token that carries loss.",
            f"{counts.read:,} rows were read; {counts.dropped_unsupervised:,} had no supervised token within "
            f"max_length, {counts.dropped_short:,} were empty.",
            "Check data.train_on, data.format and the template; raise data.max_length if prompts fill it.",
        )
        return
    if counts.without_assistant:
        yield Finding(
            "warning",
            f"{_rows(counts.without_assistant, name)} left out: no assistant turn in them carries loss.",
            "Nothing is learnt from a conversation in which the assistant does not speak.",
            "Check the roles in these rows, or set data.train_on: all to learn every turn.",
        )
    if counts.dropped_unsupervised > counts.without_assistant:
        yield Finding(
            "warning",
            f"{_rows(counts.dropped_unsupervised - counts.without_assistant, name)} left out: no token of theirs is "
            "supervised.",
            "Nothing is learnt from them: they have no answer, or their prompt fills max_length.",
            "Check these rows, or raise data.max_length.",
        )


def _unknown_tokens(counts: PreparedCounts, name: str, vocabulary: int | None) -> Iterator[Finding]:
    if vocabulary is not None and counts.largest_id >= vocabulary:
        yield Finding(
            "error",
            f"The {NAMES[name]} data holds token {counts.largest_id}, but the model has embeddings for {vocabulary} "
            "tokens only.",
            "The tokenizer is not the one this model was made for, or tokens were added to it afterwards.",
            "Set model.tokenizer_name_or_path to the model's own tokenizer; name tokens that the model shall learn in "
            "model.new_tokens.",
        )


def _double_begin(prepared: Prepared, name: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    begin = tokenizer.bos_token_id
    if begin is None:
        return
    looked_at = spread(len(prepared), _LOOKED_AT)
    twice = [number for number in looked_at if prepared.row(number)[0][:2].tolist() == [begin, begin]]
    if twice:
        yield Finding(
            "error",
            f"{len(twice):,} of {len(looked_at):,} {NAMES[name]} rows looked at begin with {tokenizer.bos_token} "
            "twice.",
            f"The data or the template writes it and the tokenizer adds it (first in row {twice[0]}). The model has "
            "never seen that.",
            f"Take {tokenizer.bos_token} out of the data, data.prompt_template or data.chat_template.",
        )


def _skipped(counts: PreparedCounts, name: str) -> Iterator[Finding]:
    if counts.skipped_errors:
        yield Finding(
            "warning",
            f"{_rows(counts.skipped_errors, name)} skipped as unreadable (data.on_error: skip).",
            "The first: " + "; ".join(visible(" ".join(place.split())) for place in counts.errors[:_PLACES]),
            "Repair them, or set data.on_error: stop to be told at the first.",
        )


def _empty(prepared_set: PreparedSet, counts: PreparedCounts, name: str) -> Iterator[Finding]:
    empty = next((remark for remark in counts.remarks if remark.kind == "empty row"), None)
    if empty is None or empty.rows <= _SOME_EMPTY * counts.read:
        return
    choice = prepared_set.choice
    column = f"The column '{choice.columns[-1 if choice.name.startswith('prompt') else 0]}'"
    if len(prepared_set.about.get("sources", ())) > 1:
        column = "The text, the answer or the conversation"
    yield Finding(
        "warning",
        f"{_rows(empty.rows, name)} ({share(empty.rows, counts.read)}) left out as empty.",
        f"{column} is missing, null or blank there; first in {visible(empty.first)}.",
        "Check how the column is named and filled in these rows, or take them out.",
    )


def _remarked(counts: PreparedCounts, name: str) -> Iterator[Finding]:
    for remark in counts.remarks:
        rows, first = _rows(remark.rows, name), f"First in {visible(remark.first)}."
        if remark.kind == "empty turn":
            yield Finding(
                "warning",
                f"{rows} with an assistant turn of which nothing is rendered.",
                "Its content is null or empty (or the template drops it). Learnt, it would teach the model to say "
                f"nothing, so it carries no loss unless data.train_on is all. {first}",
                "Check these turns, or take them out.",
            )
        elif remark.kind == "lost tool calls":
            yield Finding(
                "warning",
                f"{rows} with tool calls that the chat template does not render.",
                "The model does not learn to call these tools; a turn with nothing else in it carries no loss. "
                f"{first}",
                "Set data.chat_template to one that renders tool_calls, or write the calls into the content.",
            )
        elif remark.kind == "unknown role":
            meant = nearest(remark.detail, KNOWN_ROLES)
            yield Finding(
                "warning",
                f"{rows} with a message of the unknown role '{visible(remark.detail)}'.",
                f"It may be rendered, but carries no loss unless data.train_on is all. {first}",
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
            "The model never learns to stop: it writes on until it is cut off.",
            "Set data.append_eos: true; for chat, check that the template ends the assistant's turn with the "
            "tokenizer's end token; raise data.max_length if rows lose their end.",
        )
    elif not _setting(prepared_set.train, "concatenate", False):  # a stretch of a corpus may hold no end
        lost = counts.cut + counts.split
        yield Finding(
            "warning",
            f"{_rows(counts.without_eos, 'train')} ({share(counts.without_eos, counts.rows)}) without a supervised "
            "end-of-sequence token.",
            f"{count(lost, 'row')} cut or split at data.max_length, which takes the end off."
            if lost
            else "Their text ends without.",
            "Raise data.max_length." if lost else "Set data.append_eos: true, or check the end of these rows.",
        )


def _leaked(prepared_set: PreparedSet) -> Iterator[Finding]:
    if prepared_set.val is None or not prepared_set.overlap:
        return
    rows, leaked = prepared_set.val.counts.rows, prepared_set.overlap
    held_out = isinstance(prepared_set.about.get("settings", {}).get("val_split"), float)
    yield Finding(
        "error" if leaked > _LEAKED * rows else "warning",
        f"{leaked:,} of {rows:,} validation rows also stand in the training data ({share(leaked, rows)}).",
        "The validation loss then measures what was memorised, and falls while the model gets worse on new text.",
        "Raise data.max_length: these rows differ only in what is cut off, or in columns whose text is the same."
        if held_out
        else "Take them out of one of the two splits, or hold out a share of the training rows instead "
        "(data.val_split: 0.05): rows with the same content then stay on one side.",
    )


def _repeated(prepared: Prepared) -> Iterator[Finding]:
    repeated, stored = prepared.counts.duplicates, stored_rows(prepared)
    if repeated > _MANY * stored:
        yield Finding(
            "warning",
            f"{_rows(repeated, 'train')} ({share(repeated, stored)}) the same as an earlier one.",
            "They are learnt that many times more often, and by heart.",
            "Remove the repetitions, unless they are meant as a weight.",
        )


def _cut(prepared: Prepared) -> Iterator[Finding]:
    cut, stored = prepared.counts.cut, stored_rows(prepared)
    if cut > _MANY * stored:
        p95 = prepared.manifest.get("uncut_p95")  # of the rows' lengths before they were cut
        enough = f"Set data.max_length: {p95}, into which 95 % of the rows fit" if p95 else "Raise data.max_length"
        yield Finding(
            "warning",
            f"{_rows(cut, 'train')} ({share(cut, stored)}) cut at data.max_length.",
            f"What stood behind is not learnt, nor where to stop: only {share(stored - cut, stored)} of the rows fit.",
            f"{enough}, or set data.long_rows: split or drop.",
        )


def _beyond_positions(prepared_set: PreparedSet, positions: int | None) -> Iterator[Finding]:
    max_length = prepared_set.about.get("settings", {}).get("max_length", 0)
    if positions is not None and max_length > positions:
        yield Finding(
            "warning",
            f"data.max_length is {max_length:,}, but the model was made for rows of at most {positions:,} tokens.",
            "Positions beyond that were never trained (max_position_embeddings in its config.json, with rope scaling).",
            f"Set data.max_length: {positions} or less, or use a model with a longer context.",
        )


def _never_seen(prepared: Prepared, new_tokens: Mapping[str, int]) -> Iterator[Finding]:
    missing = prepared.absent(new_tokens.values()) if new_tokens else set()
    if missing:
        names = ", ".join(token for token, number in new_tokens.items() if number in missing)
        yield Finding(
            "warning",
            f"model.new_tokens: {names} {'is' if len(missing) == 1 else 'are'} in no training row.",
            "Nothing is learnt of a token that never occurs; its rows stay close to where they start.",
            "Check how it is written in the data and the templates, or take it out of model.new_tokens.",
        )


def _rows(number: int, name: str) -> str:
    return count(number, f"{NAMES[name]} row")


def _setting(prepared: Prepared, name: str, default: bool) -> bool:
    return bool(prepared.manifest.get(name, default))
