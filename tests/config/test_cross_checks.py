"""Are settings that are valid alone, and wrong together, refused with what to change?"""

from __future__ import annotations

import pytest
from small_configs import SMALLEST, Load, Report

VALIDATED = "model: {model_name_or_path: gpt2}\ndata: {dataset_name_or_path: d, val_split: v}\n"


def test_bf16_and_fp16_both_on_are_refused(report: Report) -> None:
    said = report(SMALLEST + "train:\n  bf16: true\n  fp16: true\n")
    assert "1 problem found" in said
    assert "run.yaml:5:9 train.fp16 bf16 and fp16 are both on" in said


def test_fp16_alone_is_refused_because_it_needs_loss_scaling(report: Report) -> None:
    said = report(SMALLEST + "train: {fp16: true}\n")
    assert "run.yaml:3:15 train.fp16 fp16 is not supported: it needs loss scaling" in said
    assert "use bf16: true" in said


def test_replicas_are_only_compared_where_there_are_several(report: Report) -> None:
    said = report(SMALLEST + "parallel: {shard: full}\nguards: {replica_check_steps: 10}\n")
    assert "guards.replica_check_steps no effect: with shard: full there is one replica of the base" in said


@pytest.mark.parametrize(("word", "told"), [("none", "none"), ("false", "none"), ("selective", "selective")])
def test_inputs_are_only_moved_where_layers_are_computed_again(report: Report, word: str, told: str) -> None:
    said = report(SMALLEST + f"train: {{offload_activations: true, gradient_checkpointing: {word}}}\n")
    assert (
        f"train.offload_activations it offloads the inputs of fully checkpointed layers, and gradient_checkpointing is {told}"
        in said
    )
    assert "set gradient_checkpointing: full" in said


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("optim: paged_adamw_32bit", "train.optim 'paged_adamw_32bit' is not supported: it pages its state"),
        ("optim: adamw_torch_fussed", "did you mean `adamw_torch_fused`?"),
        ("optim_args: {momentum: 0.9}", "train.optim_args.momentum adamw_torch has no argument 'momentum'"),
        ("optim_args: {betas: [0.9, 0.99]}", "set train.adam_beta1 and train.adam_beta2"),
        ("lr_scheduler_kwargs: {min_lr: 0}", "train.lr_scheduler_kwargs.min_lr cosine has no argument 'min_lr'"),
        ("lr_scheduler_type: warmup_stable_decay", "run.yaml:3:28 train.lr_scheduler_kwargs.num_decay_steps"),
        (
            "lr_scheduler_type: reduce_lr_on_plateau",
            "reduce_lr_on_plateau is not supported: it follows the validation loss",
        ),
        ("lr_scheduler_type: constant, warmup_steps: 5", "the schedule `constant` has no warm-up"),
        ("lr_scheduler_type: constant, warmup_ratio: 0.1", "set lr_scheduler_type: constant_with_warmup"),
        ("dataloader_prefetch_factor: 2", "no effect: dataloader_num_workers is 0"),
        ("dataloader_persistent_workers: true", "no effect: dataloader_num_workers is 0"),
        ("adam_beta2: 0.95, optim: sgd", "run.yaml:3:21 train.adam_beta2 no effect: train.optim is sgd"),
        ("label_smoothing_factor: 0.1, loss: dft", "label smoothing is defined for train.loss: nll only"),
        ("early_stopping_patience: 3", "no effect: this run does not evaluate"),
        ("eval_on_start: true", "no effect: this run does not evaluate"),
        ("eval_delay: 5", "no effect: this run does not evaluate"),
        ("early_stopping_threshold: 0.1", "no effect: early_stopping_patience is not set"),
        ("run_name: first", "no effect: no tracker of train.report_to reads it"),
        ("run_name: first, report_to: tensorboard", "set report_to: wandb"),
        ("project: p, report_to: [wandb, mlflow]", "only trackio reads it"),
        ("trackio_space_id: me/space", "no effect: only trackio reads it, and train.report_to is none"),
        ("sample_tokens: 5", "no effect: train.samples is 0"),
        ("callbacks: [my.module]", "train.callbacks 'my.module' is not of the form module:Class"),
    ],
)
def test_what_would_have_no_effect_is_refused_with_what_it_needs(report: Report, line: str, expected: str) -> None:
    said = report(SMALLEST + f"train: {{{line}}}\n")
    assert "1 problem found" in said and expected in said


@pytest.mark.parametrize(
    "line",
    [
        "optim: sgd, optim_args: {momentum: 0.9}, adam_beta2: 0.999",
        "dataloader_num_workers: 2, dataloader_prefetch_factor: 4, dataloader_persistent_workers: true",
        "early_stopping_patience: 3, early_stopping_threshold: 0.01, eval_delay: 5, eval_on_start: true",
        "run_name: first, report_to: mlflow",
        "project: p, run_name: first, trackio_static_space_id: false, report_to: [tensorboard, trackio]",
        "run_name: first, callbacks: ['package.module:Class']",
        "lr_scheduler_type: constant",
        "lr_scheduler_type: constant, warmup_steps: 0",
        "lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}",
        "loss: dft, router_aux_loss_coef: 0.01, neftune_noise_alpha: 5, data_seed: 1, full_determinism: true",
    ],
)
def test_what_has_an_effect_passes_without_a_notice(load: Load, line: str) -> None:
    assert load(VALIDATED + f"train: {{{line}}}\n").notices == ()


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_evaluation_without_a_validation_split_is_refused(report: Report, strategy: str) -> None:
    said = report(SMALLEST + f"train: {{eval_strategy: {strategy}}}\n")
    assert f"run.yaml:3:24 train.eval_strategy eval_strategy is {strategy}, but data.val_split is not given" in said


