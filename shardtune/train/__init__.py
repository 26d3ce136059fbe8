"""The run itself, from its config to its adapter; `run.py` is its order, `loop.py` a step."""
