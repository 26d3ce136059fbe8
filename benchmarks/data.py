"""How fast is data prepared, in how much memory, and how full are packs? Against TRL's own preparation.

Everything is measured in one run, each preparation in a process of its own, and reported as ratios: seconds differ
between machines.

    python benchmarks/data.py [--repeats 3] [--rows 50000] [--memory-rows 10000 50000 200000] [--json out.json]

What is counted:
- rows/s: a generated JSONL chat set (1 to 3 turns, Zipf-like words), loss on the assistant's turns, cut at 1024 tokens,
  two processes at work. TRL: seconds inside `SFTTrainer._prepare_dataset` (dataset_num_proc=2, assistant_only_loss, a
  ChatML template with generation marks); the reading of the file before it is told apart and not counted against it.
  shardtune: seconds of `prepare`, reading, hashing of the file, starting of workers and writing included.
- CPU seconds: of the preparing process and all below it (as last seen, every 0.5 s). Unlike rows/s they hardly depend
  on who else uses the machine.
- peak memory: the largest sum, over the preparing process and all below it, of proportional set sizes (a page that n
  processes share counts 1/n in each), every 50 ms (0.5 s in the comparison with TRL). `above start` leaves out what was
  there before `prepare` began.
- cache: seconds of `prepare` in a new process that finds the set prepared; importing libraries not counted.
- packing: CPU seconds of `pack` on one core for 1M instruction-like lengths, capacity 4096, and the share of real
  tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
VOCABULARY = 3000
ZIPF = list(accumulate(1 / (rank + 1) for rank in range(VOCABULARY)))
WORKERS = 2
MAX_LENGTH = 1024


def sentences(rng: random.Random, words: list[str], count: int) -> str:
    picked = rng.choices(words, cum_weights=ZIPF, k=count)
    return " ".join(picked).capitalize() + "."


def make_words(rng: random.Random) -> list[str]:
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er")]
    return ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(VOCABULARY)]


def make_rows(file: Path, rows: int) -> None:
    """A chat set: 1 to 3 turns, questions of 5 to 40 words, answers of 10 to 150."""
    rng = random.Random(0)
    words = make_words(rng)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(rows):
            messages = [{"role": "system", "content": "You are a helpful assistant."}] if rng.random() < 0.3 else []
            for _ in range(rng.choice((1, 1, 2, 3))):
                messages.append({"role": "user", "content": sentences(rng, words, rng.randint(5, 40))})
                messages.append({"role": "assistant", "content": sentences(rng, words, rng.randint(10, 150))})
            out.write(json.dumps({"messages": messages}) + "\n")


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE with ChatML's tokens, trained on the words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    rng = random.Random(0)
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = make_words(rng)
    tokenizer.train_from_iterator([sentences(rng, words, 100) for _ in range(2000)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    ).save_pretrained(folder)


def make_model(folder: Path, tokenizer: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    size = len(AutoTokenizer.from_pretrained(tokenizer))
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).save_pretrained(folder)


class Watch:
    """Memory (MiB) and CPU seconds of this process and all below it.

    Args:
        seconds: Between two looks. A look costs a few milliseconds of a core, so it is rare where speed is measured.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start = self.peak = 0.0
        self._used: dict[int, float] = {}
        self._look()
        self.start, self._before = self.peak, sum(self._used.values())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, float]:
        self._look()
        self._stop.set()
        self._thread.join()
        return {"peak": self.peak, "start": self.start, "cpu": sum(self._used.values()) - self._before}

    def _watch(self) -> None:
        while not self._stop.wait(self.seconds):
            self._look()

    def _look(self) -> None:
        import psutil

        total = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                times = process.cpu_times()
            except (OSError, psutil.Error):
                continue  # it has just ended
            self._used[process.pid] = times.user + times.system
            total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        self.peak = max(self.peak, total / 1024)


def run_shardtune(data: Path, tokenizer: Path, cache: Path, *, look_every: float = 0.5) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from shardtune.config.schema import DataSection
    from shardtune.data.prepare import prepare

    section = DataSection(dataset_name_or_path=str(data), max_length=MAX_LENGTH, cache_dir=str(cache))
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    watch = Watch(look_every)
    began = time.perf_counter()
    found = prepare(section, 0, loaded, str(tokenizer), workers=WORKERS)
    seconds = time.perf_counter() - began
    used = watch.end()
    counts = found.train.counts
    return {
        "seconds": seconds, "rows": counts.rows, "tokens": counts.tokens, "supervised": counts.supervised,
        "from_cache": found.from_cache, **used,
    }  # fmt: skip


