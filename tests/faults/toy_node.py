"""The launcher of one node, as `shardtune train` uses it, with the toy worker in place of a training."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardtune.config.schema import ParallelSection, RunConfig
from shardtune.errors import ShardtuneError
from shardtune.launch.launcher import launch
from shardtune.launch.process_role import Node
from shardtune.run.failure import render

nnodes, node_rank, nproc = map(int, sys.argv[1:4])
config = RunConfig.model_validate(
    {"model": {"model_name_or_path": os.environ.get("TOY_MODEL", "toy")}, "data": {"dataset_name_or_path": "toy"}}
)
parallel = ParallelSection.model_validate_json(os.environ["TOY_PARALLEL"])
config = config.model_copy(update={"parallel": parallel})
node = Node(nnodes, node_rank, sys.argv[4], int(sys.argv[5]))
command = [sys.executable, str(Path(__file__).with_name("toy_worker.py"))]
try:
    code = launch(command, node, nproc, config, os.environ)
except ShardtuneError as error:
    print(render(error), file=sys.stderr)
    code = error.exit_code
sys.exit(code)
