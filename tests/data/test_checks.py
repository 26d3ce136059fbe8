"""Refusals and warnings before training: each with its message, and silence for good data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_prepared import FakePrepared, fake_set
from transformers import CONFIG_MAPPING, AutoConfig

from shardtune.data.checks import Finding, ModelLimits, enforce, model_positions, refusals_and_warnings
from shardtune.data.prepared import CountedRemark
from shardtune.errors import UserInputError

GOOD = [([5, 6, 7, 2], 2)] * 10  # word-level ids: 1 is <s>, 2 is </s>


def good(**counts: Any) -> FakePrepared:
    return FakePrepared(GOOD, **counts)


def found(
    words: Any, train: FakePrepared, val: FakePrepared | None = None, vocabulary: int | None = 72, **about: Any
) -> list[Finding]:
    return refusals_and_warnings(fake_set(train, val, **about), words, ModelLimits(vocabulary))


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    assert findings[0].what and findings[0].why and findings[0].fix
    return findings[0]


def test_nothing_is_said_about_good_data(words: Any) -> None:
    assert found(words, good(), good()) == []


def test_no_supervised_token_at_all_is_refused(words: Any) -> None:
    finding = only(found(words, FakePrepared([], read=9, dropped_unsupervised=8, dropped_short=1)))
    assert finding.level == "error"
    assert finding.what == "No training row has a supervised token."
    assert "9 rows were read; 8 had no supervised token" in finding.why


def test_rows_left_out_because_nothing_in_them_is_learnt_are_told(words: Any) -> None:
    finding = only(found(words, good(dropped_unsupervised=3)))
    assert finding.level == "warning"
    assert finding.what == "3 training rows dropped: no supervised token."


def test_conversations_without_an_assistant_turn_are_told_apart_from_rows_that_are_too_long(words: Any) -> None:
    silent = only(found(words, good(dropped_unsupervised=2, without_assistant=2)))
    assert silent.what == "2 training rows dropped: no supervised assistant turn."
    assert "data.train_on: all" in silent.fix
    both = found(words, good(dropped_unsupervised=3, without_assistant=2))
    assert [finding.what.partition(":")[0] for finding in both] == [
        "2 training rows dropped", "1 training row dropped",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "settings", "positions"),
    [
        ("llama", {"max_position_embeddings": 2048}, 2048),
        ("gpt2", {"n_positions": 1024}, 1024),
        # Stated after stretching (Llama 3.1), before it (Qwen2.5 with YaRN), and without the length it began with.
        ("llama", {"max_position_embeddings": 131072, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0}}, 131072),
        ("qwen2", {"max_position_embeddings": 32768, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ("llama", {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
        ("gemma3_text", {"max_position_embeddings": 512}, 512),  # one rope for each kind of layer
        ("mistral3", {"text_config": {"model_type": "mistral", "max_position_embeddings": 777}}, 777),
        ("mamba2", {}, None),
    ],
)  # fmt: skip
def test_the_longest_row_a_model_was_made_for_is_read_from_its_config(
    model_type: str, settings: dict[str, Any], positions: int | None, tmp_path: Path
) -> None:
    CONFIG_MAPPING[model_type](**settings).save_pretrained(tmp_path)
    assert model_positions(AutoConfig.from_pretrained(tmp_path)) == positions


@pytest.mark.parametrize(("max_length", "told"), [(256, False), (257, True)])
def test_a_max_length_beyond_the_models_positions_is_told(words: Any, max_length: int, told: bool) -> None:
    prepared = fake_set(good())
    prepared.about["settings"] = {"max_length": max_length}
    findings = refusals_and_warnings(prepared, words, ModelLimits(72, positions=256))
    assert bool(findings) == told
    if told:
        assert only(findings).level == "warning"
        assert "data.max_length is 257, but the model supports rows of at most 256 tokens." in findings[0].what
        assert "Set data.max_length: 256 or less" in findings[0].fix


def test_no_supervised_end_anywhere_is_refused(words: Any) -> None:
    finding = only(found(words, good(without_eos=10)))
    assert finding.level == "error"
    assert finding.what == "No training row has a supervised end-of-sequence token."
    assert "never learns to stop" in finding.why


@pytest.mark.parametrize(("name", "settings"), [("text", {}), ("prompt", {"append_eos": False})])
def test_no_supervised_end_is_a_warning_where_it_may_be_meant(words: Any, name: str, settings: dict[str, Any]) -> None:
    train = FakePrepared(GOOD, manifest=settings, without_eos=10)
    assert only(found(words, train, name=name)).level == "warning"


def test_some_rows_without_a_supervised_end_are_counted(words: Any) -> None:
    finding = only(found(words, good(without_eos=2)))
    assert finding.level == "warning"
    assert finding.what == "2 training rows (20 %) without a supervised end-of-sequence token."
    assert "append_eos" in finding.fix


def test_rows_that_lost_their_end_to_max_length_are_explained(words: Any) -> None:
    finding = only(found(words, good(without_eos=2, cut=2)))
    assert "2 rows truncated or split at data.max_length" in finding.why and finding.fix == "Raise data.max_length."


def test_stretches_of_a_corpus_need_no_end_of_their_own(words: Any) -> None:
    train = FakePrepared(GOOD, manifest={"concatenate": True}, without_eos=9)
    assert found(words, train, name="text") == []


def test_validation_rows_that_stand_in_train_are_counted(words: Any) -> None:
    finding = only(found(words, good(), good(), overlap=5))
    assert finding.level == "warning"
    assert finding.what == "5 of 10 validation rows are also in the training data (50 %)."


@pytest.mark.parametrize(("val_split", "proposed"), [("validation", True), (0.2, False)])
def test_a_share_is_not_proposed_against_overlap_where_one_is_set(words: Any, val_split: Any, proposed: bool) -> None:
    prepared = fake_set(good(), good(), overlap=6)
    prepared.about["settings"] = {"val_split": val_split}
    finding = only(refusals_and_warnings(prepared, words, ModelLimits(72)))
    assert ("data.val_split: 0.05" in finding.fix) == proposed


@pytest.mark.parametrize(("empty", "told"), [(1, False), (2, True)])
def test_empty_rows_are_told_where_they_are_more_than_a_few(words: Any, empty: int, told: bool) -> None:
    remark = CountedRemark("empty row", "", empty, "a.jsonl:7")
    findings = found(words, good(read=100, dropped_short=empty, remarks=(remark,)))
    assert bool(findings) == told
    if told:
        finding = only(findings)
        assert finding.level == "warning"
        assert finding.what == "2 training rows (2.0 %) dropped as empty."
        assert finding.why == "The column 'messages' is missing, null or blank; first in a.jsonl:7."


@pytest.mark.parametrize(
    ("kind", "detail", "what", "fix"),
    [
        ("empty turn", "", "3 training rows with an assistant turn that renders to nothing.", "remove them"),
        ("lost tool calls", "", "3 training rows with tool calls that the chat template does not render.", "data.chat_template"),
        ("unknown role", "asistant", "3 training rows with a message of the unknown role 'asistant'.", "Did you mean 'assistant'?"),
        ("unknown role", "narrator", "3 training rows with a message of the unknown role 'narrator'.", "The known roles are system, "),
    ],
)  # fmt: skip
def test_what_was_noticed_in_rows_is_told_with_the_first_of_them(
    words: Any, kind: str, detail: str, what: str, fix: str
) -> None:
    finding = only(found(words, good(remarks=(CountedRemark(kind, detail, 3, "a.jsonl:7"),))))
    assert (finding.level, finding.what) == ("warning", what)
    assert "First in a.jsonl:7." in finding.why
    assert fix in finding.fix


def test_mostly_leaked_validation_is_refused(words: Any) -> None:
    finding = only(found(words, good(), good(), overlap=6))
    assert finding.level == "error" and "6 of 10" in finding.what


def test_a_doubled_begin_token_is_refused(words: Any) -> None:
    rows = [*GOOD, ([1, 1, 5, 2], 2)]
    finding = only(found(words, FakePrepared(rows)))
    assert finding.level == "error"
    assert finding.what == "1 of 11 training rows checked begin with <s> twice."
    assert "first in row 10" in finding.why


def test_a_begin_token_once_is_fine(words: Any) -> None:
    assert found(words, FakePrepared([([1, 5, 1, 2], 1)])) == []


def test_a_tokenizer_without_a_begin_token_has_none_to_double(words: Any) -> None:
    import copy

    tokenizer = copy.deepcopy(words)
    tokenizer.bos_token = None
    assert found(tokenizer, FakePrepared([([1, 1, 5, 2], 2)])) == []


@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_token_beyond_the_vocabulary_is_refused(words: Any, where: str) -> None:
    bad = FakePrepared([([5, 72, 2], 1)])
    sets = (bad, None) if where == "training" else (good(), bad)
    finding = only(found(words, *sets))
    assert finding.level == "error"
    assert finding.what == f"The {where} data contains token id 72, but the model has only 72 embeddings."
    assert found(words, *sets, vocabulary=73) == []


def test_without_a_known_vocabulary_tokens_are_not_judged(words: Any) -> None:
    assert found(words, FakePrepared([([5, 72, 2], 1)]), vocabulary=None) == []


def test_many_repeated_rows_are_a_warning(words: Any) -> None:
    finding = only(found(words, good(duplicates=3)))
    assert finding.level == "warning" and finding.what == "3 training rows (30 %) identical to an earlier row."
    assert found(words, good(duplicates=2)) == []


def test_repetitions_are_a_share_of_the_stored_rows_not_of_a_weighted_epoch(words: Any) -> None:
    stored = {"files": {"offsets.bin": {"bytes": 8 * 101}}}  # a weight of 0.1 takes ten of a hundred
    assert found(words, FakePrepared(GOOD, manifest=stored, duplicates=5)) == []
    assert "(30 %)" in only(found(words, FakePrepared(GOOD, manifest=stored, duplicates=30))).what


def test_skipped_rows_are_told_with_their_first_places(words: Any) -> None:
    places = [f"rows.jsonl:{n}: broken\x1b[2J\n" for n in (3, 8, 9, 12)]
    finding = only(found(words, good(skipped_errors=4, errors=places)))
    assert finding.level == "warning"
    assert finding.what == "4 training rows skipped as unreadable (data.on_error: skip)."
    assert finding.why.startswith("The first: rows.jsonl:3: broken\\x1b[2J; rows.jsonl:8:")
    assert "rows.jsonl:9:" in finding.why and "rows.jsonl:12:" not in finding.why


def test_many_cut_rows_are_a_warning(words: Any) -> None:
    finding = only(found(words, good(cut=3)))
    assert finding.level == "warning" and finding.what == "3 training rows (30 %) truncated at data.max_length."
    assert "only 70 % of the rows fit" in finding.why and finding.fix.startswith("Raise data.max_length, or")
    assert found(words, good(cut=2)) == []


def test_a_warning_of_many_cut_rows_suggests_the_length_most_rows_fit_into(words: Any) -> None:
    finding = only(found(words, FakePrepared(GOOD, manifest={"uncut_p95": 3100}, cut=3)))
    assert finding.fix.startswith("Set data.max_length: 3100, which fits 95 % of the rows")


def test_errors_come_before_warnings(words: Any) -> None:
    levels = [
        f.level for f in found(words, good(dropped_unsupervised=1, duplicates=9, without_eos=10), good(), overlap=9)
    ]
    assert levels == ["error", "error", "warning", "warning"]


def test_one_error_is_raised_as_it_is() -> None:
    with pytest.raises(UserInputError) as raised:
        enforce([Finding("warning", "w", "", ""), Finding("error", "what", "why", "fix")])
    assert (raised.value.what, raised.value.why, raised.value.fix) == ("what", "why", "fix")


def test_several_errors_are_raised_as_one() -> None:
    with pytest.raises(UserInputError) as raised:
        enforce([Finding("error", "first", "a", "b"), Finding("error", "second", "c", "d")])
    assert raised.value.what == (
        "The data cannot be trained on, for 2 reasons:\n- first\n    why: a\n    fix: b\n- second\n    why: c\n    fix: d"
    )


def test_warnings_alone_are_returned() -> None:
    warning = Finding("warning", "w", "y", "f")
    assert enforce([warning]) == [warning] and enforce([]) == []