def run_trl(data: Path, tokenizer: Path, model: Path) -> dict[str, Any]:
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    spent: dict[str, float] = {}
    inner = SFTTrainer._prepare_dataset

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = Watch(0.5)
        began = time.perf_counter()
        try:
            return inner(self, *args, **kwargs)
        finally:
            spent["seconds"] = time.perf_counter() - began
            spent.update(watch.end())

    SFTTrainer._prepare_dataset = timed
    began = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(data), split="train")
    reading = time.perf_counter() - began
    settings = SFTConfig(
        output_dir=str(model / "out"), dataset_num_proc=WORKERS, assistant_only_loss=True, max_length=MAX_LENGTH,
        use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        train_dataset=rows,
        args=settings,
    )
    made = trainer.train_dataset.with_format("numpy")
    labels = (batch for part in made.iter(1000) for batch in part["labels"])
    tokens = supervised = 0
    for row in labels:
        tokens += len(row)
        supervised += int((row[1:] != -100).sum())
    return {**spent, "reading": reading, "rows": len(made), "tokens": tokens, "supervised": supervised}


def run_packing() -> dict[str, Any]:
    import numpy as np

    from shardtune.data.packing import pack

    normal = np.random.default_rng(0).standard_normal(1_000_000)
    lengths = np.clip(np.exp(normal * 0.8 + 5.2), 16, 4096).astype(np.int64)
    began = time.process_time()
    packs = pack(lengths, 4096)
    return {"seconds": time.process_time() - began, "efficiency": packs.efficiency(lengths, 4096)}


def one(kind: str, *paths: Path) -> dict[str, Any]:
    """Run one measurement in a process of its own, with `datasets` caches nobody has filled."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HF_HOME": home, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--one", kind, *map(str, paths)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tokenizer, model, data = folder / "tokenizer", folder / "model", folder / "rows.jsonl"
    make_tokenizer(tokenizer)
    make_model(model, tokenizer)
    make_rows(data, options.rows)
    results: dict[str, Any] = {"trl": [], "shardtune": [], "cache": [], "memory": {}, "cores": os.cpu_count()}
    for number in range(options.repeats):
        results["trl"].append(one("trl", data, tokenizer, model))
        results["shardtune"].append(one("shardtune", data, tokenizer, folder / f"cache{number}"))
        results["cache"].append(one("shardtune", data, tokenizer, folder / f"cache{number}"))
        assert results["cache"][-1]["from_cache"]
        mine, theirs = results["shardtune"][-1], results["trl"][-1]
        same = [(mine[name], theirs[name]) for name in ("rows", "tokens", "supervised")]
        assert all(a == b for a, b in same), f"not the same rows: {same}"
    for rows in options.memory_rows:
        make_rows(folder / "memory.jsonl", rows)
        results["memory"][rows] = one("memory", folder / "memory.jsonl", tokenizer, folder / f"memory{rows}")
    results["packing"] = one("packing")
    return results


def tell(results: dict[str, Any], rows: int) -> None:
    def median(name: str, field: str = "seconds") -> float:
        return statistics.median(result[field] for result in results[name])

    first = results["shardtune"][0]
    print(f"{rows:,} chat rows, {first['tokens']:,} tokens, {first['supervised']:,} supervised in both; ", end="")
    print(f"medians of {len(results['trl'])}; {WORKERS} processes on {results['cores']} cores")
    for name, label in (("trl", "TRL _prepare_dataset"), ("shardtune", "shardtune prepare")):
        seconds, cpu = median(name), median(name, "cpu")
        print(f"{label:<28}{seconds:8.2f} s{rows / seconds:10,.0f} rows/s   {cpu:8.2f} CPU s", end="")
        print(f"   peak {median(name, 'peak'):6,.0f} MiB")
    wall, cpu = median("trl") / median("shardtune"), median("trl", "cpu") / median("shardtune", "cpu")
    print(f"{'':<28}{wall:8.1f} × TRL's rows/s, {cpu:.1f} × fewer CPU seconds", end="")
    print(f"   (TRL's reading of the file before, {median('trl', 'reading'):.1f} s, not counted)")
    print(f"{'second start, from cache':<28}{median('cache'):8.2f} s")
    for count, result in results["memory"].items():
        above = result["peak"] - result["start"]
        print(f"{f'memory, {count:,} rows':<28}{result['peak']:8,.0f} MiB peak, {above:,.0f} MiB above start", end="")
        print(f"   ({result['seconds']:.1f} s)")
    packing = results["packing"]
    print(f"{'packing 1M rows':<28}{packing['seconds']:8.2f} s   {packing['efficiency']:.2%} of the tokens are real")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--memory-rows", type=int, nargs="*", default=[10_000, 50_000, 200_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, paths = options.one[0], [Path(part) for part in options.one[1:]]
        watched = partial(run_shardtune, look_every=0.05)
        runs = {"trl": run_trl, "shardtune": run_shardtune, "memory": watched, "packing": run_packing}
        print(json.dumps(runs[kind](*paths)))
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options, Path(folder))
    tell(results, options.rows)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
