"""Memory that was measured on an H200 against what the plan says, and what must hold of any model."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from model_facts import GIB, dense_7b, llama, mistral4

from shardtune.plan import activations
from shardtune.plan.facts import Facts
from shardtune.plan.memory import gpu_memory
from shardtune.plan.work import Work

STEP = Work(batch=4, length=4096, compiled=True, checkpointing="none")
FULL = replace(STEP, checkpointing="full")
OFFLOADED = replace(FULL, offload_activations=True)
_PRODUCTS = {"fp8": True, "fp8_compute": True}
# README's speed table and docs/activations.md: max_memory_allocated in GiB.
MEASURED: dict[str, tuple[Facts, Work, float]] = {
    "7B, 4 × 4096": (dense_7b(), STEP, 83.7),
    "7B, 2 × 4096": (dense_7b(), replace(STEP, batch=2), 49.0),
    "7B, 4 × 4096, packed": (dense_7b(), replace(STEP, packed=True), 89.7),
    "7B, 4 × 4096, FP8 products": (dense_7b(), replace(STEP, **_PRODUCTS), 77.2),
    "7B, 4 × 4096, full": (dense_7b(), FULL, 20.7),
    "7B, 4 × 4096, full, inputs offloaded": (dense_7b(), OFFLOADED, 17.1),
    "7B, 1 × 65536, full, inputs offloaded": (dense_7b(), replace(OFFLOADED, batch=1, length=65536), 26.0),
    "7B, 1 × 131072, full, inputs offloaded": (dense_7b(), replace(OFFLOADED, batch=1, length=131072), 37.8),
    "Mistral 4, 8 layers": (mistral4(8), STEP, 72.1),
    "Mistral 4, 8 layers, experts": (mistral4(8, expert_rank=16), STEP, 81.2),
    "Mistral 4, 8 layers, experts, full": (mistral4(8, expert_rank=16), FULL, 59.2),
    "119B, FP8 products, full": (mistral4(36), replace(FULL, **_PRODUCTS), 121.6),
    "119B, FP8 products, full, inputs offloaded": (mistral4(36), replace(OFFLOADED, **_PRODUCTS), 117.5),
    "119B, FP8 products, full, experts": (mistral4(36, expert_rank=4), replace(FULL, **_PRODUCTS), 125.0),
}


def test_measured_peaks_are_predicted() -> None:
    errors = {}
    for name, (facts, work, measured) in MEASURED.items():
        predicted = gpu_memory(facts, work)
        errors[name] = predicted.allocated / GIB / measured - 1
        print(f"{name:45} {measured:6.1f} {predicted.allocated / GIB:6.1f} {errors[name]:+.1%}  {predicted.moment}")
        assert predicted.known_by == "table"
    assert max(map(abs, errors.values())) < 0.02
    assert median(map(abs, errors.values())) < 0.01


def test_parts_add_up_to_what_torch_will_say() -> None:
    found = gpu_memory(dense_7b(), STEP)
    assert sum(found.parts().values()) == found.total == found.allocated + found.context
    assert found.weights == 2 * dense_7b().parameters and found.optimizer == 8 * dense_7b().trained


def test_recomputing_and_offloading_need_less_and_dropout_more() -> None:
    order = [STEP, replace(STEP, checkpointing="selective"), FULL, OFFLOADED]
    needed = [gpu_memory(dense_7b(), work).allocated for work in order]
    assert needed == sorted(needed, reverse=True) and len(set(needed)) == len(needed)
    assert all(
        gpu_memory(dense_7b(), replace(w, dropout=True)).allocated >= n for w, n in zip(order, needed, strict=True)
    )


def test_shards_divide_weights_and_gather_them_layer_by_layer() -> None:
    facts = dense_7b(nodes=(8,))
    alone, sharded, gathered = (
        gpu_memory(facts, replace(FULL, shards=shards, reshard=reshard))
        for shards, reshard in ((1, True), (8, True), (8, False))
    )
    assert sharded.weights == alone.weights // 8 and sharded.allocated < gathered.allocated
    layer, root = 2 * facts.kinds[0].size, 2 * 2 * 32768 * 4096
    assert root + 2 * layer <= sharded.gathered < root + 2.1 * layer  # the one that computes, and the next
    assert gathered.gathered >= alone.weights


def test_parameters_in_host_memory_leave_the_gpu() -> None:
    found = gpu_memory(dense_7b(), replace(FULL, offload_params=True))
    assert found.weights == found.adapters == found.optimizer == found.gradients == 0 < found.gathered


def test_earlier_micro_batches_leave_gradients() -> None:
    once, twice = (gpu_memory(dense_7b(), replace(STEP, accumulation=n)) for n in (1, 2))
    assert twice.allocated - once.allocated == twice.gradients == 4 * dense_7b().trained


def test_the_peak_may_be_an_evaluation() -> None:
    evaluated = gpu_memory(dense_7b(), replace(FULL, batch=1, eval_batch=32))
    assert evaluated.moment == "evaluation" and evaluated.activations < evaluated.working
    assert gpu_memory(dense_7b(), replace(STEP, eval_batch=4)).moment != "evaluation"


def test_logits_count_where_the_loss_is_not_fused() -> None:
    facts = llama(2048, 8192, 16, 32, 8, 128256, head=64)
    fused, plain = (gpu_memory(facts, replace(STEP, fused_loss=fused)) for fused in (True, False))
    assert plain.loss >= 22 * STEP.tokens * 128256 > fused.loss


@pytest.mark.parametrize("model_type", sorted(activations.families()))
@pytest.mark.parametrize("compiled", [True, False])
def test_an_estimate_is_never_below_the_table(model_type: str, compiled: bool) -> None:
    """What is estimated for a family nobody has traced must not be optimistic: not for any that was traced."""
    dense = replace(dense_7b(), model_type=model_type)
    for work in (STEP, replace(STEP, packed=True), replace(STEP, dropout=True)):
        used = replace(work, compiled=compiled)
        known = gpu_memory(dense, used)
        if known.known_by == "table":
            guessed = gpu_memory(replace(dense, model_type="unheard_of"), used)
            assert guessed.known_by == "estimated" and guessed.allocated >= known.allocated
    for facts in (mistral4(8), mistral4(8, expert_rank=16)):
        used = replace(STEP, compiled=compiled)
        guessed = gpu_memory(replace(facts, model_type="unheard_of"), used)
        assert guessed.allocated >= gpu_memory(facts, used).allocated
