"""Do products of float8 codes pay, and where do they hang? `python benchmarks/gpu/fp8_probe.py [--out FOLDER]`.

Every case runs in a process (group) of its own with a limit; one that reaches it leaves its Python stacks, and is run
again with blocking launches, so that a kernel that never ends is named. Cases go from small to real sizes, eager before
compiled. Times are medians of single calls between two events on the device; errors are relative norms against the
same weights dequantised to bf16 (`bf16` and `dequantise` are exact up to rounding). `--tiny --device cpu` tries it all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# subject, variant, compiled?
CASES = [
    ("passes", "all", False),
    ("linear", "bf16", False), ("linear", "dequantise", False), ("linear", "fp8", False),
    ("experts", "bf16", False), ("experts", "dequantise", False), ("experts", "fp8", False),
    ("layer", "dequantise", False), ("layer", "fp8", False),
    ("linear", "fp8", True), ("experts", "dequantise", True), ("experts", "fp8", True),
    ("layer", "dequantise", True), ("layer", "fp8", True),
    ("linear", "blocks", False), ("linear", "dequantise", True),
]  # fmt: skip
# rows, out, in
LINEAR = [(256, 512, 512), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336)]
# tokens, experts, hidden, intermediate; four experts for each token
EXPERTS = [(512, 16, 512, 256), (8192, 128, 4096, 2048), (32768, 128, 4096, 2048)]
LAYER = [(1, 512), (2, 4096), (8, 4096)]  # rows, tokens of each, through one layer of Mistral Small 4
BEGUN = "begun"


@dataclass(frozen=True)
class Line:
    case: str
    size: str
    forward_ms: float | None = None
    both_ms: float | None = None
    error: float | None = None
    gradient_error: float | None = None
    peak_gib: float | None = None
    seconds_to_first: float | None = None
    note: str = ""


def name_of(case: tuple[str, str, bool]) -> str:
    return f"{case[0]}-{case[1]}{'-compiled' if case[2] else ''}"


# ---- a case, in its own process


def run_case(name: str, device: str, tiny: bool, limit: float) -> None:
    import faulthandler

    import torch  # before the go: the next case is imported while this one runs

    import shardtune.adapters.fused  # noqa: F401

    sys.stdin.readline()
    print(BEGUN, flush=True)
    # Several times: a place that stays is where it hangs, one that moves is slow.
    faulthandler.dump_traceback_later(max(1.0, (limit - 3) / 3), repeat=True, file=sys.stderr)
    torch.manual_seed(0)
    subject, variant, compiled = next(case for case in CASES if name_of(case) == name)
    measure = {"passes": passes, "linear": linear, "experts": experts, "layer": layer}[subject]
    for line in measure(variant, compiled, device, tiny):
        print("LINE " + json.dumps(asdict(line) | {"case": name}), flush=True)


def timed(call: Callable[[], object], device: str, tries: int = 7) -> float:
    """Median milliseconds of one call, after two that are not counted."""
    import statistics

    import torch

    times = []
    for number in range(2 + tries if device == "cuda" else 2):
        if device == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended))
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        if number == 1 and device == "cuda":
            times.clear()
    return round(statistics.median(times), 3)


def off(got: Any, meant: Any) -> float:
    return float((got.float() - meant.float()).norm() / meant.float().norm().clamp(min=1e-30))


def first_call(call: Callable[[], object], device: str) -> float:
    import torch

    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - began, 2)


def peak(device: str) -> float | None:
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None


def codes_and_scales(shape: tuple[int, ...], block: tuple[int, int], device: str) -> tuple[Any, Any]:
    """Codes over their whole range, drawn matrix by matrix, and scales that give a spread of in ** -0.5."""
    import torch

    from shardtune.kernels import fp8

    codes = torch.empty(shape, dtype=fp8.CODES, device=device)
    for matrix in codes.view(-1, *shape[-2:]):
        matrix.copy_((torch.randn(matrix.shape, device=device) * 112).clamp_(-448, 448))
    spread = shape[-1] ** -0.5 / 112
    return codes, (torch.rand(fp8.scale_shape(shape, block), device=device) + 0.5) * spread


def passes(_variant: str, _compiled: bool, device: str, tiny: bool) -> Iterator[Line]:
    import torch

    from shardtune.kernels import fp8, fp8_products

    shapes = [(4, 64, 64)] if tiny else [(1, 14336, 4096), (128, 4096, 4096)]
    for shape in shapes:
        codes, scale = codes_and_scales(shape, (1, shape[-1]), device)
        block = (1, shape[-1])
        size = "x".join(map(str, shape))
        ways: dict[str, Callable[[], object]] = {
            "transpose": lambda c=codes: fp8_products.transposed(c),
            "dequantise, one pass": lambda c=codes, s=scale, b=block: fp8.dequantize(c, s, b, torch.bfloat16),
            "dequantise, torch's two passes": lambda c=codes, s=scale, b=block: fp8.dequantize_rows(
                c, s, b, 0, torch.bfloat16
            ),
        }
        for note, call in ways.items():
            yield Line("", size, forward_ms=timed(call, device), note=note)
        meant = fp8.dequantize_rows(codes[:2], scale[:2], block, 0, torch.bfloat16)
        yield Line("", size, error=off(fp8.dequantize(codes[:2], scale[:2], block, torch.bfloat16), meant), note="same")
        del codes, scale, ways, call, meant
    for rows, columns in [(64, 256)] if tiny else [(8192, 4096), (131072, 4096), (8192, 14336)]:
        x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        group = torch.randint(0, 8, (rows,), device=device).sort().values
        by = torch.rand(8, columns, device=device)
        for note, call in {
            "round rows": lambda x=x: fp8_products.rounded(x, x.shape[1]),
            "round rows of groups, scaled": lambda x=x, by=by, g=group: fp8_products.rounded(x, x.shape[1], by, g),
            "round pieces of 128": lambda x=x: fp8_products.rounded(x, 128),
        }.items():
            yield Line("", f"{rows}x{columns}", forward_ms=timed(call, device), note=note)


def compare(
    run: Callable[[Any], Any], twin: Callable[[Any], Any], x: Any, compiled: bool, device: str, size: str
) -> Line:
    """Times of `run`, and its distance from `twin`, of output and of x's gradient."""
    import torch

    def both(function: Callable[[Any], Any]) -> tuple[Any, Any]:
        x.grad = None
        out = function(x)
        out.backward(pull)
        return out.detach(), x.grad

    with torch.no_grad():
        pull = torch.randn_like(twin(x))
    meant = both(twin)
    fast = torch.compile(run, fullgraph=True) if compiled else run
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first = first_call(lambda: both(fast), device)
    got, held = both(fast), peak(device)
    forward = None  # without gradients it would be compiled a second time
    if not compiled:
        with torch.no_grad():
            forward = timed(lambda: fast(x), device)
    return Line(
        "", size, forward, timed(lambda: both(fast), device), off(got[0], meant[0]), off(got[1], meant[1]), held, first
    )