@pytest.mark.parametrize("text", [SMALLEST, VALIDATED + "#"])
def test_the_best_checkpoint_needs_an_evaluation(report: Report, text: str) -> None:
    off = ", eval_strategy: no" if text != SMALLEST else ""
    said = report(text + f"\ntrain: {{load_best_model_at_end: true{off}}}\n")
    assert (
        "train.load_best_model_at_end the best checkpoint is the one with the lowest validation loss, and this run does not"
        in said
    )


def test_the_best_checkpoint_needs_saving_and_evaluating_at_the_same_kind_of_time(report: Report) -> None:
    said = report(VALIDATED + "train: {load_best_model_at_end: true, save_strategy: epoch}\n")
    assert "save_strategy is epoch but eval_strategy is steps" in said
    assert "set save_strategy: steps" in said


def test_the_best_checkpoint_needs_save_steps_that_are_a_multiple_of_eval_steps(report: Report) -> None:
    said = report(VALIDATED + "train: {load_best_model_at_end: true, save_steps: 250, eval_steps: 100}\n")
    assert "save_steps (250) is not a multiple of eval_steps (100)" in said
    assert "set save_steps: 200" in said


@pytest.mark.parametrize(
    "line", ["save_steps: 400, eval_steps: 100", "save_strategy: epoch, eval_strategy: epoch, save_steps: 3"]
)
def test_a_best_checkpoint_that_can_be_found_passes(load: Load, line: str) -> None:
    assert load(VALIDATED + f"train: {{load_best_model_at_end: true, {line}}}\n").config.train.load_best_model_at_end


@pytest.mark.parametrize(
    ("data", "said_of_it"),
    [
        ("train_on: completion, format: text", "format text has no prompt and answer"),
        ("train_on: completion, format: chat", "set train_on: assistant"),
        ("train_on: assistant, prompt_template: '{q} {a}'", "the rows are not conversations"),
        ("format: prompt", "data.format format is prompt, but there is no prompt_template"),
        (
            "format: chat, prompt_template: '{q} {a}'",
            "data.prompt_template prompt_template is given, but format is chat",
        ),
    ],
)
def test_what_carries_loss_must_exist_in_the_format(report: Report, data: str, said_of_it: str) -> None:
    said = report(f"model: {{model_name_or_path: gpt2}}\ndata: {{dataset_name_or_path: d, {data}}}\n")
    assert said_of_it in " ".join(said.split())


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("no column", "it has no {column}"),
        ("{{literal}}", "it has no {column}"),
        ("{a", "unbalanced braces"),
        ("a } b", "unbalanced braces"),
        ("{} {b}", "{} does not name a column"),
        ("{a:>3}", "{a:>3} does not name a column"),
        ("{a!r}", "{a!r} does not name a column"),
    ],
)
def test_a_template_must_name_columns(report: Report, template: str, expected: str) -> None:
    said = report(
        f"model: {{model_name_or_path: gpt2}}\ndata: {{dataset_name_or_path: d, prompt_template: '{template}'}}\n"
    )
    assert "run.yaml:2:50 data.prompt_template" in said
    assert expected in said


def test_a_sound_template_passes(load: Load) -> None:
    text = "model: {model_name_or_path: gpt2}\ndata: {dataset_name_or_path: d, prompt_template: '{{x}} {q} {a}', train_on: completion}\n"
    assert load(text).config.data.prompt_template == "{{x}} {q} {a}"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("atention", "attention"), ("expert", "experts"), ("all_linear", "all-linear"), ("shared_experts", "shared-experts"), ("Attention", "attention")],
)  # fmt: skip
def test_a_misspelt_word_for_a_target_is_answered_with_the_right_one(report: Report, written: str, meant: str) -> None:
    said = " ".join(report(SMALLEST + f"lora: {{target_modules: [q_proj, {written}]}}\n").split())
    assert f"lora.target_modules '{written}' is not one of the words" in said
    assert f"did you mean `{meant}`?" in said


@pytest.mark.parametrize("name", ["q_proj", "self_attn.o_proj", "mlp.gate", ".*shared_experts.*", "experts.down_proj", "fc1", "gate", "dense"])  # fmt: skip
def test_module_names_are_not_taken_for_misspelt_words(load: Load, name: str) -> None:
    assert load(SMALLEST + f"lora: {{target_modules: ['{name}']}}\n").config.lora.target_modules == [name]


@pytest.mark.parametrize("lora", ["target_modules: [attention, experts]", "target_modules: router", "experts: true"])
def test_dropout_where_it_cannot_be_expressed_is_refused_before_anything_is_loaded(
    report: Report, load: Load, lora: str
) -> None:
    said = " ".join(report(SMALLEST + f"lora: {{{lora}, lora_dropout: 0.1}}\n").split())
    assert "lora.lora_dropout lora_dropout is 0.1" in said
    assert "W + B·A" in said and "set lora_dropout: 0" in said
    assert "lora_dropout is 0.05" in report(SMALLEST + f"lora: {{{lora}}}\n")  # the default is refused as well
    assert load(SMALLEST + f"lora: {{{lora}, lora_dropout: 0}}\n").config.lora.lora_dropout == 0


def test_naming_experts_while_refusing_them_is_a_contradiction(report: Report) -> None:
    said = report(SMALLEST + "lora: {target_modules: [experts], experts: false, lora_dropout: 0}\n")
    assert "it names the routed experts, but lora.experts is false" in said


@pytest.mark.parametrize("line", ["expert_r: 0", "expert_r: true", "expert_alpha: 0", "experts: maybe"])
def test_settings_of_experts_are_checked(report: Report, line: str) -> None:
    assert f"lora.{line.split(':')[0]} expected" in report(SMALLEST + f"lora: {{{line}}}\n")
