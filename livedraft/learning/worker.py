"""What learns for one route: reads traces from the store, scores them, trains a private copy of the draft, and offers
candidates to the gate. It runs in the training process (`team.py`).

One turn:
  1. score what is new with the version that served it (prequential: score first, train later); at level `gentle`, while
     requests come, a sample of it;
  2. test a frozen candidate when evidence it has not trained on is there; one that passes goes to the watch as a canary;
  3. when enough was learnt since the last one, freeze a candidate: at once if what has just arrived is evidence enough (it is
     not trained on yet), else when there is nothing left to train on; what was learnt by replay alone is offered then too;
  4. when a whole chunk of new training traces is there, one optimiser step on it and on replayed old ones;
  5. otherwise, when idle, a step on replayed ones alone, while some have been seen fewer than max_passes times.

A better version in service is worth more than one more step, so the gate goes before training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from livedraft.config import LearningConfig
from livedraft.drafts.database import read_controls, set_control
from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import DraftWeights, save_draft
from livedraft.learning import gate
from livedraft.learning.batches import Example, example_from_trace
from livedraft.learning.checkpoint import read_checkpoint, write_checkpoint
from livedraft.learning.drift import DriftWatch
from livedraft.learning.earlier import EarlierDrafts
from livedraft.learning.forward import TargetParts
from livedraft.learning.memory import Memory
from livedraft.learning.pacing import Pacing
from livedraft.learning.process import checkpoint_name
from livedraft.learning.rates import RateTrial
from livedraft.learning.reports import Reports
from livedraft.learning.scoring import Score
from livedraft.learning.selection import Reference
from livedraft.learning.store import Streams, TraceRow, TraceStore
from livedraft.learning.trainer import BadStepError, Trainer, require_memory
from livedraft.learning.versions import Versions
from livedraft.records import DraftVersion, Trace, UserError

POLL_SECONDS = 0.1
CHECKPOINT_SECONDS, IDLE_CHECKPOINT_SECONDS = 60.0, 10.0
"""From one checkpoint to the next while there is work, and when there is none any more: then a kill loses no step."""
MAX_READ_A_TURN, MAX_SCORED_A_TURN = 256, 16
"""After a pause or an import thousands may wait: operators are heeded, candidates tested and steps taken in between."""
LONG_IDLE_SECONDS = 30.0
"""Without a new trace for so long, what can be replayed is replayed at once."""
MAX_BAD_STEPS = 3
"""Steps in a row that would have ruined the weights; then the trainer starts again from the version in service."""
REQUESTS_TO_CLOSE = 64
"""Served by one version without a roll-back: as many as the watch looks at."""
REQUESTS_BETWEEN_PRIORS = 64
"""Scored, until serving is told again what to expect of the draft it has."""
MAX_COOLDOWN_DOUBLINGS = 5
"""The breaker: each roll-back in a row doubles what has to be learnt before the next candidate, up to 32 times; one version
that stays closes it again."""


class Worker:
    def __init__(
        self,
        *,
        state: Path,
        target: Path,
        route: str,
        config: LearningConfig,
        max_positions: int,
        parts: TargetParts | None = None,
        has_had_its_share: Callable[[float], bool] = lambda _seconds_since_busy: False,
        streams: Streams | None = None,
    ) -> None:
        """One route's draft. `parts`: of the target, where another worker has loaded them. `has_had_its_share`: must training
        wait for more traffic? Asked with the seconds since requests were last seen running. `streams`: whose traces it learns
        from, all where they are left out."""
        self.state, self.route, self.config = state, route, config
        self.pacing = Pacing(state, config.level, has_had_its_share)
        self.store, self.registry = TraceStore(state), Registry(state)
        in_service = self.registry.in_service(route)
        if in_service is None:
            raise UserError(f"{state} has no draft in service on route {route}; start serving with this state first.")
        self.in_service = in_service
        draft = self.registry.load(in_service)
        parts = parts or TargetParts.load(target, draft)
        require_memory(draft, config)
        self.trainer = Trainer(config=config, target=parts, draft=draft, max_positions=max_positions)
        self.max_tokens = min(max_positions, draft.max_positions or max_positions)
        """Longer traces cannot be used: past the draft's context requests decode plainly."""
        self.num_unusable = 0
        self.memory = Memory(config, parts.vocabulary_size)
        self.memory.streams = streams or Streams()
        self.rate_trial = RateTrial(self.trainer, config) if config.learning_rate is None else None
        self.reference = Reference(config)
        self.controls = read_controls(state)
        self._done_name = f"now_done:{route}"
        """Of the control that says up to which `learn now` a candidate was frozen: a kill in between must not lose one."""
        if self._done_name not in self.controls:  # what was said before there was this draft was not said to it
            set_control(state, self._done_name, self.controls["now"])
        self.is_asked = self.controls["now"] > self.controls.get(self._done_name, self.controls["now"])
        """`learn now` was said and no candidate has been frozen since: turns that score or test must not lose it."""
        self.num_bad_steps = 0
        self.reports = Reports(state, route, self._figures)
        self.drift = DriftWatch()
        self._recent_of = in_service.id
        self._recent_alphas: list[float] = []
        self.earlier = EarlierDrafts()
        self.num_drifts = 0
        self.versions = Versions(self.registry)
        self.versions.keep(in_service.id, draft, in_service=in_service.id)
        self.last_trace_id = 0
        self.num_since_candidate = self.num_replayed_since_candidate = 0
        self.num_candidates = 0
        self.num_tests_since_promotion = 0
        self.candidate: DraftVersion | None = None
        """Frozen, waiting for evidence."""
        self.canary = self.registry.canary(route)
        """Through the gate, on trial in the serving process."""
        self.num_rolled_back = 0
        """In a row."""
        self.num_served = 0
        """Requests that the version in service has served since it came; enough of them close the breaker."""
        self.num_train_tokens = 0
        self.num_steps_taken = 0
        """In this process; it never falls, as the trainer's own does when it starts again."""
        self.may_replay = True
        """Not while another route's new requests wait: they teach more."""
        self.last_loss: float | None = None
        self._newest_at = time.monotonic()
        self._to_score: list[tuple[TraceRow, Example]] = []
        self._checkpoint_path = state / checkpoint_name(route)
        self._checkpointed_at = time.monotonic()
        self._has_unsaved = False
        self.registry.reject_candidates(route)  # of a process that ended before their test
        self._resume()
        # The version in service may have learnt more than the checkpoint knows of; that is no evidence. (Ids begin again where
        # a damaged database was set aside.)
        rows = self.store.rows(limit=-1)
        learnt = min(self.in_service.last_trace_id, max((row.id for row in rows), default=0))
        self.memory.newest_trained_id = max(self.memory.newest_trained_id, learnt)
        served = [row for row in rows if row.draft_version == self.in_service.id and row.id >= self.memory.drift_id]
        self.drift.restore({row.id: row.alpha for row in served if row.alpha is not None})

    # --- whose it is ------------------------------------------------------------------------------------------------

    def serve(self, streams: Streams) -> None:
        """It learns from these streams' traces from now on, and is judged on them alone."""
        if streams != self.memory.streams:
            self.memory.serve(streams)
            self.drift.clear()  # other streams are accepted otherwise without any change of traffic

    def start_as_copy_of(self, other: Worker) -> None:
        """Train on where the other's trainer is, not from what serves: that may be hundreds of requests older. What was learnt
        since is offered to the gate here as any candidate is."""
        self.trainer.load_state_tensors(other.trainer.state_tensors())
        if self.rate_trial is not None:
            self.rate_trial = RateTrial(self.trainer, self.config)
        self.memory.start_as_copy_of(other.memory)
        self.num_since_candidate = other.num_since_candidate
        self.checkpoint()  # a kill now must not make it train on all that again

    # --- the loop ---------------------------------------------------------------------------------------------------

    def safe_turn(self) -> bool:
        """`turn`; with the disk full or the database locked what is learnt stays, and the next one tries again."""
        try:
            is_active = self.turn()
        except UserError as error:
            self.reports.problem(str(error))
            is_active = False
            time.sleep(10 * POLL_SECONDS)
        if not is_active:
            self._checkpoint_now_and_then(IDLE_CHECKPOINT_SECONDS)
            if not self.controls["paused"] and not self.pacing.is_resting:
                self.reports.status("waiting for traces")
        return is_active

    def turn(self) -> bool:
        """One turn; False when there was nothing to do. Raises UserError when the state folder cannot be used just now."""
        self._heed_controls()
        if self.controls["paused"]:
            self.reports.status("paused")
            return False
        self._follow_service()
        self._read_new_traces()
        has_scored = self._score_new()
        self._try_earlier()
        if self._test_candidate():
            return True
        self._checkpoint_now_and_then(CHECKPOINT_SECONDS)
        is_due = self._is_candidate_due()
        if is_due and self._is_enough(self.memory.evidence(self.memory.newest_trained_id)):
            self._freeze_candidate()
        elif self._rests():
            return has_scored or bool(self._to_score)
        elif (batch := self.memory.next_batch()) is not None:
            self._train(*batch)
        elif has_scored or self._to_score:
            return True  # under steady load some traces always wait; they must not keep the rest of the turn from happening
        elif not self._replay():
            if not ((is_due or self._has_replayed_enough()) and self.may_replay):
                return False
            self._freeze_candidate()  # idle: offer what there is, and wait for evidence
        return True

    def _has_replayed_enough(self) -> bool:
        """Idle compute has gone over as many requests again as a candidate needs new ones. The very first candidate waits for
        new ones all the same: of a handful it would be a poor one, and hold up a better one."""
        is_free = self.candidate is None and self.canary is None and self.rate_trial is None
        is_first = self.memory.num_trained < self.config.traces_per_candidate
        return is_free and not is_first and self.num_replayed_since_candidate >= self.num_needed

    def _is_candidate_due(self) -> bool:
        if self.candidate is not None or self.canary is not None:
            return False
        if self.rate_trial is not None and not (self.is_asked and self.num_since_candidate):
            return False
        return self.num_since_candidate >= (1 if self.is_asked else self.num_needed)

    @property
    def num_needed(self) -> int:
        """Requests to train on before the next candidate: more as learning slows, from the last change of traffic on; doubled
        by each roll-back in a row."""
        num_trained = self.memory.num_trained - self.memory.num_trained_at_drift
        usual = max(self.config.traces_per_candidate, num_trained // 4)
        return usual * 2 ** min(self.num_rolled_back, MAX_COOLDOWN_DOUBLINGS)

    def _heed_controls(self) -> None:
        """What an operator asked for since the last turn."""
        before, self.controls = self.controls, read_controls(self.state)
        if self.controls["forget"] != before["forget"]:
            self._forget_deleted()
        self.is_asked = self.is_asked or self.controls["now"] != before["now"]

    def _forget_deleted(self) -> None:
        """Traces that are gone from the store leave everything kept here. Weights already trained cannot be unlearnt."""
        left = {row.id for row in self.store.rows(limit=-1)}
        self.memory.forget_all_but(left)
        self._to_score = [(row, example) for row, example in self._to_score if row.id in left]
        self.versions.forget_all_but(left)
        self.store.close_shards()
        if self._checkpoint_path.exists():
            self.checkpoint()  # the one on disk counts prompts that are gone

    def _follow_service(self) -> None:
        """The watch has decided on the canary, or an operator put another version into service."""
        serving = self.registry.in_service(self.route)
        if self.canary is not None:
            status = self.registry.version(self.canary.id)["status"]
            if status == "canary":
                return
            canary, self.canary = self.canary, None
            if serving is not None and serving.id == canary.id:
                self.in_service = serving
                self.num_tests_since_promotion = self.num_served = 0
                return
            self._start_again("the canary was rolled back")
        if serving is None or serving.id == self.in_service.id:
            return
        was_rolled_back = self.registry.version(self.in_service.id)["status"] == "rolled_back"
        self.in_service = serving
        self.num_tests_since_promotion = self.num_served = 0
        self._start_again("the version in service was rolled back" if was_rolled_back else "another version serves now")

    def _start_again(self, reason: str) -> None:
        """Train on from what is in service. After a roll-back what was learnt since is not trusted, and the breaker opens."""
        weights = self._draft(self.in_service.id)
        if weights is None:
            return
        self.registry.reject_candidates(self.route)
        self.drift.clear()  # another version's acceptance says nothing about the traffic
        self.candidate = self.rate_trial = None
        self.trainer.restart_from(weights)
        self._has_unsaved = True
        if "rolled back" in reason:
            self.num_rolled_back += 1
            self.num_since_candidate = self.num_replayed_since_candidate = 0
        self.reports.event(
            "training_restarted", version=self.in_service.id, reason=reason, next_candidate_after=self.num_needed
        )

    def _read_new_traces(self) -> None:
        num_set_aside = self.store.num_set_aside
        if len(self._to_score) > MAX_READ_A_TURN:
            return
        for row in self.store.rows(after_id=self.last_trace_id, streams=self.memory.streams, limit=MAX_READ_A_TURN):
            self.last_trace_id = row.id
            self._newest_at = time.monotonic()
            trace = self.store.read(row)
            if trace is None or not self.can_use(trace):
                continue
            example = example_from_trace(trace, row.id, self.config.positions)
            if self.memory.has_trained_id(row.id) and not row.is_held_out:
                self.memory.add_trained(example)
            elif row.alpha is None:
                self._to_score.append((row, example))
            else:  # scored before a restart: its score stands
                self.memory.add(example, is_held_out=row.is_held_out)
        if self.store.num_set_aside > num_set_aside:
            self.reports.event("shards_set_aside", num_shards=self.store.num_set_aside - num_set_aside)

    def can_use(self, trace: Trace) -> bool:
        """Of this target, and of a length and with tokens that the draft can take; what it cannot is counted."""
        tokens = [*trace.prompt_token_ids, *trace.output_token_ids]
        fits = (
            bool(trace.output_token_ids)
            and bool(trace.prompt_token_ids)
            and trace.target_fingerprint == self.in_service.target_fingerprint
            and len(tokens) <= self.max_tokens
            and min(tokens) >= 0
            and max(tokens) < self.trainer.num_input_tokens
        )
        self.num_unusable += not fits
        return fits

    def _score_new(self) -> bool:
        """Prequential: with the version that served the request, before anything is trained on it."""
        if not self._to_score:
            return False
        self.reports.status("scoring")
        batch = self._to_score[:MAX_SCORED_A_TURN]
        every = 1 if self.drift.is_suspicious else self.pacing.scored_of
        by_version: dict[str, list[Example]] = {}
        for row, example in batch:
            if row.id % every == 0:
                by_version.setdefault(row.draft_version, []).append(example)
        found: dict[int, tuple[float, float, bool]] = {}
        for version, examples in by_version.items():
            if self._draft(version) is None:
                continue  # served without a draft, or by one that is gone
            for example, score in zip(examples, self._scores(version, examples), strict=True):
                found[example.trace_id] = (score.alpha, score.alpha_served, self.memory.has_trained_on(example))
        self.store.record_alpha(found)
        del self._to_score[: len(batch)]  # only now: a database that is locked costs a turn, not the traces
        for row, example in batch:
            self.memory.add(example, is_held_out=row.is_held_out)
            self.num_served += row.draft_version == self.in_service.id
        if self.num_served >= REQUESTS_TO_CLOSE:
            self.num_rolled_back = 0
        by_served = {row.id for row, _ in batch if row.draft_version == self.in_service.id}
        alphas = {trace_id: found[trace_id][0] for trace_id in sorted(by_served & found.keys())}
        self._note_alpha(list(alphas.values()))
        self._watch_for_drift(alphas)
        return True

    def _note_alpha(self, alphas: list[float]) -> None:
        """Now and then, what the draft in service is worth on the newest requests: serving takes its prior from it."""
        if self._recent_of != self.in_service.id:
            self._recent_of, self._recent_alphas = self.in_service.id, []
        self._recent_alphas += alphas
        if len(self._recent_alphas) >= REQUESTS_BETWEEN_PRIORS:
            numbers = {"recent_alpha": round(_mean(self._recent_alphas), 4), "recent_alpha_at": time.time()}
            self._recent_alphas = []
            self.registry.note(self.in_service.id, numbers)

    def _watch_for_drift(self, alpha_by_trace: Mapping[int, float]) -> None:
        """The traffic changed when the served draft is suddenly worse: then learn at the full rate, from what is new, offer a
        candidate soon, and ask the gate about the new traffic alone."""
        drift = self.drift.see(alpha_by_trace)
        if drift is None:
            return
        self.trainer.restart_schedule()
        self.memory.prefer_new(since_id=drift.since_id)
        self.num_drifts += 1
        self.num_since_candidate = self.num_replayed_since_candidate = self.num_tests_since_promotion = 0
        if self.candidate is not None:
            self.registry.reject_candidates(self.route)
            self.candidate = None
        served = self._draft(self.in_service.id)
        if served is not None:
            self.earlier.traffic_changed(self.in_service.id, served)
        self.reports.event("drift", alpha=drift.alpha, before=drift.before)

    def _try_earlier(self) -> None:
        """What served earlier traffic is tested on the new (`earlier.py`); the best that passes is a canary at once, and
        training goes on from it."""
        evidence = self.memory.since_drift() if self.earlier.untried else []
        if not self._is_enough(evidence) or self.canary is not None:
            return
        parent = [score.alpha_served for score in self._scores(self.in_service.id, evidence)]
        with self.pacing.timed():
            found = self.earlier.best(evidence, parent, self.trainer, self.pacing.step_aside, seed=self.config.seed)
        if found is not None:
            if self.candidate is not None:
                self.registry.reject_candidates(self.route)
                self.candidate = None
            version = self._publish(found.weights)
            fields = {**found.decision.as_fields(), "alpha": found.alpha}
            self.registry.start_canary(version.id, fields)
            self.trainer.restart_from(found.weights)
            self.canary = version
            self.reports.event("earlier_draft_again", version=version.id, **fields)
        self.earlier.untried = []  # only now: a database that is locked costs a turn, not the draft

    # --- training ---------------------------------------------------------------------------------------------------

    def _rests(self) -> bool:
        """Training has had its share of what serving takes."""
        rests = self.pacing.rests()
        if rests:
            self.reports.status("resting")
        return rests

    def _train(self, new: Sequence[Example], old: Sequence[Example]) -> None:
        """One optimiser step on new examples and replayed ones."""
        self.reports.status("training")
        if self.trainer.num_steps == 0:
            self._change_vocabulary()
        batch = [*new, *old]
        if self.rate_trial is not None:
            with self.pacing.timed():
                self.rate_trial.step(new, batch, self.pacing.step_aside)
        self._step(batch)
        self.memory.mark_trained(new)
        self.num_since_candidate += len(new)
        if self.memory.is_drifting:
            self._change_vocabulary()  # the new traffic's words, before a candidate needs them
        if self.rate_trial is not None and self.rate_trial.is_over:
            self._end_rate_trial()

    def _end_rate_trial(self) -> None:
        if self.rate_trial is not None:
            self.trainer, scores = self.rate_trial.winner()
            self.rate_trial = None
            self.reports.event("rate_chosen", rate=self.trainer.base_rate, alphas=scores)

    def _replay(self) -> bool:
        """Idle compute: old examples again, each at most max_passes times in all."""
        if not self.may_replay:
            return False
        is_long_idle = time.monotonic() - self._newest_at > LONG_IDLE_SECONDS
        batch = [] if self.rate_trial is not None else self.memory.idle_batch(is_long_idle=is_long_idle)
        if not batch:
            return False
        self.reports.status("replaying")
        self._step(batch)
        self.num_replayed_since_candidate += len(batch)
        return True

    def _step(self, batch: list[Example]) -> None:
        self.memory.count_use(batch)
        self._has_unsaved = True
        self.num_train_tokens += sum(example.num_tokens for example in batch)
        reference = self.reference.at(self.memory.num_trained, _mean(self.drift.recent), self.trainer)
        try:
            with self.pacing.timed():
                report = self.trainer.step(batch, self.pacing.step_aside, reference)
            self.num_steps_taken += 1
            self.last_loss = report.loss
            self.num_bad_steps = 0
        except BadStepError as error:
            self._survive_bad_step(error)

    def _survive_bad_step(self, error: BadStepError) -> None:
        self.num_bad_steps += 1
        problem = f"step {self.trainer.num_steps}: {error}"
        weights = self._draft(self.in_service.id)
        if self.num_bad_steps >= MAX_BAD_STEPS and weights is not None:
            self.trainer.restart_from(weights)
            self.num_bad_steps = 0
            problem += "; training starts again from the version in service"
        self.reports.problem(problem)

    def _change_vocabulary(self) -> None:
        """At version boundaries only: the copy in training says what the traffic says now."""
        choice = self.memory.vocabulary.choose(self.config.max_vocabulary_size)
        self.trainer.change_vocabulary(choice)
        if self.rate_trial is not None:
            self.rate_trial.change_vocabulary(choice)

    # --- candidates and the gate ------------------------------------------------------------------------------------

    def _freeze_candidate(self) -> None:
        version = self._publish(self.trainer.snapshot())
        self._end_rate_trial()  # an operator did not want to wait for it
        self.candidate = version
        self.num_since_candidate = self.num_replayed_since_candidate = 0
        self._change_vocabulary()
        if self.is_asked:
            self.is_asked = False
            set_control(self.state, self._done_name, self.controls["now"])

    def _publish(self, weights: DraftWeights) -> DraftVersion:
        """A version on disk that nothing is decided about."""
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
            num_requests_seen=self.memory.num_trained,
            last_trace_id=self.memory.newest_trained_id,
        )
        version = self.registry.publish(lambda path: save_draft(weights, path), version)
        self.versions.keep(version.id, weights, in_service=self.in_service.id)
        return version

    @staticmethod
    def _is_enough(evidence: list[Example]) -> bool:
        num_positions = sum(example.num_positions for example in evidence)
        return len(evidence) >= gate.MIN_REQUESTS and num_positions >= gate.MIN_POSITIONS

    def _test_candidate(self) -> bool:
        if self.candidate is None:
            return False
        evidence = self.memory.evidence(self.candidate.last_trace_id)
        evidence = evidence[-self.pacing.most_evidence :]
        if not self._is_enough(evidence):
            return False  # waits; nothing was tested
        self.reports.status("testing a candidate")
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
        fields = {**decision.as_fields(), "alpha": _mean([score.alpha for score in candidate_scores])}
        harmed = gate.harmed_stream(
            [example.stream for example in evidence],
            [score.alpha_served for score in candidate_scores],
            [score.alpha_served for score in parent_scores],
        )
        if decision.promote and harmed is not None:
            fields |= {"promote": False, "reason": harmed}
        if fields["promote"]:
            self.registry.start_canary(version.id, fields)
            self.candidate, self.canary = None, version
            self.reports.event("candidate_passed", version=version.id, **fields)
        else:
            self.registry.reject(version.id, fields)
            self.candidate = None
            self.reports.event("candidate_rejected", version=version.id, **fields)
        return True

    def _scores(self, version_id: str, examples: Sequence[Example]) -> list[Score]:
        """Each example's score under a version, computed once."""

        def score(unknown: Sequence[Example]) -> list[Score]:
            draft = self._draft(version_id)
            assert draft is not None
            with self.pacing.timed():
                return self.trainer.score(unknown, draft, self.pacing.step_aside)

        return self.versions.scores(version_id, examples, score)

    # --- odds and ends ----------------------------------------------------------------------------------------------

    def _draft(self, version_id: str) -> DraftWeights | None:
        return self.versions.weights(version_id, in_service=self.in_service.id)

    def served_weights(self) -> DraftWeights:
        """Of the version in service. Raises UserError when they are gone."""
        weights = self._draft(self.in_service.id)
        if weights is None:
            raise UserError(f"The weights of version {self.in_service.id} cannot be read.")
        return weights

    def scores_now(self, examples: Sequence[Example]) -> list[Score]:
        """Of any requests, under the version in service."""
        return self._scores(self.in_service.id, examples)

    def _figures(self) -> dict[str, Any]:
        """Of the status row."""
        return {
            "pid": os.getpid(),
            "num_steps": self.trainer.num_steps,
            "num_trained": self.memory.num_trained,
            "num_train_tokens": self.num_train_tokens,
            "train_seconds": round(self.pacing.train_seconds, 3),
            "train_flops": self.trainer.flops,
            "loss": self.last_loss,
            "learning_rate": self.trainer.learning_rate,
            "in_service": self.in_service.id,
            "next_candidate_after": max(0, self.num_needed - self.num_since_candidate),
            "num_rolled_back": self.num_rolled_back,
            "num_drifts": self.num_drifts,
            "num_unusable": self.num_unusable,
            "num_passed_over": self.memory.num_passed_over,
        }

    # --- surviving a kill -------------------------------------------------------------------------------------------

    def _checkpoint_now_and_then(self, seconds: float) -> None:
        if self._has_unsaved and time.monotonic() - self._checkpointed_at > seconds:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Whole or not at all. A full disk costs the checkpoint, not the training."""
        self._checkpointed_at, self._has_unsaved = time.monotonic(), False
        counters = {
            **self.memory.counters(),
            "num_since_candidate": self.num_since_candidate,
            "num_replayed_since_candidate": self.num_replayed_since_candidate,
            "num_candidates": self.num_candidates,
            "num_rolled_back": self.num_rolled_back,
            "num_tests_since_promotion": self.num_tests_since_promotion,
            "is_rate_chosen": self.rate_trial is None,
            "in_service": self.in_service.id,
        }
        try:
            write_checkpoint(self._checkpoint_path, self.trainer.state_tensors(), counters)
        except (OSError, SafetensorError) as error:
            self.reports.problem(f"the checkpoint could not be written: {error}")

    def _resume(self) -> None:
        """Go on where the last checkpoint was; from the version in service when there is none or it is damaged, and with its
        weights when another version serves now."""
        try:
            tensors, counters = read_checkpoint(self._checkpoint_path)
            if counters["in_service"] == self.in_service.id:
                self.trainer.load_state_tensors(tensors)
        except FileNotFoundError:
            return
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            self.reports.problem(f"the checkpoint cannot be read and is not used: {error}")
            return
        self.memory.restore(counters)
        for name in ("num_since_candidate", "num_replayed_since_candidate", "num_candidates", "num_rolled_back"):
            setattr(self, name, counters.get(name, 0))  # an older version's checkpoint lacks some
        if counters["in_service"] == self.in_service.id:
            self.num_tests_since_promotion = counters["num_tests_since_promotion"]
            if counters["is_rate_chosen"]:
                self.rate_trial = None
            elif self.rate_trial is not None:
                self.rate_trial = RateTrial(self.trainer, self.config)  # from the weights as they are now


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
