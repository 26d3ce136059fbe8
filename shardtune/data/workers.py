"""Who does the work? This process, or several more; results come back in the order of the chunks either way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from types import ModuleType

from shardtune.data.chunks import Chunk
from shardtune.data.stages import Recipe, Result, process
from shardtune.errors import ShardtuneError

_AHEAD = 3  # chunks per worker that are under way: bounds memory, and keeps a worker from waiting for the reader
_recipes: Sequence[Recipe] = ()  # of a worker process

Task = tuple[int, Chunk]  # which recipe, what to do


def process_in_order(
    recipes: Sequence[Recipe], tasks: Iterable[Task], workers: int
) -> Iterator[tuple[int, Chunk, Result]]:
    """(recipe's number, the chunk without its content, its result) of each task, in the order of the tasks.

    Args:
        workers: Processes that work; 1 = this one, and none is started.
    """
    if workers <= 1:
        for number, chunk in tasks:
            yield number, replace(chunk, content=None), process(recipes[number], chunk)
        return
    pool = _start(recipes, workers)
    waiting: deque[tuple[int, Chunk, Future[Result]]] = deque()
    try:
        for number, chunk in tasks:
            with _main_hidden():
                future = pool.submit(_work, number, chunk)
            waiting.append((number, replace(chunk, content=None), future))
            while len(waiting) > _AHEAD * workers:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    except (BrokenProcessPool, BrokenPipeError) as error:  # the second when one dies while it is being started
        raise ShardtuneError(
            "A worker process that was preparing data was killed.",
            why="Usually the machine or container ran out of memory.",
            fix="Use more memory or fewer workers.",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(waiting: deque[tuple[int, Chunk, Future[Result]]]) -> tuple[int, Chunk, Result]:
    number, chunk, future = waiting.popleft()
    return number, chunk, future.result()


def _start(recipes: Sequence[Recipe], workers: int) -> ProcessPoolExecutor:
    # Never a plain fork: the caller may have started torch's threads or CUDA, which a fork does not survive. The fork
    # server is a clean process; it imports once what all workers need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardtune.data.stages", "transformers"])
    return ProcessPoolExecutor(workers, context, _begin, (recipes,))


@contextmanager
def _main_hidden() -> Iterator[None]:
    """A process that is started now does not run the caller's script again, which may be slow or start all over."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _begin(recipes: Sequence[Recipe]) -> None:
    global _recipes
    _recipes = recipes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    gc.freeze()  # the libraries stay: looking through them for garbage again and again costs 8 % of the time
    gc.set_threshold(50_000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and it ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot tell its workers; without this they would wait for it for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(number: int, chunk: Chunk) -> Result:
    return process(_recipes[number], chunk)
