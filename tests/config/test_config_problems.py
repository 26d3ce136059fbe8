"""Does a wrong config get one report that names every mistake, its place, and what was meant?"""

from __future__ import annotations

import pytest
from small_configs import SMALLEST, Load, Report

from shardtune.config import ConfigError


def test_all_problems_of_a_file_stand_in_one_report_in_the_file_s_order(report: Report) -> None:
    said = report(
        "model: {model_name_or_path: gpt2}\n"
        "lora:\n  r: 0\n  lora_dropout: 1.5\n"
        "data:\n  max_length: 0\n"
        "train:\n  learnng_rate: 1e-4\n  bf16: true\n  fp16: true\n"
    )
    assert said.startswith("run.yaml: 6 problems found, nothing was started.")
    expected = [
        "run.yaml:3:6 lora.r expected a whole number, at least 1; got 0",
        "run.yaml:4:17 lora.lora_dropout expected a number, at least 0 and below 1; got 1.5",
        "run.yaml:5:1 data.dataset_name_or_path this key is required.",
        "run.yaml:6:15 data.max_length expected a whole number, at least 2 and at most 16777216; got 0",
        "run.yaml:8:3 train.learnng_rate unknown key; did you mean `learning_rate`?",
        "run.yaml:10:9 train.fp16 bf16 and fp16 are both on",
    ]
    spots = [said.index(text) for text in expected]
    assert spots == sorted(spots)


def test_more_problems_than_fit_on_a_screen_are_counted(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SMALLEST + "train:\n" + "".join(f"  zzz{n}: 1\n" for n in range(40)))
    text = str(caught.value)
    assert len(caught.value.problems) == 40
    assert text.count("unknown key") == 15
    assert text.endswith("… and 25 more; `shardtune config validate` lists all.")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert len(text.splitlines()) <= 40


def test_problems_with_long_texts_are_cut_at_a_screen_too(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SMALLEST + "lora:\n" + "".join(f"  zzz{n}: 1\n" for n in range(40)))
    text = str(caught.value)
    assert len(text.splitlines()) <= 40
    assert f"… and {40 - text.count('unknown key')} more" in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learning_rate: 3", "run.yaml:3:1 learning_rate unknown key; `learning_rate` belongs in `train`"),
        ("lora: {learning_rate: 3}", "run.yaml:3:8 lora.learning_rate unknown key; `learning_rate` belongs in `train`"),
        ("max_seq_length: 3", "unknown key; did you mean `data.max_length`?"),
        ("train: {max_seq_length: 3}", "train.max_seq_length unknown key; did you mean `data.max_length`?"),
        ("lora: {lora_r: 3}", "lora.lora_r unknown key; did you mean `r`?"),
        ("train: {evaluation_strategy: no}", "unknown key; did you mean `eval_strategy`?"),
        ("train: {dtype: bf16}", "unknown key; did you mean `model.torch_dtype`?"),
        ("train: {dataset_text_field: x}", "not a setting here: use `data.text_field`"),
        ("train: {Learning-Rate: 3}", "unknown key; did you mean `learning_rate`?"),
        ("training: {seed: 1}", "training unknown key; did you mean the section `train`?"),
        ("paralel: {nproc: 1}", "paralel unknown key; did you mean the section `parallel`?"),
        ("qqq: 1", "the sections are: model, lora, data, train, parallel, guards, cluster"),
        ("cluster: {qqq: 1}", "`shardtune config reference` lists all settings"),
        ("lora: {train: {seed: 1}}", "`train` is a section of its own; check the indentation"),
        ("lora: {extends: x}", "`extends` goes at the top of the file"),
        ("train: {deepspeed: x}", "not a setting here: shardtune shards with FSDP2; use the section `parallel`"),
        ("fsdp: full_shard", "not a setting here: shardtune shards with FSDP2; use the section `parallel`"),
        ("fsdp: {version: 2}", "unknown key; did you mean the section `parallel`?"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(report: Report, line: str, expected: str) -> None:
    assert expected in report(SMALLEST + line + "\n")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{path: a.jsonl, weight: 0}", "data.dataset_name_or_path[1].weight expected a number, above 0; got 0"),
        ("{path: a.jsonl, weigth: 2}", "data.dataset_name_or_path[1].weigth unknown key; did you mean `weight`?"),
        ("{path: a.jsonl, zzz: 2}", "[1].zzz unknown key; the keys are path, weight, config_name, split"),
        ("{weight: 2}", "data.dataset_name_or_path[1].path this key is required"),
        (
            "{path: null, weight: 2}",
            "data.dataset_name_or_path[1].path expected a string (not empty); got nothing (null)",
        ),
    ],
)
def test_a_wrong_entry_of_a_mixture_is_told_by_its_key(report: Report, entry: str, expected: str) -> None:
    said = report(f"model: {{model_name_or_path: gpt2}}\ndata:\n  dataset_name_or_path:\n  - b.jsonl\n  - {entry}\n")
    assert expected in said
    assert "1 problem found" in said
    assert "run.yaml:5:" in said


