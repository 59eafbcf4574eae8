"""`livedraft bench unhelpful`: a draft of random weights beside plain decoding, at several batch sizes, interleaved.

Nobody serves such a draft on purpose. But traffic can leave any draft behind, so this is what speculation costs at worst. The
draft starts as one that nobody has measured: what it costs until that is seen is in the figures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from livedraft.bench.alternate import alternate, joined, median_with_interval
from livedraft.bench.contender import Contender
from livedraft.bench.machine import hardware
from livedraft.bench.progress import Bar
from livedraft.bench.serve import bench_prompts
from livedraft.config import EngineConfig
from livedraft.device import versions
from livedraft.draft_source import UNTRAINED
from livedraft.drafts.weights import DraftWeights
from livedraft.llm import LLM
from livedraft.records import SamplingParams


def run(
    *, batches: Sequence[int], pairs: int, max_tokens: int, temperature: float, prompts_path: Path | None, model: str,
    dtype: str, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    prompts = bench_prompts(prompts_path, max(batches) * pairs)
    config = EngineConfig(max_num_seqs=max(batches), num_prefix_slots=0)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    with LLM(model, draft=UNTRAINED, dtype=dtype, num_threads=threads, engine=config) as llm:
        draft = llm.laid_out(randomised(llm.draft_weights(UNTRAINED)), "random")
        token_ids = [llm.tokenizer.encode_chat(messages) for messages in prompts]
        bar, rows = Bar(), []
        for batch in batches:
            groups = [[token_ids[(i * batch + j) % len(token_ids)] for j in range(batch)] for i in range(pairs)]
            for one in (None, draft):  # warm up, by contenders that nothing is learnt from
                Contender(llm, one, sampling).together(groups[0])
            contenders = {"plain": Contender(llm, None, sampling), "random": Contender(llm, draft, sampling)}
            timings = alternate(
                {name: joined(contender.together) for name, contender in contenders.items()}, groups, num_rounds=1,
                report=bar, name=f"batch {batch}",
            )  # fmt: skip
            ratio, low, high = median_with_interval(timings["random"].pair_ratios(timings["plain"]))
            stats = contenders["random"].stats
            rows.append(
                {
                    "batch": batch, "pairs": pairs, "ratio": round(ratio, 3), "interval": [round(low, 3), round(high, 3)],
                    "ratio_of_all_seconds": round(
                        timings["random"].tokens_per_second() / timings["plain"].tokens_per_second(), 3
                    ),
                    "plain_tokens_per_second": round(timings["plain"].tokens_per_second(), 1),
                    "num_draft_tokens": stats.num_draft_tokens, "num_tokens": stats.num_emitted_tokens,
                }
            )  # fmt: skip
        result = {"execution": llm.path.description, "rows": rows, "versions": versions(), "hardware": hardware()}
    bar.stop()
    print(json.dumps(result)) if as_json else _print(result)


def randomised(weights: DraftWeights, seed: int = 0) -> DraftWeights:
    """The same shapes with normal noise of the same size; norms stay."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor if tensor.ndim < 2 else torch.randn(tensor.shape, generator=generator) * tensor.float().std()
        for name, tensor in weights.tensors.items()
    }
    return replace(weights, tensors=tensors)


def _print(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        print(
            f"batch {row['batch']:>3}: × {row['ratio']:.3f} {row['interval']} of plain's "
            f"{row['plain_tokens_per_second']} tokens/s, "
            f"{row['num_draft_tokens']} tokens drafted beside {row['num_tokens']} emitted"
        )
    print(f"{result['execution']}; {result['hardware']}")
