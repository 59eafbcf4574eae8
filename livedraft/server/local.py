"""The engine in this process behind the server: settings to an `LLM`, an `LLM` to what the application serves."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import platformdirs

from livedraft.draft_source import is_whole_model
from livedraft.drafts.database import read_controls, read_status
from livedraft.learning.process import trainer_status_name
from livedraft.llm import LLM
from livedraft.models.open import is_native
from livedraft.models.pull import resolve_model
from livedraft.records import UserError
from livedraft.server.openai_api import Served
from livedraft.settings import Settings


def state_folder(settings: Settings) -> Path:
    return Path(settings.model.state) if settings.model.state else platformdirs.user_state_path("livedraft")


def open_llm(settings: Settings, *, learn: bool) -> LLM:
    """Raises UserError or ValueError as `LLM`."""
    model = settings.model
    has_draft = model.draft != "none" and settings.speculation.uses_draft
    can_learn = learn and has_draft and (is_whole_model(model.draft) or is_native(resolve_model(model.name)))
    keeps_state = can_learn or model.state is not None
    return LLM(
        model.name,
        draft=model.draft,
        state=state_folder(settings) if keeps_state else None,
        learn=can_learn,
        dtype=model.dtype,
        quantization=model.quantization,
        device=model.device,
        num_threads=model.num_threads,
        engine=settings.engine,
        speculation=settings.speculation,
        learning=settings.learning,
        routing=settings.routing,
    )


def serve_llm(llm: LLM, settings: Settings) -> Served:
    """From here on the engine belongs to its loop."""
    given = settings.model.name
    name = settings.server.served_model_name or (Path(given).resolve().name if Path(given).exists() else given)
    return Served(
        name=name,
        backend=llm.loop(),
        tokenizer=llm.tokenizer,
        make_request=llm.request,
        fingerprint=f"fp_{llm.target_fingerprint}",
        draft_name=f"{name}-draft" if llm.engine.draft is None or llm.uses_own_layers else llm.engine.draft_version,
        max_num_seqs=llm.engine.config.max_num_seqs,
        learning=lambda: _learning_gauges(llm),
        banner=_banner(llm, name),
        state=llm.state,
        close=llm.close,
    )


def _learning_gauges(llm: LLM) -> dict[str, float]:
    if llm.trainer is None or llm.capture is None or llm.state is None:
        return {"enabled": 0.0}
    gauges = {
        "enabled": 1.0,
        "trainer_up": float(llm.trainer.pid is not None),
        "traces_dropped": float(llm.capture.num_dropped),
        "traces_redacted": float(llm.capture.num_redacted),
        "routes": float(len(llm.engine.drafting.routes)),
        "trial_running": float(llm.swap is not None and llm.swap.trial is not None),
    }
    try:
        statuses = [read_status(llm.state, trainer_status_name(route)) for route in llm.engine.drafting.routes]
    except (sqlite3.Error, UserError):  # locked just now, or the disk is full: /metrics is needed most then
        return gauges
    names = (
        "num_steps",
        "num_trained",
        "num_train_tokens",
        "train_seconds",
        "train_flops",
        "num_rolled_back",
        "num_drifts",
    )
    serving = {name: value for name, value in llm.serving_report().items() if isinstance(value, float)}
    return gauges | serving | {name: float(sum(status.get(name, 0.0) for status in statuses)) for name in names}


def _banner(llm: LLM, name: str) -> list[tuple[str, str]]:
    engine = llm.engine
    config = engine.config
    draft = engine.draft_version
    if engine.draft is None:
        draft += ": as asked" if llm.has_no_draft_by_choice else ": this target's family has none"
        draft += "; proposals from suffixes" if engine.drafting.uses_suffixes else ", plain decoding"
    elif draft == "untrained":
        draft += " (the target's first layers; no trained version in the state folder)"
    learning = "off: nothing is stored"
    if engine.draft is None and not llm.has_no_draft_by_choice:
        learning += "; only drafts of Llama, Qwen2 and Qwen3 targets learn"
    if llm.capture is not None:
        learning = f'on: traces and drafts in {llm.state}; off with --no-learn, for one request with "store": false'
        if llm.state is not None and read_controls(llm.state)["paused"]:
            learning += "; training is paused, go on with: livedraft learn resume"
    return [
        ("model", f"{name}, {llm.num_parameters / 1e6:.0f} M parameters, {llm.path.description}"),
        ("draft", draft),
        (
            "memory",
            f"{config.max_num_seqs} slots of {config.max_model_len} tokens, {llm.kv_gib:.2f} GiB of KV when full",
        ),
        ("learning", learning),
    ]
