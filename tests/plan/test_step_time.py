"""Seconds of a step: against measured runs, and how they change with what is asked."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from measured_steps import BEGIN, END, MEASURED, Measured, table
from model_facts import dense_7b, llama, mistral4, smollm_135m
from running import REPOSITORY

from shardtune.plan.catalogue import Cluster, for_cores, load_catalogue
from shardtune.plan.facts import LayerKind
from shardtune.plan.layer_cost import products_of
from shardtune.plan.run_time import run_time
from shardtune.plan.step_time import computed_tokens, dominated_from, scaling, step_time
from shardtune.plan.work import Work

CATALOGUE = load_catalogue()
STEP = Work(4, 4096, checkpointing="none", compiled=True)


def cluster(*nodes: int, gpu: str = "H200", network: str = "") -> Cluster:
    return CATALOGUE.cluster(CATALOGUE.gpu(gpu), nodes or (1,), network)


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_a_measured_step_is_predicted_within_a_tenth(case: Measured) -> None:
    assert abs(case.error) <= 0.1


def test_steps_that_no_constant_was_fitted_to_are_predicted_as_well() -> None:
    held_out = [abs(case.error) for case in MEASURED if not case.fitted]
    assert len(held_out) >= 5 and median(held_out) <= 0.05


def test_the_table_in_the_docs_is_the_current_one() -> None:
    page = (REPOSITORY / "docs" / "plan.md").read_text(encoding="utf-8")
    assert page.split(BEGIN)[1].split(END)[0].strip() == table()


@pytest.mark.parametrize(("batch", "length", "measured"), [(1, 256, 1.5), (8, 72, 3.3)])
def test_a_step_on_two_cores_is_of_the_measured_order(batch: int, length: int, measured: float) -> None:
    two = CATALOGUE.cluster(for_cores(CATALOGUE.gpu("CPU"), 2), (1,))
    work = Work(batch, length, value_bytes=4, checkpointing="full")
    step = step_time(smollm_135m(dtype="float32", device="cpu"), work, two)
    assert measured / 2 < step.seconds < measured * 2


def test_recomputation_costs_a_third_and_selective_only_what_is_between_the_products() -> None:
    steps = [
        step_time(dense_7b(), replace(STEP, checkpointing=each), cluster()) for each in ("none", "selective", "full")
    ]
    none, selective, full = steps
    assert none.seconds < selective.seconds < 1.1 * none.seconds
    assert 1.3 < full.seconds / none.seconds < 1.5
    assert (selective.products, selective.attention) == (none.products, none.attention)


def test_documents_of_packed_rows_and_windows_shorten_attention() -> None:
    whole = step_time(dense_7b(), replace(STEP, batch=1, length=16384), cluster())
    documents = step_time(dense_7b(), replace(STEP, batch=1, length=16384, packed=True, document=512), cluster())
    assert documents.attention < whole.attention / 4 and documents.products == whole.products
    facts = dense_7b()
    windowed = replace(facts, kinds=(replace(facts.kinds[0], window=1024),))
    assert step_time(windowed, replace(STEP, batch=1, length=16384), cluster()).attention < whole.attention / 2


def test_attention_of_small_heads_reaches_less() -> None:
    work = replace(STEP, batch=1, length=32768)
    small, large = (step_time(llama(2048, 8192, 16, h, 8, 32000, head=2048 // h), work, cluster()) for h in (32, 16))
    assert 1.3 < small.attention / large.attention < 1.5


def test_a_float8_base_is_dequantised_unless_it_is_multiplied_in_fp8() -> None:
    facts, held = mistral4(8, quantised=True), replace(STEP, fp8=True)
    bf16, dequantised = step_time(facts, STEP, cluster()), step_time(facts, held, cluster())
    products = step_time(facts, replace(held, fp8_compute=True), cluster())
    # 3.2 billion expert weights, three bytes each, in both passes of eight layers: measured 55 ms with a third pass.
    assert dequantised.dequantise == pytest.approx(55e-3 * 2 / 3, rel=0.1) and bf16.dequantise == 0
    assert products.seconds < bf16.seconds < dequantised.seconds
    assert products.dequantise < dequantised.dequantise  # transposed codes, backward
    old = step_time(facts, replace(held, fp8_compute=True), cluster(gpu="A100"))
    assert old == step_time(facts, held, cluster(gpu="A100"))  # no FP8 units: dequantised either way


def test_a_bf16_checkpoint_that_is_held_in_float8_keeps_its_router_as_it_is() -> None:
    stored, made = mistral4(8, quantised=True), mistral4(8)
    held = replace(STEP, fp8=True)
    assert step_time(made, held, cluster()) == step_time(stored, held, cluster())


def test_projections_of_a_convolution_are_products_and_its_kernel_and_biases_are_not() -> None:
    shapes = {
        "conv.in_proj.weight": (192, 64),
        "conv.conv.weight": (64, 1, 3),
        "mlp.experts.gate_up_proj": (4, 32, 64),
        "mlp.experts.gate_up_proj_bias": (4, 32),
        "operator_norm.weight": (64,),
    }
    facts = mistral4(1)
    found = products_of(facts, LayerKind(1, shapes, frozenset(), {"conv.in_proj": 8}), STEP)
    names = {product.name: (product.visits, product.rank) for product in found}
    assert names == {"conv.in_proj.weight": (1, 8), "mlp.experts.gate_up_proj": (4, 0)}


def test_a_small_model_waits_for_the_host_and_more_so_uncompiled() -> None:
    small = step_time(smollm_135m(), Work(1, 512, checkpointing="none", compiled=True), cluster())
    assert small.launches > 0.8 * small.seconds
    assert step_time(dense_7b(), STEP, cluster()).launches == 0
    assert (
        step_time(dense_7b(), replace(STEP, compiled=False), cluster()).seconds
        > 1.1 * step_time(dense_7b(), STEP, cluster()).seconds
    )


def test_plain_kernels_are_slower_than_fused_ones() -> None:
    fused = step_time(dense_7b(), STEP, cluster())
    plain = step_time(dense_7b(), replace(STEP, fused_lora=False, fused_loss=False), cluster())
    assert plain.adapters > fused.adapters and plain.head > fused.head


def test_short_rows_that_are_not_packed_are_padded_to_the_longest_of_their_batch() -> None:
    short = replace(STEP, fill=0.1)
    assert computed_tokens(replace(short, batch=1)) == pytest.approx(409.6)
    assert computed_tokens(short) == pytest.approx(1.83 * 0.1 * short.tokens, rel=0.01)
    assert computed_tokens(replace(short, fill=0.9)) == short.tokens
    assert computed_tokens(replace(short, packed=True)) == short.tokens
    assert step_time(dense_7b(), short, cluster()).tokens == pytest.approx(0.1 * short.tokens)


def test_gathers_hide_behind_compute_where_the_link_is_fast_and_dominate_where_it_is_not() -> None:
    facts = llama(8192, 28672, 80, 64, 8, 128256, nodes=(8, 8))
    work = replace(STEP, batch=2, shards=16)
    fast, slow = (step_time(facts, work, cluster(8, 8, network=name)) for name in ("NDR", "Ethernet-10"))
    # 140 GB of layers, gathered twice: 15/16 of it leave a node through 8 cards of 45 GB/s, or one of 1.1 GB/s.
    assert fast.communication == pytest.approx(2 * 140e9 * 15 / 16 / 360e9, rel=0.1)
    assert fast.exposed < 0.1 * fast.compute < slow.compute < slow.exposed
    assert slow.communication == pytest.approx(2 * 140e9 * 15 / 16 / 1.1e9, rel=0.1)
    alone = replace(work, prefetch=0)
    assert step_time(facts, alone, cluster(8, 8)).exposed == pytest.approx(fast.communication, rel=0.01)


def test_a_base_that_every_rank_holds_is_not_gathered() -> None:
    replicated = step_time(dense_7b(), replace(STEP, shards=1), cluster(8, 8, 8, 8, network="Ethernet-10"))
    sharded = step_time(dense_7b(), replace(STEP, shards=32), cluster(8, 8, 8, 8, network="Ethernet-10"))
    assert replicated.communication < 0.02 * sharded.communication
    # 42M adapter values gathered in bf16 and their gradients reduced in float32; 32 ranks hold a part each.
    assert replicated.communication == pytest.approx(42e6 * 6 * 31 / 32 / 1.1e9, rel=0.1)
    assert step_time(dense_7b(), STEP, cluster()).communication == 0
    assert replicated.tokens == 32 * STEP.tokens


def test_slow_links_cost_what_docs_parallel_says_for_the_119b_model() -> None:
    facts, work = mistral4(36, quantised=True), replace(STEP, checkpointing="full", fp8=True, fp8_compute=True)
    alone = step_time(facts, work, cluster())
    for network, of_full in (("Ethernet-100", 0.09), ("Ethernet-10", 0.009)):
        full = step_time(facts, replace(work, shards=3), cluster(1, 1, 1, network=network))
        assert alone.seconds / full.seconds == pytest.approx(of_full, rel=0.2)
    replicated = step_time(facts, work, cluster(1, 1, 1, network="Ethernet-10"))
    assert alone.seconds / replicated.seconds > 0.8


def test_groups_within_nodes_send_only_gradients_between_them() -> None:
    facts = dense_7b()
    hybrid = step_time(facts, replace(STEP, shards=8), cluster(8, 8, network="Ethernet-10"))
    full = step_time(facts, replace(STEP, shards=16), cluster(8, 8, network="Ethernet-10"))
    assert hybrid.communication < full.communication / 10


def test_what_is_kept_gathered_is_sent_once_a_step() -> None:
    work = replace(STEP, shards=16, accumulation=4)
    freed, kept = (step_time(dense_7b(), replace(work, reshard=each), cluster(8, 8)) for each in (True, False))
    assert freed.communication == pytest.approx(8 * kept.communication, rel=0.2)


def test_offloaded_weights_cost_what_copying_them_takes_longer_than_computing() -> None:
    work = replace(STEP, batch=1, length=1024, offload_params=True)
    few, many = step_time(dense_7b(), work, cluster()), step_time(dense_7b(), replace(work, batch=16), cluster())
    copied = 2 * 14.2e9 / 50e9  # bytes of the weights, in both passes
    assert copied - few.compute < few.offload < copied
    assert many.offload < 0.1 * many.seconds


def test_more_nodes_lose_what_links_cost_and_it_is_said_from_where_on_they_dominate() -> None:
    facts = llama(8192, 28672, 80, 64, 8, 128256)

    def sharded(nodes: int) -> Work:
        return replace(STEP, batch=1, shards=8 * nodes)

    fast = scaling(facts, sharded, cluster(8))
    assert [point.nodes for point in fast] == [1, 2, 4, 8, 16, 32, 64]
    assert fast[0].efficiency == 1 and fast[-1].efficiency > 0.7
    assert fast[-1].step.tokens == 64 * fast[0].step.tokens  # the effective batch grows with the nodes
    slow = scaling(facts, sharded, cluster(8, network="Ethernet-25"))
    assert dominated_from(slow) == 2 and slow[1].efficiency < 0.2 and slow[1].communication > 0.5
    replicated = scaling(dense_7b(), STEP, cluster(8, network="Ethernet-25"))
    assert dominated_from(replicated) is None and replicated[-1].efficiency > 0.9
    # 24 ranks hold a replica on three nodes; other numbers of nodes that 24 does not divide are sharded as a whole.
    thirds = scaling(dense_7b(), replace(STEP, shards=24), cluster(8, 8, 8), counts=(1, 2, 3, 6))
    assert [point.step.communication > 0 for point in thirds] == [True] * 4


def test_a_run_is_its_steps_with_evaluations_saves_and_reading_the_weights() -> None:
    work, here = replace(STEP, eval_batch=8), cluster()
    run = run_time(dense_7b(), work, here, steps=100, evaluations=2, eval_rows=800, saves=3)
    assert run.training == pytest.approx(100 * step_time(dense_7b(), work, here).seconds)
    assert 20 < run.starting < 120  # 14 GB at 1 GB/s, and compiling
    # As many rows as in 400 steps, forward alone: not half of a step, whose weights need no gradient.
    assert run.evaluating == pytest.approx(400 * 0.45 * run.training / 100, rel=0.05)
    assert run.seconds > run.training + run.evaluating + run.saving
    faster = run_time(dense_7b(), work, here, steps=100, disk=10e9)
    assert faster.starting < run.starting
