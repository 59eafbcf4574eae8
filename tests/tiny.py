"""Models small enough to hold in the head: random Llama-like weights, an engine around them, a toy language."""

from __future__ import annotations

from dataclasses import replace

import torch

from livedraft.config import EngineConfig, SpeculationConfig
from livedraft.device import ExecutionPath
from livedraft.drafts.weights import DraftWeights, draft_from_target, serving_weights
from livedraft.engine.engine import Engine
from livedraft.events import Events
from livedraft.models.config import ModelConfig, RopeScaling
from livedraft.models.decoder import Decoder
from livedraft.models.graphs import Capture, EagerReplay
from livedraft.models.load import LoadedModel, build_weights, expected_shapes
from livedraft.models.static_decoder import StaticDecoder
from livedraft.records import Request, SamplingParams
from livedraft.speculation.draft_length import CostModel
from livedraft.speculation.draft_loop import DraftSlots, LoopedDraftModel
from livedraft.speculation.draft_model import DraftModel

FLOAT32 = ExecutionPath(device=torch.device("cpu"), dtype=torch.float32, is_prepacked=False)
VOCABULARY_SIZE = 64
COSTS = CostModel(target_seconds_by_rows={1: 1.0, 9: 1.0, 64: 1.5}, draft_seconds_by_requests={1: 0.05})

TINY = ModelConfig(
    family="llama",
    vocabulary_size=VOCABULARY_SIZE,
    width=32,
    feed_forward_width=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_positions=256,
    has_tied_embeddings=False,
    eos_token_ids=(0,),
)
FAMILIES = {
    "llama": TINY,
    "llama tied": replace(TINY, has_tied_embeddings=True),
    "llama3 rope": replace(
        TINY,
        rope_scaling=RopeScaling(
            kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32
        ),
    ),
    "llama linear rope": replace(TINY, rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    "qwen2": replace(TINY, family="qwen2", has_qkv_bias=True),
    "qwen3": replace(TINY, family="qwen3", has_qk_norm=True, head_width=16),
}


def random_tensors(config: ModelConfig, seed: int = 0, scale: float = 0.5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1.0 + 0.1 * noise if name.endswith("norm.weight") else scale * noise
    return tensors


def random_model(config: ModelConfig = TINY, seed: int = 0) -> LoadedModel:
    return LoadedModel(config=config, tensors=random_tensors(config, seed), fingerprint=f"tiny-{config.family}-{seed}")


def decoder(model: LoadedModel, *, num_slots: int = 4, max_length: int = 128) -> Decoder:
    return Decoder(
        model.config,
        build_weights(model, FLOAT32),
        num_slots=num_slots,
        max_length=max_length,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def perturbed_draft(
    model: LoadedModel, *, noise: float, num_tokens: int = VOCABULARY_SIZE, seed: int = 1
) -> DraftWeights:
    """All layers of the target with some noise, over the lowest `num_tokens` ids: a draft that is sometimes right."""
    draft = draft_from_target(model, num_layers=model.config.num_layers, token_ids=list(range(num_tokens)))
    generator = torch.Generator().manual_seed(seed)
    for tensor in draft.tensors.values():
        tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
    return draft


def draft_model(
    weights: DraftWeights, target: Decoder, *, version: str = "v1", keep_logits: bool = False
) -> DraftModel:
    return DraftModel(
        Decoder(
            target.config,
            serving_weights(weights, target.weights, FLOAT32, target.config),
            num_slots=target.num_slots,
            max_length=target.max_length,
            dtype=torch.float32,
            device=torch.device("cpu"),
        ),
        weights.draft_to_target_W,
        version=version,
        keep_logits=keep_logits,
    )


def static_decoder(
    model: LoadedModel, *, num_slots: int = 4, max_length: int = 128, capture: Capture | None = None, **options: object
) -> StaticDecoder:
    """As `decoder`, in padded steps."""
    return StaticDecoder(
        model.config,
        build_weights(model, FLOAT32),
        num_slots=num_slots,
        max_length=max_length,
        dtype=torch.float32,
        device=torch.device("cpu"),
        capture=capture or EagerReplay(),
        **options,  # type: ignore[arg-type]
    )


def looped_draft(
    weights: DraftWeights, target: StaticDecoder, slots: DraftSlots | None = None, *, version: str = "v1",
    keep_logits: bool = False,
) -> LoopedDraftModel:  # fmt: skip
    return (slots or DraftSlots(target)).lend(
        target.config, serving_weights(weights, target.weights, FLOAT32, target.config), weights.draft_to_target_W,
        version=version, keep_logits=keep_logits,
    )  # fmt: skip


def engine(target: Decoder, draft: DraftModel | None, *, k: int | None = 3, **options: object) -> Engine:
    config = options.pop("config", EngineConfig(max_num_seqs=target.num_slots, max_model_len=target.max_length))
    suffixes = bool(options.pop("suffixes", False))
    defaults: dict[str, object] = {"events": Events(), "eos_token_ids": (), "costs": COSTS}
    return Engine(
        target,
        draft,
        config=config,  # type: ignore[arg-type]
        speculation=SpeculationConfig(num_speculative_tokens=k, suffix_decoding=suffixes),
        **{**defaults, **options},  # type: ignore[arg-type]
    )


def request(token_ids: list[int], number: int = 0, **sampling: object) -> Request:
    return Request(
        id=f"r{number}",
        prompt_token_ids=tuple(token_ids),
        sampling=SamplingParams(**{"max_tokens": 24, **sampling}),  # type: ignore[arg-type]
    )


def serve(served: Engine, requests: list[Request]) -> list[list[int]]:
    """Outputs in the requests' order."""
    states = [served.add_request(one) for one in requests]
    while served.has_work:
        served.step()
    return [state.output_token_ids for state in states]


PROMPTS = [[5, 9, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [40], [7, 7, 21, 63, 2]]
