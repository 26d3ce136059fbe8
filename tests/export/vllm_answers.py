"""What vLLM answers: `python vllm_answers.py REQUEST.json ANSWERS.json`, in any environment that has vLLM.

That may be another one than the tests': vLLM asks for an older transformers than this package. Nothing else is imported.

REQUEST: {"base", "adapter", "max_lora_rank", "experts", "prompts": [[id, ...], ...], "vocabulary"}
ANSWERS: for the adapter and for the base alone, of each prompt [token, [log probability of each id]] of each step; or
{"skipped": why}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)  # fmt: skip


def main(request_file: str, answers_file: str) -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    request = json.loads(Path(request_file).read_text())
    if request["experts"] and current_platform.is_cpu():
        answers: object = {"skipped": "vLLM computes adapters on experts in Triton kernels, which its CPU build lacks"}
        Path(answers_file).write_text(json.dumps(answers))
        return
    server = LLM(
        model=request["base"], enable_lora=True, max_lora_rank=request["max_lora_rank"], dtype="float32",
        enforce_eager=True, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128,
        max_logprobs=request["vocabulary"], gpu_memory_utilization=0.2,
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=6, temperature=0, logprobs=request["vocabulary"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    answers = {}
    for side, adapter in (("tuned", LoRARequest("tuned", 1, request["adapter"])), ("base", None)):
        done = server.generate(prompts, greedy, lora_request=adapter, use_tqdm=False)
        answers[side] = [
            [
                [token, [found[number].logprob for number in range(request["vocabulary"])]]
                for token, found in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)
            ]
            for one in done
        ]
    Path(answers_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
