"""`livedraft generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from livedraft.config import SpeculationConfig
from livedraft.llm import LLM
from livedraft.records import SamplingParams


def run(
    prompt: str,
    *,
    model: str,
    sampling: dict[str, Any],
    is_raw: bool,
    draft: str,
    num_speculative_tokens: int | None,
    state: Path | None,
    dtype: str,
    threads: int | None,
    as_json: bool,
) -> None:
    parameters = SamplingParams(**sampling)  # before the model loads: a wrong option should not cost seconds
    speculation = SpeculationConfig(num_speculative_tokens=num_speculative_tokens)
    with LLM(model, draft=draft, state=state, dtype=dtype, num_threads=threads, speculation=speculation) as llm:
        print(f"{llm.path.description}; draft: {llm.engine.draft_version}", file=sys.stderr)
        is_chat = llm.tokenizer.has_chat_template and not is_raw
        output = llm.generate([{"role": "user", "content": prompt}] if is_chat else prompt, parameters)[0]
    if not as_json:
        print(output.text)
        return
    print(
        json.dumps(
            {
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "num_prompt_tokens": output.num_prompt_tokens,
                "draft_version": llm.engine.draft_version,
                "acceptance_rate": output.stats.acceptance_rate,
                "mean_acceptance_length": output.stats.mean_acceptance_length,
                "block_efficiency": output.stats.block_efficiency,
            }
        )
    )