def linear(variant: str, compiled: bool, device: str, tiny: bool) -> Iterator[Line]:
    import torch
    from torch.nn import functional as F

    from shardtune.kernels import fp8
    from shardtune.kernels.fp8_lora import fp8_lora_linear
    from shardtune.kernels.lora import lora_linear

    for rows, out, into in [(64, 512, 512)] if tiny else LINEAR[-1:] if compiled else LINEAR:
        block = (128, 128) if variant == "blocks" else (1, into)
        codes, scale = codes_and_scales((out, into), block, device)
        weight = fp8.dequantize(codes, scale, block, torch.bfloat16)
        a = (torch.randn(16, into, device=device) * into**-0.5).bfloat16()
        b = (torch.randn(out, 16, device=device) * 0.02).bfloat16()
        x = torch.randn(rows, into, device=device).bfloat16().requires_grad_()

        def twin(x: Any, w: Any = weight, a: Any = a, b: Any = b) -> Any:
            return lora_linear(F.silu(x), w, None, a, b, 2.0)

        def run(x: Any, c: Any = codes, s: Any = scale, k: Any = block, a: Any = a, b: Any = b) -> Any:
            return fp8_lora_linear(F.silu(x), c, s, k, None, a, b, 2.0, None, variant != "dequantise")

        yield compare(twin if variant == "bf16" else run, twin, x, compiled, device, f"{rows}x{out}x{into}")


