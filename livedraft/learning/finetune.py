"""Plain supervised fine-tuning of a target, through transformers (AdaSPEC, arXiv 2510.19779, section 3, step 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from livedraft.records import UserError

BATCH_SIZE, MAX_TOKENS = 8, 1024
_IGNORED = -100
"""A label that costs nothing: the prompt's tokens."""


def finetune(
    model: Any,
    texts: Sequence[tuple[list[int], list[int]]],
    *,
    epochs: int,
    learning_rate: float,
    seed: int,
    report: Callable[[int, int, float], None] = lambda *_: None,
) -> None:
    """Train a transformers causal model, in place, on (prompt tokens, response tokens): cross entropy of the responses.

    `learning_rate` is the first step's and falls to nothing in equal steps over all `epochs`. Texts whose prompt alone has
    MAX_TOKENS are left out. `report(step, of, loss)`. Raises UserError when the loss stops being a
    number.
    """
    texts = [(prompt, response) for prompt, response in texts if len(prompt) < MAX_TOKENS]
    if not texts:
        raise UserError(f"No prompt to fine-tune on is shorter than {MAX_TOKENS} tokens.")
    batches = _batches(texts, epochs, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    model.train()
    for step, batch in enumerate(batches, start=1):
        tokens_BT, labels_BT = _padded(batch)
        logits_BTV = model(tokens_BT, use_cache=False).logits
        loss = F.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1).float(), labels_BT[:, 1:].flatten(), ignore_index=_IGNORED
        )
        if not bool(torch.isfinite(loss)):
            raise UserError(f"Fine-tuning the target failed at step {step}: the loss is {loss.item()}.")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, len(batches), loss.item())
    model.eval()


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """As a Hugging Face folder that `--target` takes. config.json comes last: without it the folder is not taken for done."""
    model.save_pretrained(folder / "part")
    tokenizer.save_pretrained(folder / "part")
    files = sorted((folder / "part").iterdir(), key=lambda file: file.name == "config.json")
    for file in files:
        file.replace(folder / file.name)
    (folder / "part").rmdir()


def _batches(
    texts: Sequence[tuple[list[int], list[int]]], epochs: int, seed: int
) -> list[list[tuple[list[int], list[int]]]]:
    order = [index for epoch in range(epochs) for index in np.random.default_rng([seed, epoch]).permutation(len(texts))]
    return [[texts[index] for index in order[start : start + BATCH_SIZE]] for start in range(0, len(order), BATCH_SIZE)]


def _padded(batch: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [B, T], padded on the right, where causal attention never looks."""
    rows = [(prompt + response)[:MAX_TOKENS] for prompt, response in batch]
    T = max(map(len, rows))
    tokens_BT = torch.zeros(len(rows), T, dtype=torch.long)
    labels_BT = torch.full((len(rows), T), _IGNORED)
    for index, (row, (prompt, _)) in enumerate(zip(rows, batch, strict=True)):
        tokens_BT[index, : len(row)] = torch.tensor(row)
        labels_BT[index, len(prompt) : len(row)] = torch.tensor(row[len(prompt) :], dtype=torch.long)
    return tokens_BT, labels_BT
