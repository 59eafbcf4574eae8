"""The training process: `python -m livedraft.learning.worker --state DIR --target FILE --settings JSON`.

It reads traces from the store, scores them, trains a private copy of the draft, and offers candidates to the gate. It
talks to the serving process through the state folder only (store, registry, status row), and ends when the pipe on its
standard input closes. Serving never waits for it.

One turn of its loop:
  1. score what is new with the version that served it (prequential: score first, train later);
  2. test a frozen candidate when evidence it has not trained on is there;
  3. when enough was learnt since the last one, freeze a candidate: at once if what has just arrived is evidence enough (it is
     not trained on yet), else when there is nothing left to train on;
  4. when a whole chunk of new training traces is there, one optimiser step on it and on replayed old ones;
  5. otherwise, when idle, a step on replayed ones alone, while some have been seen fewer than max_passes times.

A better version in service is worth more than one more step, so the gate goes before training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from livedraft.config import LearningConfig
from livedraft.drafts.registry import Registry, fsync_path, new_version_id, read_controls, write_status
from livedraft.drafts.weights import DraftWeights, load_draft, save_draft
from livedraft.learning import gate
from livedraft.learning.batches import Example, example_from_trace
from livedraft.learning.process import EXIT_BAD_INPUT, open_yield_flag
from livedraft.learning.store import TraceRow, TraceStore
from livedraft.learning.trainer import BadStepError, Score, Trainer
from livedraft.learning.vocabulary import VocabularyUse
from livedraft.models.load import load_embedding_and_head
from livedraft.records import DraftVersion, UserError

POLL_SECONDS = 0.1
BUSY_PAUSE_SECONDS = {"gentle": 2.0, "on": 0.5, "eager": 0.0}
"""Longest pause between two micro-batches while serving is busy, by level: learning starves on no machine, but costs little."""
DRIFT_SHORT, DRIFT_LONG, DRIFT_RATIO = 16, 96, 0.75
"""Drift: alpha of the last DRIFT_SHORT requests under DRIFT_RATIO of the DRIFT_LONG before them."""
DRIFT_TRACES = 64
"""New requests after a drift that train with one replayed request each instead of replay_per_new."""
CHECKPOINT_SECONDS = 60.0
MAX_BAD_STEPS = 3
"""Steps in a row that would have ruined the weights; then the trainer starts again from the version in service."""
_CHECKPOINT_NAME = "trainer.checkpoint.safetensors"
MAX_GATE_HELD_OUT = 200
MAX_KEPT_EXAMPLES = 2000
"""Replay window, in traces."""
_MAX_KEPT_DRAFTS = 4


class Worker:
    def __init__(self, *, state: Path, target: Path, route: str, config: LearningConfig, max_positions: int) -> None:
        self.state, self.route, self.config = state, route, config
        self.store, self.registry = TraceStore(state), Registry(state)
        in_service = self.registry.in_service(route)
        if in_service is None:
            raise UserError(f"{state} has no draft in service on route {route}; start serving with this state first.")
        self.in_service = in_service
        model_config, embedding_VD, head_VD = load_embedding_and_head(target)
        draft = load_draft(self.registry.weights_path(in_service.id))
        self.trainer = Trainer(
            config=config,
            model_config=model_config,
            draft=draft,
            embedding_VD=embedding_VD,
            head_VD=head_VD,
            max_positions=max_positions,
        )
        self.controls = read_controls(state)
        self.is_asked = False
        """`learn now` was said and no candidate has been frozen since: turns that score or test must not lose it."""
        self.num_bad_steps = 0
        self.last_problem = ""
        self.recent_alphas: deque[float] = deque(maxlen=DRIFT_SHORT + DRIFT_LONG)
        self.num_drifts = 0
        self._num_after_drift = DRIFT_TRACES
        self.vocabulary = VocabularyUse(model_config.vocabulary_size)
        self.drafts: OrderedDict[str, DraftWeights] = OrderedDict({in_service.id: draft})
        self.scores: dict[str, dict[int, Score]] = {}  # by version and trace
        self.examples: OrderedDict[int, Example] = OrderedDict()  # training side, oldest first
        self.held_out: OrderedDict[int, Example] = OrderedDict()
        self.fresh: list[Example] = []  # scored, not yet trained on
        self.copies: Counter[int] = Counter()
        """By prompt: how often it was in a batch."""
        self.trained_ids: set[int] = set()
        self.random = random.Random(config.seed)
        self.last_trace_id = 0
        self.newest_trained_id = 0
        self.num_trained = 0
        self.num_since_candidate = 0
        self.num_candidates = 0
        self.num_tests_since_promotion = 0
        self.candidate: DraftVersion | None = None
        self.train_seconds = 0.0
        """Spent in steps and scores, pauses for serving not counted."""
        self.num_train_tokens = 0
        self._paused_seconds = 0.0
        self._to_score: list[tuple[TraceRow, Example]] = []
        self._yield_flag = open_yield_flag(state)
        self._status = ""
        self._checkpoint_path = state / _CHECKPOINT_NAME
        self._checkpointed_at = time.monotonic()
        self._resume()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._report("waiting for traces")
        while True:
            if not self.turn():
                if not self.controls["paused"]:
                    self._report("waiting for traces")
                time.sleep(POLL_SECONDS)

    def turn(self) -> bool:
        """One turn; False when there was nothing to do."""
        self._heed_controls()
        if self.controls["paused"]:
            self._report("paused")
            return False
        self._follow_service()
        self._read_new_traces()
        if self._score_new() or self._test_candidate():
            return True
        self._checkpoint_now_and_then()
        num_needed = max(self.config.traces_per_candidate, self.num_trained // 4)
        is_due = self.candidate is None and self.num_since_candidate >= (1 if self.is_asked else num_needed)
        if is_due and self._is_enough(self._evidence(self.newest_trained_id)):
            self._freeze_candidate()
        elif len(self.fresh) >= self.config.traces_per_chunk:
            self._train(self.fresh[: self.config.traces_per_chunk])
            self.fresh = self.fresh[self.config.traces_per_chunk :]
        elif not self._replay():
            if not is_due:
                return False
            self._freeze_candidate()  # idle: offer what there is, and wait for evidence
        return True

    def _heed_controls(self) -> None:
        """What an operator asked for since the last turn."""
        before, self.controls = self.controls, read_controls(self.state)
        if self.controls["forget"] != before["forget"]:
            self._forget_deleted()
        self.is_asked = self.is_asked or self.controls["now"] != before["now"]

    def _forget_deleted(self) -> None:
        """Traces that are gone from the store leave everything kept here. Weights already trained cannot be unlearnt."""
        left = {row.id for row in self.store.rows(route=self.route, limit=-1)}
        for kept in (self.examples, self.held_out):
            for trace_id in [trace_id for trace_id in kept if trace_id not in left]:
                del kept[trace_id]
        self.fresh = [example for example in self.fresh if example.trace_id in left]
        self._to_score = [(row, example) for row, example in self._to_score if row.id in left]
        for scores in self.scores.values():
            for trace_id in [trace_id for trace_id in scores if trace_id not in left]:
                del scores[trace_id]
        self.store.close_shards()

    def _follow_service(self) -> None:
        """An operator or the watch may have put another version into service: training goes on from there."""
        serving = self.registry.in_service(self.route)
        if serving is None or serving.id == self.in_service.id:
            return
        weights = self._draft(serving.id)
        if weights is None:
            return
        self.in_service = serving
        self.num_tests_since_promotion = 0
        self.candidate = None
        self.trainer.restart_from(weights)

    def _read_new_traces(self) -> None:
        for row in self.store.rows(after_id=self.last_trace_id, route=self.route):
            self.last_trace_id = row.id
            trace = self.store.read(row)
            if trace is None or not trace.output_token_ids:
                continue
            example = example_from_trace(trace, row.id, self.config.positions)
            if row.id in self.trained_ids:
                self.examples[row.id] = example  # before a restart
            else:
                self._to_score.append((row, example))
        while len(self.examples) > MAX_KEPT_EXAMPLES:
            self.examples.popitem(last=False)

    def _score_new(self) -> bool:
        """Prequential: with the version that served the request, before anything is trained on it."""
        if not self._to_score:
            return False
        self._report("scoring")
        batch, self._to_score = self._to_score, []
        by_version: dict[str, list[Example]] = {}
        for row, example in batch:
            by_version.setdefault(row.draft_version, []).append(example)
        found: dict[int, tuple[float, float]] = {}
        for version, examples in by_version.items():
            if self._draft(version) is None:
                continue  # served without a draft, or by one that is gone
            for example, score in zip(examples, self._scores(version, examples), strict=True):
                found[example.trace_id] = (score.alpha, score.alpha_served)
        self._watch_for_drift([alpha for alpha, _ in (found[trace_id] for trace_id in sorted(found))])
        self.store.record_alpha(found)
        for row, example in batch:
            if row.is_held_out:
                self.held_out[row.id] = example
                if len(self.held_out) > MAX_GATE_HELD_OUT:
                    self.held_out.popitem(last=False)
            elif self.copies[example.prompt_key] + len(self._waiting(example)) < self.config.max_passes:
                self.fresh.append(example)
        return True

    def _watch_for_drift(self, alphas: Sequence[float]) -> None:
        """The traffic changed when the served draft is suddenly worse: then learn at the full rate, from what is new."""
        self.recent_alphas.extend(alphas)
        if len(self.recent_alphas) < DRIFT_SHORT + DRIFT_LONG // 2:
            return
        recent = list(self.recent_alphas)
        before, now = recent[:-DRIFT_SHORT], recent[-DRIFT_SHORT:]
        if sum(now) / len(now) < DRIFT_RATIO * sum(before) / len(before):
            self.trainer.restart_schedule()
            self.recent_alphas.clear()
            self.num_drifts += 1
            self._num_after_drift = 0
            self._status = ""  # report it

    def _waiting(self, example: Example) -> list[Example]:
        """Copies of the same prompt that are still to be trained on."""
        return [one for one in self.fresh if one.prompt_key == example.prompt_key]

    def _train(self, new: Sequence[Example]) -> None:
        """One optimiser step on new examples and `replay_per_new` old ones for each."""
        self._report("training")
        for example in new:
            self.vocabulary.add(example)
        if self.trainer.num_steps == 0:
            self.trainer.change_vocabulary(self.vocabulary.choose(self.config.max_vocabulary_size))
        is_drifting = self._num_after_drift < DRIFT_TRACES
        self._num_after_drift += len(new)
        replay_per_new = min(1, self.config.replay_per_new) if is_drifting else self.config.replay_per_new
        batch = [*new, *self._replayed(replay_per_new * len(new))]
        self._step(batch)
        for example in new:
            self.examples[example.trace_id] = example
            self.trained_ids.add(example.trace_id)
            self.newest_trained_id = max(self.newest_trained_id, example.trace_id)
            if len(self.examples) > MAX_KEPT_EXAMPLES:
                self.examples.popitem(last=False)
        self.num_trained += len(new)
        self.num_since_candidate += len(new)

    def _replay(self) -> bool:
        """Idle compute: old examples again, each at most max_passes times in all."""
        batch = self._replayed((1 + self.config.replay_per_new) * self.config.traces_per_chunk)
        if not batch:
            return False
        self._report("replaying")
        self._step(batch)
        return True

    def _replayed(self, count: int) -> list[Example]:
        usable = [
            example for example in self.examples.values() if self.copies[example.prompt_key] < self.config.max_passes
        ]
        picked = self.random.sample(usable, len(usable)) if count < len(usable) else usable
        # Each prompt once, and no client more than half of the batch.
        batch: list[Example] = []
        by_client: Counter[str] = Counter()
        prompts: set[int] = set()
        for example in picked:
            is_crowd = example.client_key and by_client[example.client_key] >= max(1, count // 2)
            if len(batch) < count and not is_crowd and example.prompt_key not in prompts:
                batch.append(example)
                by_client[example.client_key] += 1
                prompts.add(example.prompt_key)
        return batch

    def _step(self, batch: list[Example]) -> None:
        for example in batch:
            self.copies[example.prompt_key] += 1
            self.num_train_tokens += example.num_tokens
        try:
            with self._timed():
                self.trainer.step(batch, self._between)
            self.num_bad_steps = 0
        except BadStepError as error:
            self._survive_bad_step(error)

    def _survive_bad_step(self, error: BadStepError) -> None:
        self.num_bad_steps += 1
        self.last_problem = f"step {self.trainer.num_steps}: {error}"
        print(self.last_problem, file=sys.stderr, flush=True)
        weights = self._draft(self.in_service.id)
        if self.num_bad_steps >= MAX_BAD_STEPS and weights is not None:
            self.trainer.restart_from(weights)
            self.num_bad_steps = 0
            self.last_problem += "; training starts again from the version in service"
        self._status = ""  # report it

    # --- candidates and the gate ------------------------------------------------------------------------------------

    def _freeze_candidate(self) -> None:
        weights = self.trainer.snapshot()
        self.num_candidates += 1
        version = DraftVersion(
            id=new_version_id(self.num_candidates),
            route=self.route,
            parent=self.in_service.id,
            sha256="",
            target_fingerprint=self.in_service.target_fingerprint,
            tokenizer_fingerprint=self.in_service.tokenizer_fingerprint,
            num_layers=weights.num_layers,
            vocabulary_size=weights.vocabulary_size,
            created_at=time.time(),
            num_requests_seen=self.num_trained,
            last_trace_id=self.newest_trained_id,
        )
        version = self.registry.publish(lambda path: save_draft(weights, path), version)
        self._keep(version.id, weights)
        self.candidate = version
        self.is_asked = False
        self.num_since_candidate = 0
        # A version boundary: from here on the copy in training says what the traffic says now.
        self.trainer.change_vocabulary(self.vocabulary.choose(self.config.max_vocabulary_size))

    def _evidence(self, last_trained_id: int) -> list[Example]:
        """What weights trained up to that trace have not seen: held-out requests, and all that came later."""
        newer = [example for example in (*self.examples.values(), *self.fresh) if example.trace_id > last_trained_id]
        return [*self.held_out.values(), *newer]

    @staticmethod
    def _is_enough(evidence: list[Example]) -> bool:
        num_positions = sum(example.num_positions for example in evidence)
        return len(evidence) >= gate.MIN_REQUESTS and num_positions >= gate.MIN_POSITIONS

    def _test_candidate(self) -> bool:
        if self.candidate is None:
            return False
        evidence = self._evidence(self.candidate.last_trace_id)
        if not self._is_enough(evidence):
            return False  # waits; nothing was tested
        self._report("testing a candidate")
        version = self.candidate
        candidate_scores = self._scores(version.id, evidence)
        parent_scores = self._scores(self.in_service.id, evidence)
        self.num_tests_since_promotion += 1
        decision = gate.decide(
            [score.alpha_served for score in candidate_scores],
            [score.alpha_served for score in parent_scores],
            num_positions=sum(example.num_positions for example in evidence),
            test_number=self.num_tests_since_promotion,
            seed=self.config.seed,
        )
        alpha = sum(score.alpha for score in candidate_scores) / len(candidate_scores)
        fields = {**decision.as_fields(), "alpha": alpha}
        if decision.promote:
            self.registry.promote(version.id, self.route, fields)
            self.in_service = version
            self.num_tests_since_promotion = 0
        else:
            self.registry.reject(version.id, fields)
        self.candidate = None
        return True

    def _scores(self, version_id: str, examples: Sequence[Example]) -> list[Score]:
        """Each example's score under a version, computed once: the parent's are mostly there from serving."""
        known = self.scores.setdefault(version_id, {})
        unknown = [example for example in examples if example.trace_id not in known]
        if unknown:
            draft = self._draft(version_id)
            assert draft is not None
            with self._timed():
                fresh = self.trainer.score(unknown, draft, self._between)
            known.update(zip((example.trace_id for example in unknown), fresh, strict=True))
        return [known[example.trace_id] for example in examples]

    # --- odds and ends ----------------------------------------------------------------------------------------------

    def _draft(self, version_id: str) -> DraftWeights | None:
        if version_id not in self.drafts:
            try:
                self._keep(version_id, load_draft(self.registry.weights_path(version_id)))
            except UserError:
                return None
        return self.drafts[version_id]

    def _keep(self, version_id: str, weights: DraftWeights) -> None:
        self.drafts[version_id] = weights
        while len(self.drafts) > _MAX_KEPT_DRAFTS:
            oldest = next(name for name in self.drafts if name != self.in_service.id)
            del self.drafts[oldest]
            self.scores.pop(oldest, None)

    def _between(self) -> None:
        """Called between micro-batches: step aside while requests run or wait."""
        started = time.monotonic()
        longest = BUSY_PAUSE_SECONDS[self.config.level]
        while self._yield_flag[0] and time.monotonic() < started + longest:
            time.sleep(0.01)
        self._paused_seconds += time.monotonic() - started

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started, paused = time.monotonic(), self._paused_seconds
        yield
        self.train_seconds += time.monotonic() - started - (self._paused_seconds - paused)

    def _report(self, status: str) -> None:
        """Write the status row when it changes; the serving process shows it."""
        if status == self._status:
            return
        self._status = status
        fields = {
            "status": status,
            "pid": os.getpid(),
            "num_steps": self.trainer.num_steps,
            "num_trained": self.num_trained,
            "num_train_tokens": self.num_train_tokens,
            "train_seconds": round(self.train_seconds, 3),
            "train_flops": self.trainer.flops,
            "in_service": self.in_service.id,
            "num_drifts": self.num_drifts,
            "last_problem": self.last_problem,
        }
        write_status(self.state, "trainer", fields)

    # --- surviving a kill -------------------------------------------------------------------------------------------

    def _checkpoint_now_and_then(self) -> None:
        is_due = time.monotonic() - self._checkpointed_at > CHECKPOINT_SECONDS
        if is_due and self.trainer.num_steps:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Whole or not at all. A full disk costs the checkpoint, not the training."""
        self._checkpointed_at = time.monotonic()
        counters = {
            "copies": list(self.copies.items()),
            "trained_ids": sorted(self.trained_ids)[-4 * MAX_KEPT_EXAMPLES :],
            "newest_trained_id": self.newest_trained_id,
            "num_trained": self.num_trained,
            "num_since_candidate": self.num_since_candidate,
            "num_candidates": self.num_candidates,
            "in_service": self.in_service.id,
            "vocabulary": self.vocabulary.used(),
        }
        temporary = self._checkpoint_path.with_suffix(".tmp")
        try:
            save_file(self.trainer.state_tensors(), temporary, metadata={"counters": json.dumps(counters)})
            fsync_path(temporary)
            os.replace(temporary, self._checkpoint_path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            self.last_problem = f"the checkpoint could not be written: {error}"

    def _resume(self) -> None:
        """Go on where the last checkpoint was; from the version in service when there is none or it is damaged, and with its
        weights when another version serves now."""
        try:
            with safe_open(self._checkpoint_path, framework="pt") as file:
                counters = json.loads(file.metadata()["counters"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if counters["in_service"] == self.in_service.id:
                self.trainer.load_state_tensors(tensors)
        except FileNotFoundError:
            return
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            self.last_problem = f"the checkpoint cannot be read and is not used: {error}"
            return
        self.copies = Counter(dict(counters["copies"]))
        self.trained_ids = set(counters["trained_ids"])
        for name in ("newest_trained_id", "num_trained", "num_since_candidate", "num_candidates"):
            setattr(self, name, counters[name])
        self.vocabulary.restore(counters["vocabulary"])


def end_with_parent() -> None:
    """Leave as soon as the pipe on standard input closes: its other end lives in the serving process."""

    def wait() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description="livedraft's training process; started by the serving process.")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--route", default="default")
    parser.add_argument("--max-positions", type=int, default=2048)
    parser.add_argument("--settings", default="{}", help="LearningConfig as JSON")
    arguments = parser.parse_args()
    end_with_parent()
    config = LearningConfig(**json.loads(arguments.settings))
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    try:
        Worker(
            state=arguments.state,
            target=arguments.target,
            route=arguments.route,
            config=config,
            max_positions=arguments.max_positions,
        ).run()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
