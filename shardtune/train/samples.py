"""What does the model say, before and after? Greedy answers to some rows, by all ranks together, written as events.

Every rank runs the same forward passes (a sharded layer is gathered by all or by none), with the batch layout and the
attention code of training: no cache of keys and values, which variable-length attention has no place for. What comes
next is rank 0's word, so that ranks that round differently still agree when an answer ends. No random number is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist

from shardtune.data.collate import REAL_TOKENS, SUPERVISED, TARGETS, Collator
from shardtune.data.show_rows import spread
from shardtune.data.tokens import IGNORED
from shardtune.observe.samples import SampleAnswer, show_samples
from shardtune.parallel.shard import reshard_all

if TYPE_CHECKING:
    from shardtune.data.prepared import Prepared
    from shardtune.parallel.processes import Processes
    from shardtune.train.loop import Training


@dataclass(frozen=True)
class Question:
    """One row: what the model is given, and what the row goes on with."""

    row: str
    prompt: tuple[int, ...]
    expected: tuple[int, ...]


class Samples:
    """Asks a run's model the same questions before and after training.

    Args:
        stopped: Asked by every rank before each token: no more of them once the run is to stop.
    """

    def __init__(self, training: Training, stopped: Callable[[], bool]) -> None:
        setup = training.setup
        self.context, self.model, self.collator = training.context, setup.model, setup.data.collator
        self.section, self.tokenizer, self.watchdog = setup.config.train, setup.tokenizer, training.watchdog
        self.stopped = stopped
        data, section = setup.data, self.section
        name, rows = ("validation", data.val) if data.val is not None else ("train", data.train)
        self.questions = questions(
            rows.prepared, name, section.samples, section.sample_tokens, self.tokenizer.bos_token_id
        )

    def ask(self, when: Literal["before", "after"]) -> None:
        """Generate and write the answers. A collective: every rank calls it."""
        each = self.section.per_device_eval_batch_size
        for start in range(0, len(self.questions), each):
            some = self.questions[start : start + each]
            said = self._generate([question.prompt for question in some], self._ends(some))
            if said is None:
                return
            if self.context.processes.is_main:
                for question, ids in zip(some, said, strict=True):
                    self._write(when, question, ids)

    def show(self) -> None:
        """Both answers to each question, on rank 0; those from before this process out of its events."""
        if self.context.processes.is_main and self.questions:
            show_samples(self.context.console, written(self.context.events.lines()))

    def _generate(self, prompts: list[tuple[int, ...]], ends: Collection[int]) -> list[list[int]] | None:
        model = self.model
        most = getattr(model.config, "max_position_embeddings", None)
        tokens = self.section.sample_tokens
        if most is not None:
            tokens = min(tokens, most - max(map(len, prompts)))
        was_training = model.training
        reshard_all(model)  # gathered before the weights were last changed
        model.eval()
        try:
            return greedy(
                lambda rows: next_tokens(model, self.collator, rows, self.context.processes.device),
                prompts, tokens, ends, self.context.processes, self._goes_on,
            )  # fmt: skip
        finally:
            reshard_all(model)  # whoever looks at the parameters next means the shards
            model.train(was_training)

    def _goes_on(self) -> bool:
        self.watchdog.beat()
        return not self.stopped()

    def _ends(self, some: Sequence[Question]) -> set[int]:
        """The end-of-sequence token, and what ends the rows themselves: chat templates end a turn with their own."""
        special = set(self.tokenizer.all_special_ids)
        ends = {question.expected[-1] for question in some if question.expected} & special
        return ends | ({self.tokenizer.eos_token_id} - {None})

    def _write(self, when: str, question: Question, ids: list[int]) -> None:
        self.context.events.write(
            "sample",
            when=when,
            row=question.row,
            prompt=str(self.tokenizer.decode(list(question.prompt))),
            answer=self._text(ids),
            expected=self._text(question.expected),
        )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def questions(prepared: Prepared, name: str, number: int, tokens: int, bos: int | None) -> list[Question]:
    """Rows at equal distances, each up to its first supervised token, and what follows (at most `tokens`).

    Of several supervised stretches (a conversation) the first one follows. A row that is supervised from its start (a
    plain text) is continued from its middle.
    """
    found = []
    for row in spread(len(prepared), number) if number else ():
        ids, labels = prepared.row(row)
        carries_loss = np.append(labels != IGNORED, False)
        first = int(carries_loss.argmax())
        if first == 0 or (first == 1 and ids[0] == bos):
            first = max(1, len(ids) // 2)
        end = first + int((~carries_loss[first:]).argmax())
        expected = tuple(ids[first : min(end, first + tokens)].tolist())
        found.append(Question(f"{name}:{row}", tuple(ids[:first].tolist()), expected))
    return found


def greedy(
    next_of: Callable[[list[list[int]]], list[int]],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ends: Collection[int],
    processes: Processes,
    goes_on: Callable[[], bool],
) -> list[list[int]] | None:
    """The likeliest continuation of each prompt, token by token, without its end token; None when it was cut short.

    Args:
        next_of: The next token of each of some rows; every rank calls it equally often.
        tokens: At most so many new ones.
        ends: Token ids that end an answer.
        goes_on: Asked before each token; must say the same on every rank.
    """
    rows = [list(prompt) for prompt in prompts]
    open_rows = list(range(len(rows)))
    for _ in range(tokens):
        if not open_rows:
            break
        if not goes_on():
            return None
        chosen = torch.tensor(next_of([rows[index] for index in open_rows]))
        if processes.world_size > 1:
            dist.broadcast(chosen, src=0, group=processes.control)
        still = []
        for index, token in zip(open_rows, chosen.tolist(), strict=True):
            if token not in ends:
                rows[index].append(token)
                still.append(index)
        open_rows = still
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def next_tokens(
    model: torch.nn.Module, collator: Collator, rows: Sequence[Sequence[int]], device: torch.device
) -> list[int]:
    """The likeliest next token of each row, by one forward pass of all of them as a batch of training is laid out."""
    documents = [(np.array(row), np.full(len(row), IGNORED)) for row in rows]
    # Rows of any length: nothing is to be compiled for them.
    batch = replace(collator, fill_to=None)([[document] for document in documents])
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name not in ("labels", SUPERVISED, TARGETS, REAL_TOKENS)
    }
    lengths = torch.tensor([len(row) for row in rows])
    if collator.layout == "flat":  # one row, the documents end to end
        at, row_of = lengths.cumsum(0) - 1, torch.zeros(len(rows), dtype=torch.long)
    else:
        at, row_of = lengths - 1, torch.arange(len(rows))
    kept, column = at.unique(return_inverse=True)  # the head runs on the places that are looked at alone
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = model(**inputs, use_cache=False, logits_to_keep=kept.to(device)).logits
    if logits.shape[1] != len(kept):  # a model that does not know the argument
        column = at
    chosen: list[int] = logits[row_of.to(device), column.to(device)].argmax(-1).tolist()
    return chosen


def written(log: Iterable[str]) -> list[SampleAnswer]:
    """The last answers to each row in the lines of an event log, in the order the rows were first asked."""
    found: dict[str, dict[str, str]] = {}
    for line in log:
        if '"event": "sample"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:  # cut by a crash
            continue
        said = found.setdefault(event["row"], {})
        said.update({"prompt": event["prompt"], "expected": event["expected"], event["when"]: event["answer"]})
    return [
        SampleAnswer(row, said["prompt"], said.get("before"), said.get("after"), said["expected"])
        for row, said in found.items()
    ]