@pytest.mark.parametrize("section", ["data", "train", None])
def test_a_feature_that_is_not_here_is_refused_with_its_reason_and_the_alternative(
    report: Report, section: str | None
) -> None:
    text = report(SMALLEST, [f"{section}.streaming=true" if section else "streaming=true"])
    assert "rows are not streamed: they are tokenised once" in text
    assert "memory-mapped, so memory does not grow with the dataset" in text
    assert "`shardtune data prepare CONFIG` does it ahead of time" in text
    assert "unknown key" not in text


@pytest.mark.parametrize(
    ("setting", "reason", "alternative"),
    [
        ("model.load_in_4bit=true", "4-bit weights (QLoRA, NF4) are not supported", "use `model.base_precision: fp8`"),
        ("lora.bnb_4bit_quant_type=nf4", "bitsandbytes quantises a whole weight", "use `model.base_precision: fp8`"),
        ("lora.peft_type=VERA", "only LoRA is supported", "set a small r"),
        ("lora.init_lora_weights=pissa", "pissa decomposes whole weights", "use_rslora: true and a higher r"),
        ("lora.init_lora_weights=pissa_niter_16", "no rank holds a whole weight", "use_rslora: true and a higher r"),
        ("lora.init_lora_weights=loftq", "4-bit weights, which are not supported", "model.base_precision: fp8"),
        ("lora.layers_pattern=h", "layers_to_transform counts the decoder layers", "remove it"),
        ("lora.trainable_token_indices=[5]", "are listed in the section `model`", "use `model.new_tokens"),
        ("lora.target_parameters=[experts.down_proj]", "are named in target_modules", "target_modules: [experts]"),
        (
            "lora.target_modules=[q_proj, lm_head]",
            "'lm_head' cannot have an adapter",
            "lora.modules_to_save trains the whole layer",
        ),
        (
            "lora.target_modules=[embed_tokens]",
            "'embed_tokens' cannot have an adapter",
            "model.new_tokens learns new tokens",
        ),
        ("lora.use_qalora=false", "what it turns off is never on", "remove it"),
        ('model.new_tokens=["<a>", "<a>"]', "listed twice: <a>", "list each once"),
    ],
)
def test_what_peft_has_and_is_not_here_is_refused_with_its_reason_and_the_alternative(
    report: Report, setting: str, reason: str, alternative: str
) -> None:
    text = report(SMALLEST, [setting])
    assert reason in text and alternative in text
    assert "did you mean" not in text and "unknown key" not in text


def test_dora_is_refused_with_what_it_cannot_be_together_with(report: Report) -> None:
    said = report(SMALLEST + "lora: {use_dora: true, experts: true, lora_dropout: 0}\n", ["model.base_precision=fp8"])
    assert "lora.use_dora DoRA needs the norm of every weight row" in said and "set base_precision: bf16" in said
    assert "lora.use_dora PEFT has no DoRA for routed experts" in said


def test_an_entry_of_a_mapping_says_what_it_may_hold(report: Report) -> None:
    said = report(SMALLEST + "lora: {rank_pattern: {q_proj: high}}\n")
    assert "lora.rank_pattern.q_proj expected a whole number, at least 1; got 'high'" in said


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train: {bf16: 3}", "run.yaml:3:15 train.bf16 expected true or false, or auto; got 3"),
        ("train: {seed: one}", "train.seed expected a whole number, at least 0 and at most 4294967295; got 'one'"),
        ("train: {seed: true}", "expected a whole number, at least 0 and at most 4294967295; got true"),
        ("train: {seed: 1.5}", "got 1.5"),
        ("train: {seed: null}", "got nothing (null)"),
        ("train: {learning_rate: -1}", "expected a number, above 0; got -1"),
        ("train: {learning_rate: .nan}", "expected a number, above 0; got nan"),
        ("train: {learning_rate: 1e999}", "expected a number, above 0; got inf"),
        ("train: {learning_rate: [1]}", "expected a number, above 0; got [1]"),
        ("train: {warmup_steps: 0.03}", "got 0.03; for a share of the steps, set `train.warmup_ratio: 0.03` instead"),
        ("train: {save_total_limit: 0}", "expected a whole number, at least 1, or null; got 0"),
        ("train: {lr_scheduler_type: cosin}", "got 'cosin'; did you mean `cosine`?"),
        ("train: {eval_strategy: step}", "expected one of: auto, no, steps, epoch; got 'step'; did you mean `steps`?"),
        ("train: {seed: {a: 1}}", "run.yaml:3:16 train.seed expected a whole number, at least 0 and at most 4294967295; got a mapping (`a: …`)"),
        ("train: {packing: maybe}", "run.yaml:3:18 train.packing"),
        ("train: {optim_args: 5}", "train.optim_args expected a mapping; got 5"),
        ("parallel: {nproc: 0}", "parallel.nproc expected a whole number, at least 1, or auto; got 0"),
        ("lora: {target_modules: [q_proj, 3]}", "run.yaml:3:33 lora.target_modules[1] expected a string; got 3; put quotes around it"),
        ("lora: {target_modules: []}", "lora.target_modules expected a string (not empty), or a list of strings; got []"),
        ("cluster: {env: {A: 1, B: x, C: [2]}}", "run.yaml:3:20 cluster.env.A expected a string; got 1; put quotes around it"),
        ("lora: 5", "run.yaml:3:7 lora expected a section (indented `key: value` lines); got 5"),
        ("lora: [r, 5]", "lora expected a section (indented `key: value` lines); got ['r', 5]"),
    ],
)  # fmt: skip
def test_a_wrong_value_gets_exactly_one_problem_in_plain_words(load: Load, line: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SMALLEST + line + "\n")
    assert expected in " ".join(str(caught.value).split())
    assert len(caught.value.problems) == (2 if "env" in line else 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bf16", "did you mean `bfloat16`?"),
        ("fp16", "float16 is not supported"),
        ("torch.float16", "use bfloat16"),
    ],
)
def test_a_dtype_in_another_tool_s_spelling_is_understood(report: Report, value: str, expected: str) -> None:
    said = report(f"model: {{model_name_or_path: gpt2, torch_dtype: {value}}}\ndata: {{dataset_name_or_path: d}}\n")
    assert expected in said


