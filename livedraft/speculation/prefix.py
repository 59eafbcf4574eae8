"""What the choice of a token depends on beside the logits: the prefix (lossless rule 6).

Penalties, bias and grammar act on every row by its own prefix: what is committed, then the drafted tokens before that row.
The same object serves the target's rows and the draft's, so both are changed alike (rule 1).

Legend: R rows, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from livedraft.records import Request


class PrefixState:
    """One request's counts, bias and grammar. `of` gives None for a request that needs none of them."""

    def __init__(self, request: Request, vocabulary_size: int, device: torch.device) -> None:
        sampling = request.sampling
        self._sampling = sampling
        self._vocabulary_size = vocabulary_size
        self.grammar = request.grammar
        self._counts_V: torch.Tensor | None = None
        self._bias_V: torch.Tensor | None = None
        if sampling.has_penalties:
            self._counts_V = torch.zeros(vocabulary_size, device=device)  # of output tokens
            self._in_prompt_V = torch.zeros(vocabulary_size, dtype=torch.bool, device=device)
            self._in_prompt_V[torch.tensor(request.prompt_token_ids, device=device)] = True
        if sampling.logit_bias:
            token_ids, addends = zip(*sampling.logit_bias, strict=True)
            self._bias_V = torch.zeros(vocabulary_size, device=device)
            self._bias_V[torch.tensor(token_ids, device=device)] = torch.tensor(addends, device=device)

    @classmethod
    def of(cls, request: Request, vocabulary_size: int, device: torch.device) -> PrefixState | None:
        sampling = request.sampling
        if not (sampling.has_penalties or sampling.logit_bias or request.grammar):
            return None
        return cls(request, vocabulary_size, device)

    def adjust(
        self, logits_RV: torch.Tensor, hypothetical: Sequence[int], draft_to_target_W: torch.Tensor | None = None
    ) -> torch.Tensor:
        """New logits: the last row comes after all `hypothetical` tokens, each row before it after one fewer.

        With draft_to_target_W the columns are a draft's. Elementwise, so a row's result does not depend on R.
        Order: repetition penalty, frequency and presence penalty, bias, grammar. Raises what the grammar raises.
        """
        R = logits_RV.shape[0]
        num_before = len(hypothetical) - (R - 1)
        assert num_before >= 0, "one hypothetical token at least between two rows"
        columns = slice(None) if draft_to_target_W is None else draft_to_target_W
        logits_RV = logits_RV.float()
        if self._counts_V is not None:
            logits_RV = self._penalised(logits_RV, hypothetical, num_before, columns)
        if self._bias_V is not None:
            logits_RV = logits_RV + self._bias_V[columns]
        if self.grammar is not None:
            allowed_RV = self._allowed(hypothetical, num_before, R).to(logits_RV.device)
            logits_RV = logits_RV.masked_fill(~allowed_RV[:, columns], -torch.inf)
        return logits_RV

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens are now part of the prefix. Raises what the grammar raises."""
        if self._counts_V is not None:
            for token in token_ids:
                self._counts_V[token] += 1
        if self.grammar is not None:
            for token in token_ids:
                self.grammar.advance(token)

    def _penalised(
        self, logits_RV: torch.Tensor, hypothetical: Sequence[int], num_before: int, columns: slice | torch.Tensor
    ) -> torch.Tensor:
        assert self._counts_V is not None
        counts_RV = self._counts_V.repeat(logits_RV.shape[0], 1)
        for index, token in enumerate(hypothetical):
            counts_RV[max(0, index + 1 - num_before) :, token] += 1
        is_seen_RV = ((counts_RV > 0) | self._in_prompt_V)[:, columns]
        counts_RV = counts_RV[:, columns]
        repetition = self._sampling.repetition_penalty
        if repetition != 1.0:
            shrunk_RV = torch.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
            logits_RV = torch.where(is_seen_RV, shrunk_RV, logits_RV)
        return (
            logits_RV - self._sampling.frequency_penalty * counts_RV - self._sampling.presence_penalty * (counts_RV > 0)
        )

    def _allowed(self, hypothetical: Sequence[int], num_before: int, num_rows: int) -> torch.Tensor:
        """bool [R, V]. Rows after a token the grammar forbids are never reached, and stay free."""
        assert self.grammar is not None
        V = self._vocabulary_size
        allowed_RV = np.ones((num_rows, V), dtype=bool)
        num_advanced = 0
        for index in range(len(hypothetical) + 1):
            if index >= num_before:
                mask = self.grammar.allowed_tokens()[:V]
                allowed_RV[index - num_before] = False
                allowed_RV[index - num_before, : len(mask)] = mask
            if index == len(hypothetical) or not self.grammar.advance(hypothetical[index]):
                break
            num_advanced += 1
        self.grammar.retreat(num_advanced)
        return torch.from_numpy(allowed_RV)
