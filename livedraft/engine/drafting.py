"""Who drafts for which request, and how many tokens.

One draft is in service on each route that has one; all other requests are the default route's. For a while after a change a
second one stands beside it on a small share of the requests: a canary that has to show itself live, or the version it
replaced, kept to compare with (`engine/watch.py` judges, `engine/swap.py` acts). Requests are shared out by a hash of their
id, so neither side gets other traffic than the other.

A version changes nothing but speed (lossless rule 8), so a change may come between any two rounds: running requests move
over, and their draft cache is rebuilt by the rule of lag.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from livedraft.config import SpeculationConfig
from livedraft.engine.request import RequestState
from livedraft.engine.runner import Runner
from livedraft.engine.scheduler import RoundEntry
from livedraft.events import Events
from livedraft.records import DEFAULT_ROUTE, Proposal, Request
from livedraft.speculation.draft_length import CostModel, DraftLength, DraftLengthPolicy
from livedraft.speculation.draft_model import DraftModel
from livedraft.speculation.own_acceptance import CatchingUp, SharedWorth, WrittenPrompt
from livedraft.speculation.prediction import VERSION as PREDICTION
from livedraft.speculation.suffix import VERSION as SUFFIX
from livedraft.speculation.suffix import Match, SuffixMatcher

logger = logging.getLogger("livedraft")
DEFAULT_PRIOR = 0.3
"""The acceptance expected of a draft nobody has measured."""
DEAR_TOKENS = 1.0
"""From so much on, in tokens of plain decoding, writing a prompt into a draft's cache has to have been worth it before."""
PROBE_SHARE = 0.02
"""Of the time since the last probe that the next one may cost in catching up."""
EVIDENCE_ROUNDS = 8
"""While two versions are compared, each drafts at least one token in the first rounds of a request even where it does not
pay."""


@dataclass(eq=False)
class Resident:
    """A draft in memory with what is known of its acceptance."""

    draft: DraftModel
    lengths: DraftLengthPolicy
    rounds_since_probe: int = 0
    round_prices: Sequence[float] = ()
    """Of drafting 0, 1, ... tokens in the latest round, in tokens of plain decoding."""


@dataclass(eq=False)
class RouteDrafts:
    """Who drafts on one route, now."""

    service: Resident | None = None
    second: Resident | None = None
    share: float = 0.0
    first_takes_second: bool = False
    beside_suffixes: SharedWorth = field(default_factory=SharedWorth)
    catching_up: CatchingUp = field(default_factory=CatchingUp)

    def residents(self) -> list[Resident]:
        return [resident for resident in (self.service, self.second) if resident is not None]

    @property
    def version(self) -> str:
        return self.service.draft.version if self.service else "none"


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """What drafts from now on, on one route. `share` of the requests go to `second`; priors are expected acceptances, None is a
    guess, and a draft that is resident already keeps what was learnt about it."""

    service: DraftModel | None
    prior: float | None = None
    second: DraftModel | None = None
    second_prior: float | None = None
    share: float = 0.0


