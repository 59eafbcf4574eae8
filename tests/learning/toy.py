"""A toy language: the target is a random tiny model; a draft of its first layer learns what it says."""

from __future__ import annotations

from livedraft.config import LearningConfig
from livedraft.drafts.weights import DraftWeights, draft_from_target
from livedraft.learning.forward import TargetParts
from livedraft.learning.trainer import Trainer
from livedraft.models.load import EMBEDDING, HEAD, LoadedModel
from livedraft.records import Trace
from tests.tiny import decoder, draft_model, engine, random_model, request, serve

MODEL = random_model(seed=3)


def one_layer_draft(num_tokens: int = 64) -> DraftWeights:
    return draft_from_target(MODEL, num_layers=1, token_ids=list(range(num_tokens)))


def served_traces(count: int, *, first: int = 0, max_tokens: int = 24, **sampling: object) -> list[Trace]:
    """Traces of `count` different prompts, served with the untrained draft; ids rise with time."""
    traces: list[Trace] = []
    target = decoder(MODEL)
    draft = draft_model(one_layer_draft(), target, version="v0", keep_logits=True)
    served = engine(target, draft, k=2, trace_sink=traces.append, target_fingerprint=MODEL.fingerprint)
    prompts = [[(5 * n + 3 * i) % 64 for i in range(3 + n % 5)] + [n % 64] for n in range(first, first + count)]
    serve(served, [request(p, n, max_tokens=max_tokens, **sampling) for n, p in enumerate(prompts)])
    return sorted(traces, key=lambda trace: int(trace.request_id[1:]))


def trainer(model: LoadedModel = MODEL, draft: DraftWeights | None = None, **settings: object) -> Trainer:
    config = LearningConfig(**{"learning_rate": 3e-3, "warmup_steps": 0, **settings})  # type: ignore[arg-type]
    return Trainer(
        config=config,
        target=TargetParts(
            vocabulary_size=model.config.vocabulary_size,
            config=model.config,
            embedding_VD=model.tensors[EMBEDDING],
            head_VD=model.tensors.get(HEAD, model.tensors[EMBEDDING]),
        ),
        draft=draft or one_layer_draft(),
        max_positions=128,
    )