def test_a_text_that_reads_as_a_number_is_told_to_take_quotes(report: Report) -> None:
    said = report("model: {model_name_or_path: gpt2, revision: 123}\ndata: {dataset_name_or_path: d}\n")
    assert "model.revision expected a string, or null; got 123; put quotes around it if it is meant as a string" in said


def test_missing_required_keys_are_named_even_when_their_section_is_missing(report: Report) -> None:
    said = report("train: {seed: 1}\n")
    assert "model.model_name_or_path this key is required" in said
    assert "data.dataset_name_or_path this key is required" in said


def test_cross_checks_draw_no_conclusion_from_a_setting_that_is_itself_wrong(load: Load) -> None:
    # eval_steps is wrong, so its default must not be compared with save_steps.
    text = "model: {model_name_or_path: gpt2}\ndata: {dataset_name_or_path: d, val_split: v}\n"
    text += "train: {load_best_model_at_end: true, eval_steps: many, save_steps: 30}\n"
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert [problem.key for problem in caught.value.problems] == ["train.eval_steps"]


def test_a_section_with_everything_commented_out_says_nothing(load: Load) -> None:
    resolved = load(SMALLEST + "lora:\n#  r: 4\ntrain:\n  optim_args:\n")
    assert (resolved.config.lora.r, resolved.config.train.optim_args) == (16, {})


@pytest.mark.parametrize("word", ["no", "off", "No", "false", "'no'"])
def test_eval_strategy_no_means_the_word(load: Load, word: str) -> None:
    assert load(SMALLEST + f"train: {{eval_strategy: {word}}}\n").config.train.eval_strategy == "no"


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("on", True), ("no", False), ("off", False)])
def test_a_switch_still_takes_yes_and_no(load: Load, word: str, value: bool) -> None:
    assert load(SMALLEST + f"train: {{gradient_checkpointing: {word}}}\n").config.train.gradient_checkpointing is value


@pytest.mark.parametrize(("word", "value"), [("none", False), ("full", True), ("selective", "selective")])
def test_checkpointing_has_words_beside_the_switch(load: Load, word: str, value: bool | str) -> None:
    assert load(SMALLEST + f"train: {{gradient_checkpointing: {word}}}\n").config.train.gradient_checkpointing == value


def test_a_word_that_is_nearly_one_is_answered_with_the_words_there_are(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SMALLEST + "train: {gradient_checkpointing: selektive}\n")
    assert "selective" in str(caught.value)


def test_a_comma_list_of_names_is_a_list_but_a_regular_expression_is_not(load: Load) -> None:
    assert load(SMALLEST + "lora: {target_modules: 'q_proj, v_proj'}\n").config.lora.target_modules == [
        "q_proj",
        "v_proj",
    ]
    assert load(SMALLEST + "lora: {target_modules: '[qv]{1,2}_proj'}\n").config.lora.target_modules == "[qv]{1,2}_proj"


def test_every_wrong_item_of_a_list_is_named_and_no_secret_is_repeated(report: Report) -> None:
    text = report(
        SMALLEST + "cluster:\n  volumes: [x, {path: /y}, {claim: c, path: /y, sub: z}]\n  env: {API_KEY: 123456}\n"
    )
    assert "cluster.volumes[0] expected a mapping (claim, path, sub_path, read_only); got 'x'" in text
    assert "cluster.volumes[1].claim this key is required" in text and "cluster.volumes[2].sub unknown key" in text
    assert "cluster.env.API_KEY expected a string; got ***" in text and "123456" not in text