class Drafting:
    """All resident drafts. Used by the engine's thread; only `offer` and `withdraw_offer` may be called from others."""

    def __init__(
        self,
        draft: DraftModel | None,
        *,
        runner: Runner,
        speculation: SpeculationConfig,
        costs: CostModel,
        events: Events,
        prior: float = DEFAULT_PRIOR,
    ) -> None:
        self._runner, self._speculation, self._costs, self._events = runner, speculation, costs, events
        self._default = RouteDrafts()
        self._routes = {DEFAULT_ROUTE: self._default}
        self._aliases: dict[str, str] = {}
        """Streams that another route's draft serves."""
        self._default.service = self._resident(draft, prior, self._default)
        self._list_residents()
        self.failures: dict[str, str] = {}
        """By version: why it is out of service."""
        self.uses_suffixes = speculation.uses_suffixes
        self._offers: dict[str, Lineup | None] = {}
        """By route; None ends the route."""
        self._offered_aliases: dict[str, str] | None = None
        self._offered_priors: dict[str, float] = {}
        """By version."""
        self._offer_lock = threading.Lock()
        self.asked_at: dict[str, float] = {}
        """By route with a draft, resident or not: when a request of it came last (monotonic)."""

    def _resident(self, draft: DraftModel | None, prior: float | None, route: RouteDrafts) -> Resident | None:
        if draft is None:
            return None
        for resident in route.residents():
            if resident.draft is draft:
                return resident
        prior = DEFAULT_PRIOR if prior is None else prior
        return Resident(draft, self.new_length_policy(prior, is_stepwise=draft.is_stepwise))

    def new_length_policy(self, prior: float, *, is_stepwise: bool = True) -> DraftLengthPolicy:
        return DraftLengthPolicy(
            self._costs,
            max_tokens=self._speculation.max_num_speculative_tokens,
            fixed=self._speculation.num_speculative_tokens,
            prior=prior,
            is_stepwise=is_stepwise,
        )

    def _list_residents(self) -> None:
        """After each change: rounds go through these lists for every request."""
        self._residents = [resident for route in self._routes.values() for resident in route.residents()]
        self._drafts = list({id(resident.draft): resident.draft for resident in self._residents}.values())

    def residents(self) -> list[Resident]:
        """Of all routes. A draft may serve several; each route knows it by its own acceptance."""
        return self._residents

    @property
    def routes(self) -> dict[str, RouteDrafts]:
        """Those with a draft of their own, and the default one. Another thread sees a copy."""
        return dict(self._routes)

    @property
    def service(self) -> Resident | None:
        """The default route's, as `second` and `version`."""
        return self._default.service

    @property
    def second(self) -> Resident | None:
        return self._default.second

    @property
    def version(self) -> str:
        """The version really in service, not the one the registry names."""
        return self._default.version

    @property
    def second_version(self) -> str:
        return self.second.draft.version if self.second else "none"

    def route_of(self, request: Request) -> str:
        """Whose draft serves this request: the route that its stream was given to, its own, or the default one."""
        route = self._aliases.get(request.route, request.route)
        return route if route in self._routes else DEFAULT_ROUTE

    def version_for(self, state: RequestState) -> str:
        resident = self._of(state)
        return resident.draft.version if resident else "none"

    def report(self, num_requests: int) -> list[dict[str, Any]]:
        """Of each resident draft: its acceptance by position, the draft length that follows and why. From any thread;
        figures of one draft may be a round apart."""
        rows = []
        for name, route in self.routes.items():
            for resident in route.residents():
                k, reason = resident.lengths.explained(num_requests)
                rows.append(
                    {
                        "route": name,
                        "version": resident.draft.version,
                        "is_second": resident is route.second,
                        "acceptance_by_position": resident.lengths.acceptance_by_position,
                        "k": k,
                        "reason": reason,
                    }
                )
        return rows

    # --- changes ----------------------------------------------------------------------------------------------------

    def offer(self, lineup: Lineup | None, route: str = DEFAULT_ROUTE) -> None:
        """From any thread: this lineup on this route from the next round on. None: the route has no draft of its own any more,
        and the default one's serves it."""
        with self._offer_lock:
            self._offers[route] = lineup

    def offer_aliases(self, aliases: dict[str, str]) -> None:
        """From any thread: these streams are served by those routes' drafts; all others by their own or the default one."""
        with self._offer_lock:
            self._offered_aliases = dict(aliases)

    def offer_prior(self, version: str, acceptance: float) -> None:
        """From any thread: what to expect of this version from now on, where it is resident."""
        with self._offer_lock:
            self._offered_priors[version] = acceptance

    def withdraw_offer(self) -> None:
        """Keep the drafts that are in service."""
        with self._offer_lock:
            self._offers.clear()

    def take_up_offer(self, live: Iterable[RequestState]) -> None:
        """Between two rounds. `live` are all running and waiting requests."""
        if self._offered_priors:
            self._take_up_priors()
        if not self._offers and self._offered_aliases is None:
            return
        with self._offer_lock:
            offers, self._offers = self._offers, {}
            aliases, self._offered_aliases = self._offered_aliases, None
        live = list(live)
        before = {id(state): self._drafts_of(state) for state in live}
        for name, lineup in offers.items():
            if lineup is None:
                self._end_route(name)
            else:
                self._line_up(name, lineup)
        self._aliases = self._aliases if aliases is None else aliases
        self._list_residents()
        for route in self._routes.values():
            moved = [state for state in live if self._drafts_of(state) is route and before[id(state)] is not route]
            for state in moved:  # as at a swap: their cache is rebuilt by the rule of lag
                state.is_on_second = route.second is not None and _bucket(state) < route.share
        for name in offers:
            if name in self._routes:
                self._share_out(self._routes[name], [s for s in live if self._drafts_of(s) is self._routes[name]])

    def _take_up_priors(self) -> None:
        with self._offer_lock:
            priors, self._offered_priors = self._offered_priors, {}
        for resident in self._residents:
            if resident.draft.version in priors:
                resident.lengths.refresh_prior(priors[resident.draft.version])

    def _end_route(self, name: str) -> None:
        left = self._routes.pop(name, None) if name != DEFAULT_ROUTE else None
        if left is not None:
            self._events.emit("draft_swapped", route=name, previous=left.version, version=self.version)

    def _line_up(self, name: str, lineup: Lineup) -> None:
        route = self._routes.get(name)
        previous = route.version if route else self.version
        route = route or RouteDrafts()
        # Caches of drafts that are new are empty: running requests catch up by the rule of lag.
        for draft in (lineup.service, lineup.second):
            if draft is not None:
                self.failures.pop(draft.version, None)  # whoever offers it again wants it tried again
        service = self._resident(lineup.service, lineup.prior, route)
        second = self._resident(lineup.second, lineup.second_prior, route)
        route.service, route.second, route.share = service, second, lineup.share if second else 0.0
        self._routes[name] = route
        if route.version != previous:  # another second one is no swap; who compares them says so
            self._events.emit("draft_swapped", route=name, previous=previous, version=route.version)

    def _share_out(self, route: RouteDrafts, live: list[RequestState]) -> None:
        """By hash, and at least one request: evidence begins with the next round."""
        for state in live:
            state.is_on_second = _bucket(state) < route.share
        route.first_takes_second = route.second is not None and not live
        if route.second is not None and live and not any(state.is_on_second for state in live):
            min(live, key=_bucket).is_on_second = True

    def assign(self, state: RequestState) -> None:
        """A new request to one of its route's two."""
        name = self._aliases.get(state.request.route, state.request.route)
        self.asked_at[name] = time.monotonic()
        route = self._drafts_of(state)
        state.is_on_second = route.second is not None and (route.first_takes_second or _bucket(state) < route.share)
        route.first_takes_second = False

    def _drafts_of(self, state: RequestState) -> RouteDrafts:
        return self._routes[self.route_of(state.request)]

    def _of(self, state: RequestState) -> Resident | None:
        route = self._drafts_of(state)
        return route.second if state.is_on_second and route.second is not None else route.service

    # --- a round ----------------------------------------------------------------------------------------------------

    def proposals(self, entries: list[RoundEntry]) -> list[Proposal | None]:
        """From the client's prediction where it fits, from a suffix that occurred before where that is worth more than the
        request's draft, from that draft otherwise; None where nothing is proposed."""
        limits = [_most_tokens(entry) for entry in entries]
        proposals = [self._predicted(entry, limit) for entry, limit in zip(entries, limits, strict=True)]
        refused = self._add_suffixes(proposals, entries, limits) if self.uses_suffixes else {}
        num_predicted = sum(len(proposal.draft_token_ids) for proposal in proposals if proposal)
        limits = [0 if proposal else limit for limit, proposal in zip(limits, proposals, strict=True)]
        for resident in self.residents():
            own = [
                self._within_draft(resident, entry, limit) if limit and self._of(entry.state) is resident else 0
                for entry, limit in zip(entries, limits, strict=True)
            ]
            if not any(limit > 0 for limit in own):
                continue
            lengths = self._lengths(resident, entries, own, num_predicted)
            drafted = self._drafted(resident, entries, lengths)
            proposals = [proposal or draft for proposal, draft in zip(proposals, drafted, strict=True)]
            num_predicted += sum(len(draft.draft_token_ids) for draft in drafted if draft)
        for index, suffix in refused.items():
            if proposals[index] is None:  # the draft was worth more and then had nothing to say
                proposals[index] = suffix
        return proposals

    def _lengths(
        self, resident: Resident, entries: list[RoundEntry], limits: list[int], num_predicted: int
    ) -> list[DraftLength]:
        """For each request of this draft: the round's choice, within what it can use."""
        num_drafting = sum(limit > 0 for limit in limits)
        num_other_rows = sum(e.num_pending_rows for e, limit in zip(entries, limits, strict=True) if limit <= 0)
        length = resident.lengths.choose(num_drafting, num_other_rows + num_predicted)
        chosen = _only_cheapest(resident.draft, entries, limits) if length.is_probe else limits
        if length.k > 0 and resident.lengths.fixed is None:
            chosen = self._worth_catching_up(resident, entries, chosen, is_probe=length.is_probe)
        resident.rounds_since_probe += 1
        num_rows = num_drafting + num_other_rows + num_predicted
        resident.round_prices = resident.lengths.prices_in_tokens(num_drafting, num_rows)
        lengths = []
        for entry, limit in zip(entries, chosen, strict=True):
            own = length
            if limit > 0:
                own = resident.lengths.adapted(length, entry.state.own_acceptance, num_drafting, num_rows)
            if own.k == 0:
                entry.state.own_acceptance.fade()
            lengths.append(replace(own, k=max(0, min(own.k, limit))))
        if resident.lengths.fixed is not None:
            return lengths
        return [
            DraftLength(k=1) if own.k == 0 and limit > 0 and self._is_evidence(entry.state) else own
            for own, limit, entry in zip(lengths, limits, entries, strict=True)
        ]

    def _is_evidence(self, state: RequestState) -> bool:
        """While two versions are compared a request's first rounds are theirs."""
        return state.num_rounds < EVIDENCE_ROUNDS and self._drafts_of(state).second is not None

    def _worth_catching_up(
        self, resident: Resident, entries: list[RoundEntry], limits: list[int], *, is_probe: bool
    ) -> list[int]:
        """0 for a request whose draft cache lacks so much, a long prompt mostly, that drafting what is left of its answer would
        not earn back writing it."""
        draft, round_seconds = resident.draft, self._costs.target_seconds(1)
        num_drafting = sum(limit > 0 for limit in limits)
        if num_drafting == 0:
            return limits
        num_rows = sum(entry.num_pending_rows for entry in entries)
        chosen = []
        for entry, limit in zip(entries, limits, strict=True):
            lag = len(entry.state.token_ids) - draft.lengths[entry.state.slot]
            if limit > 0 and lag > 1:  # the last token is written with the first draft step
                cost = (lag - 1) * self._costs.draft_write_seconds / round_seconds  # in tokens of plain decoding
                value = resident.lengths.value(num_drafting, num_rows, entry.state.own_acceptance.factor)
                rounds_left = (limit + 1) / (1.0 + max(0.0, value))
                if self.uses_suffixes:
                    value *= self._drafts_of(entry.state).beside_suffixes.share
                worth = PROBE_SHARE * resident.rounds_since_probe if is_probe else value * rounds_left
                if cost >= DEAR_TOKENS and not is_probe and entry.state.written_prompt is None:
                    limit = self._believed(entry.state, lag - 1, worth, cost, limit)
                else:
                    limit = limit if cost <= max(0.0, worth) else 0
            chosen.append(limit)
        if is_probe and any(chosen):
            resident.rounds_since_probe = 0
        return chosen

    def _believed(self, state: RequestState, num_tokens: int, worth: float, cost: float, limit: int) -> int:
        """`limit` where a long prompt is worth writing, by what came of such promises before; else 0."""
        catching_up = self._drafts_of(state).catching_up
        if cost <= max(0.0, worth * catching_up.share(num_tokens)):
            state.written_prompt = WrittenPrompt(num_tokens, worth)
            return limit
        if not state.is_prompt_refused:
            state.is_prompt_refused = True
            catching_up.refuse(num_tokens)
        return 0

    def _drafted(
        self, resident: Resident, entries: list[RoundEntry], lengths: list[DraftLength]
    ) -> Sequence[Proposal | None]:
        draft = resident.draft
        try:
            return self._runner.propose(entries, lengths, draft, resident.lengths.chances_of)
        except Exception as error:  # a broken draft costs speed, never an answer
            logger.exception("The draft %s failed and is out of service.", draft.version)
            self.failures[draft.version] = f"{type(error).__name__}: {error}"
            self._events.emit("draft_failed", version=draft.version, reason=self.failures[draft.version])
            for route in self._routes.values():
                if route.service is not None and route.service.draft is draft:
                    route.service = None
                if route.second is not None and route.second.draft is draft:
                    route.second = None
            self._list_residents()
            return [None] * len(entries)

    def _predicted(self, entry: RoundEntry, limit: int) -> Proposal | None:
        if entry.state.prediction is None or limit <= 0:
            return None
        fixed, most = self._speculation.num_speculative_tokens, self._speculation.max_num_speculative_tokens
        token_ids = entry.state.prediction.propose(min(limit, most if fixed is None else fixed))
        return Proposal(draft_token_ids=token_ids, draft_version=PREDICTION) if token_ids else None

    def _add_suffixes(
        self, proposals: list[Proposal | None], entries: list[RoundEntry], limits: list[int]
    ) -> dict[int, Proposal]:
        """Into the places where nothing is proposed yet; returns those that the draft goes before, by place."""
        refused: dict[int, Proposal] = {}
        decoding = [index for index, limit in enumerate(limits) if limit > 0]
        if not decoding:
            return refused
        num_rows = sum(entry.num_pending_rows for entry in entries)
        rate = len(decoding) / self._costs.target_seconds(num_rows)
        for index in decoding:
            state = entries[index].state
            if proposals[index] is not None or state.suffix is None:
                continue
            match = state.suffix.find()
            k, value = (0, 0.0) if match is None else self._suffix_length(
                match, state.suffix, limits[index], num_rows, rate
            )  # fmt: skip
            route = self._drafts_of(state)
            worth = self._worth_of_drafts(route, state, len(decoding), num_rows)
            route.beside_suffixes.record(max(0.0, worth), value)
            if k == 0 or match is None:
                continue
            suffix = Proposal(draft_token_ids=list(match.continuation[:k]), draft_version=SUFFIX)
            if value >= worth and not self._is_evidence(state):
                num_rows += k
                proposals[index] = suffix
            else:
                refused[index] = suffix
        return refused

    @staticmethod
    def _worth_of_drafts(route: RouteDrafts, state: RequestState, num_requests: int, num_rows: int) -> float:
        """The best of the route's drafts to this request in the coming round, as `DraftLengthPolicy.value`."""
        factor = state.own_acceptance.factor
        return max((one.lengths.value(num_requests, num_rows, factor) for one in route.residents()), default=0.0)

    def _suffix_length(
        self, match: Match, matcher: SuffixMatcher, limit: int, num_rows: int, rate: float
    ) -> tuple[int, float]:
        """(tokens to propose, what they are worth as in `DraftLengthPolicy.value`) beside `num_rows` rows, in a round that
        gives `rate` tokens a second without."""
        fixed = self._speculation.num_speculative_tokens
        most = min(
            limit, len(match.continuation), self._speculation.max_num_speculative_tokens if fixed is None else fixed
        )
        statistics, factor = matcher.traffic.statistics, matcher.own.factor
        base = self._costs.target_seconds(num_rows)
        best, worth, reach, gain = 0, 0.0, 1.0, 0.0
        for k in range(1, most + 1):
            reach *= min(1.0, statistics.acceptance(match, k - 1) * factor)
            gain += reach
            value = gain - rate * (self._costs.target_seconds(num_rows + k) - base)
            if value > worth or (fixed is not None and k == most):
                best, worth = k, value
        return best, worth

    def _within_draft(self, resident: Resident, entry: RoundEntry, limit: int) -> int:
        """Past the draft's context this request, and only this one, decodes plainly."""
        state, max_length = entry.state, resident.draft.max_length
        room = max_length - len(state.token_ids) + 1  # the last drafted token is never written
        if room > 0:
            return min(limit, room)
        if not state.is_past_draft_limit:
            state.is_past_draft_limit = True
            self._events.emit("draft_limit_passed", request=state.request.id, limit=max_length)
        return 0

    def record(self, state: RequestState, proposal: Proposal, num_drafted: int, num_accepted: int) -> None:
        """A verdict on what one of the drafts proposed."""
        for resident in self._drafts_of(state).residents():
            if resident.draft.version == proposal.draft_version:
                resident.lengths.record(num_drafted, num_accepted, proposal.confidences, state.own_acceptance)
                if state.written_prompt is not None and num_drafted < len(resident.round_prices):
                    state.written_prompt.record(num_accepted, resident.round_prices[num_drafted])

    def finish(self, state: RequestState) -> None:
        """A request's end says what came of writing its prompt."""
        if state.written_prompt is not None:
            self._drafts_of(state).catching_up.record(state.written_prompt)
            state.written_prompt = None

    # --- caches, slot by slot ---------------------------------------------------------------------------------------

    def commit(self, slot: int, num_valid_tokens: int) -> None:
        for draft in self._drafts:
            draft.commit(slot, num_valid_tokens)

    def release(self, slot: int) -> None:
        for draft in self._drafts:
            draft.release(slot)

    def adopt(self, source: int, destination: int, num_tokens: int) -> None:
        for draft in self._drafts:
            draft.adopt(source, destination, num_tokens)

    def clear_slot(self, slot: int) -> None:
        for draft in self._drafts:
            draft.decoder.clear_slot(slot)


def _bucket(state: RequestState) -> float:
    """In [0, 1), by the request's id."""
    return zlib.crc32(state.request.id.encode()) / 2**32


def _most_tokens(entry: RoundEntry) -> int:
    """Drafted tokens this request can use: none while its prompt is written, and the round's bonus is one of the rest."""
    if not entry.is_decoding:
        return 0
    request = entry.state.request
    limit = request.sampling.max_tokens - entry.state.num_output_tokens - 1
    own = request.num_speculative_tokens
    return limit if own is None else min(limit, own)


def _only_cheapest(draft: DraftModel, entries: list[RoundEntry], limits: list[int]) -> list[int]:
    """The request whose draft cache lags least: after rounds without drafting all of them lag, and catching up is dear."""
    lags = [
        len(entry.state.token_ids) - draft.lengths[entry.state.slot] if limit > 0 else sys.maxsize
        for entry, limit in zip(entries, limits, strict=True)
    ]
    cheapest = lags.index(min(lags))
    return [limit if index == cheapest else 0 for index, limit in enumerate(limits)]
