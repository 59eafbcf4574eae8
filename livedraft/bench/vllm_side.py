"""vLLM behind a pipe: the part of `bench compare` that runs in vLLM's own interpreter, and so imports nothing of livedraft.

One JSON object a line. First what to load, as keywords of `vllm.LLM`, answered with the version; then prompts to answer
together (`prompts`, `max_tokens`, `temperature`, `eos_token_ids`), answered with `outputs`.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not get among the answers
    os.environ.setdefault(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # one process: a second one would take a core on small machines
    settings = json.loads(sys.stdin.readline())
    import torch
    import vllm

    # Without a GPU a first start would compile for minutes.
    engine = vllm.LLM(**settings, enforce_eager=not torch.cuda.is_available())
    print(
        json.dumps({"version": vllm.__version__, "device": "cuda" if torch.cuda.is_available() else "cpu"}),
        file=answers,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = vllm.SamplingParams(
            max_tokens=asked["max_tokens"], temperature=asked["temperature"], stop_token_ids=asked["eos_token_ids"],
            detokenize=False,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps({"outputs": [list(output.outputs[0].token_ids) for output in outputs]}), file=answers)


if __name__ == "__main__":
    main()