def experts(variant: str, compiled: bool, device: str, tiny: bool) -> Iterator[Line]:
    import torch
    from torch.nn import functional as F

    from shardtune.kernels.experts import ExpertWeight, routed_experts

    def gate(both: Any) -> Any:
        left, right = both.chunk(2, dim=-1)
        return F.silu(left) * right

    # Compiled, the real size alone: each size is compiled anew.
    for count, number, hidden, inner in [(96, 8, 64, 32)] if tiny else EXPERTS[-1:] if compiled else EXPERTS:
        shapes = (number, 2 * inner, hidden), (number, hidden, inner)
        held = [(*codes_and_scales(shape, (1, shape[-1]), device), (1, shape[-1])) for shape in shapes]
        # Experts that few tokens want, and some that many want.
        liking = torch.randn(count, number, device=device) + torch.randn(number, device=device)
        weights, index = liking.softmax(-1).topk(4, dim=-1)
        weights = weights.bfloat16()
        x = torch.randn(count, hidden, device=device).bfloat16().requires_grad_()

        def of(both: list[ExpertWeight], index: Any = index, weights: Any = weights) -> Callable[[Any], Any]:
            return lambda tokens: routed_experts(tokens, index, weights, *both, gate)

        twin = [ExpertWeight(*one) for one in held]
        own = [ExpertWeight(*one, fp8_compute=variant == "fp8") for one in held]
        if variant == "bf16":
            own = [ExpertWeight(one.values(torch.bfloat16)) for one in twin]
        yield compare(of(own), of(twin), x, compiled, device, f"{count}t {number}e {hidden}x{inner}")


def layer(variant: str, compiled: bool, device: str, tiny: bool) -> Iterator[Line]:
    import torch

    from shardtune.model.quantized import enable_fp8_compute

    model = mistral4_layer(device, tiny)
    core = model.get_base_model().model.layers[0]

    def step(ids: Any) -> tuple[float, dict[str, Any]]:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    sizes = [(1, 32), (2, 32)] if tiny else LAYER
    sizes = sizes[-1:] if compiled else sizes
    batches = [torch.randint(10, 1000, size, device=device) for size in sizes]
    twins = [step(ids) for ids in batches]
    if variant == "fp8":
        count, left = enable_fp8_compute(model)
        assert count and (tiny or not left), (count, left)
    if compiled:
        core.forward = torch.compile(core.forward, dynamic=False)
    for size, ids, (loss, gradients) in zip(sizes, batches, twins, strict=True):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first = first_call(lambda ids=ids: step(ids), device)
        got_loss, got = step(ids)
        held = peak(device)
        errors = sorted(off(got[name], meant) for name, meant in gradients.items())
        forward = None
        if not compiled:
            with torch.no_grad():
                forward = timed(lambda ids=ids: model(input_ids=ids), device, 5)
        both = timed(lambda ids=ids: step(ids), device, 5)
        note = f"the median gradient's; the farthest is off by {errors[-1]:.3g}"
        middle = errors[len(errors) // 2]
        yield Line("", f"{size[0]}x{size[1]} tokens", forward, both, off(got_loss, loss), middle, held, first, note)


def mistral4_layer(device: str, tiny: bool) -> Any:
    """One layer of Mistral Small 4 held in FP8, LoRA on attention and the shared expert, as a run holds it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Mistral4Config, Mistral4ForCausalLM

    from shardtune.adapters.fused import use_fused_lora
    from shardtune.kernels import fp8
    from shardtune.model.quantized import fp8_candidates, use_fp8_storage
    from shardtune.model.stored_names import SCALE

    small = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8,
             "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
             "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
    config = Mistral4Config(num_hidden_layers=1, vocab_size=1024, pad_token_id=1, **(small if tiny else {}))
    with torch.device(device):
        model = Mistral4ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    held = {name: fp8.quantize_rows(model.get_parameter(name).detach()) for name in fp8_candidates(model)}
    use_fp8_storage(model, {name: (1, codes.shape[-1]) for name, (codes, _) in held.items()})
    with torch.no_grad():
        for name, (codes, scale) in held.items():
            model.get_parameter(name).copy_(codes)
            model.get_parameter(name + SCALE).copy_(scale)
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, init_lora_weights=False),
        autocast_adapter_dtype=False,
    )  # fmt: skip
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = (parameter.data * 0.1).to(torch.bfloat16)
    adapted.enable_input_require_grads()
    assert use_fused_lora(adapted) == (len(targets), len(targets))
    return adapted.train()


# ---- all of them


class Child:
    """A case whose process is started ahead, imports, and begins when it is told."""

    def __init__(self, name: str, asked: argparse.Namespace, limit: float, **environment: str) -> None:
        self.name, self.limit = name, limit
        # What a killed process was compiling stays in its caches half written: every case has its own.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.log = self.folder / "log"
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }
        words = [sys.executable, __file__, "--case", name, "--device", asked.device, "--limit", str(limit)]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*words, *(["--tiny"] if asked.tiny else [])], stdin=subprocess.PIPE, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **caches, **environment},
            )  # fmt: skip

    def finish(self) -> tuple[list[dict[str, Any]], str]:
        """Its lines, and why it ended where it did not end well."""
        assert self.process.stdin is not None
        why = ""
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()
            deadline = time.monotonic() + 20  # it may still be importing
            while BEGUN not in self.log.read_text(errors="replace") and self.process.poll() is None:
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("import", 20)
                time.sleep(0.05)
            code = self.process.wait(self.limit)
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"not done after {self.limit:.0f} s"
        except BrokenPipeError:
            why = "ended before it began"
        finally:
            self.end()
        text = self.log.read_text(errors="replace")
        shutil.rmtree(self.folder, ignore_errors=True)
        lines = [json.loads(line.removeprefix("LINE ")) for line in text.splitlines() if line.startswith("LINE ")]
        return lines, why and f"{why}\n{tail(text)}"

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def tail(text: str) -> str:
    """The end of a log; where there are stack dumps, where each of them stood, and the last one whole."""
    dumps = text.split("Timeout (")[1:]
    if not dumps:
        return text[-2500:]
    places = [[line.strip() for line in dump.splitlines() if line.strip().startswith("File")][:2] for dump in dumps]
    return "\n".join(f"stood at {' < '.join(place)}" for place in places) + "\n" + dumps[-1][:6000]


def show(line: dict[str, Any]) -> None:
    forms = {"forward_ms": "9.3f", "both_ms": "9.3f", "error": "9.2e", "gradient_error": "9.2e", "peak_gib": "7.1f",
             "seconds_to_first": "7.2f"}  # fmt: skip
    numbers = (
        format(line[key], form) if line[key] is not None else "-".rjust(int(form.split(".")[0]))
        for key, form in forms.items()
    )  # fmt: skip
    print(f"{line['case']:27} {line['size']:24} {' '.join(numbers)}  {line['note']}", flush=True)


def main() -> None:
    names = [name_of(case) for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script itself")
    parser.add_argument("--limit", type=float, default=40, help="seconds a case may take once it has begun")
    parser.add_argument("--budget", type=float, default=195, help="seconds after which no case is begun")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        run_case(asked.case, asked.device, asked.tiny, asked.limit)
        return
    began, wanted, found = time.monotonic(), asked.cases or names, []
    print(
        f"{'case':27} {'size':24} {'fwd ms':>9} {'both ms':>9} {'error':>9} {'grad err':>9} {'GiB':>7} {'first s':>7}"
    )
    ahead = Child(wanted[0], asked, asked.limit)
    for number, name in enumerate(wanted):
        now = ahead
        if number + 1 < len(wanted):
            ahead = Child(wanted[number + 1], asked, asked.limit)
        if time.monotonic() - began > asked.budget:
            now.end()
            shutil.rmtree(now.folder, ignore_errors=True)
            print(f"{name:27} not begun: the budget of {asked.budget:.0f} s is spent", flush=True)
            continue
        lines, why = now.finish()
        if why.startswith("not done") and time.monotonic() - began < asked.budget - 30:
            _, again = Child(name, asked, min(25.0, asked.limit), CUDA_LAUNCH_BLOCKING="1").finish()
            why += f"\n---- with blocking launches: {again or 'it ended'}"
        for line in lines:
            show(line)
        if why:
            print(f"{name:27} {why}", flush=True)
        found.append({"case": name, "lines": lines, "failure": why})
    if asked.out is not None:
        (asked.out / "fp8_probe.json").write_text(json.dumps(found, indent=2))
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
