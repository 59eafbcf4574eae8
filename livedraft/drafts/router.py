"""Which stream of traffic a request belongs to: its route, fixed for the request's life.

The first of these that says something decides (`RoutingConfig.by` leaves some out or changes their order):
  1. the client's own word: the header x-livedraft-route, or metadata.route;
  2. the operator's rules;
  3. the API key;
  4. the system prompt: an application's requests share it;
  5. the language, where it is not the usual one;
  6. the topic of the first user message: hashed words in a few clusters that follow the traffic, no labels needed.

A route is only a name here. Whether it has a draft of its own, and whose draft serves it, is learnt from the target's verdicts
(`learning/routing.py`): a wrong classification costs speed, never an answer.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import threading
from pathlib import Path

import numpy as np
from py3langid.langid import MODEL_FILE, LanguageIdentifier
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sklearn.cluster import kmeans_plusplus
from sklearn.feature_extraction.text import HashingVectorizer

from livedraft.config import RoutingConfig, is_route_name
from livedraft.records import DEFAULT_ROUTE, RouteHints, UserError

MAX_NAMES = 64
"""Of clients' own words, API keys and system prompts that are told apart at a time: anybody may make some up."""
_NAMES_UNTIL_AGEING = 1024
NUM_TEXT_CHARACTERS = 400
"""Of a message: enough to tell language and topic, and well under a millisecond."""
LEAST_CONFIDENCE = 0.5
NUM_FEATURES = 4096
TEXTS_BEFORE_TOPICS = 64
"""Seen before the first clustering; until then everything is of no topic."""
_FIRST_PASSES = 4
_MEMORY = 500.0
"""Texts a centre is the mean of; older ones fade."""
_SAME_TOPIC = 0.6
"""Cosine of two centres: within GSM8K, MBPP or a chat template's questions it is .6 to .95, between them .1 to .4."""
_TEXTS_BETWEEN_JOINING = 32
TOPICS_NAME = "topics.safetensors"


@functools.cache
def _language_identifier() -> LanguageIdentifier:
    """A second of loading, once a process."""
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


class Router:
    """Called from any thread."""

    def __init__(self, config: RoutingConfig, *, secret: bytes, folder: Path | None = None) -> None:
        """`secret` keys the hashes that system prompts and API keys are named by. Topics survive a restart in `folder`."""
        self._config, self._secret = config, secret
        self._languages = _language_identifier() if self._needs_language else None
        self._topics = Topics(config.num_topics, None if folder is None else folder / TOPICS_NAME)
        self._names: dict[str, int] = {}
        """By name, how often it came; halved now and then, so that those that stopped coming make room."""
        self._num_named = 0
        self._lock = threading.Lock()

    @property
    def _needs_language(self) -> bool:
        return bool({"language", "topic"} & set(self._config.by)) or any(rule.language for rule in self._config.rules)

    def route_of(self, system_prompt: str, user_text: str, hints: RouteHints) -> str:
        """Under a millisecond. Never raises for what a client wrote."""
        if not self._config.enabled:
            return DEFAULT_ROUTE
        if is_route_name(hints.named) and (name := self._known(hints.named)):
            return name
        text = user_text[:NUM_TEXT_CHARACTERS]
        language = self._language(text)
        for rule in self._config.rules:
            if (
                rule.api_key in (None, hints.api_key)
                and rule.language in (None, language)
                and (rule.system_prompt_contains is None or rule.system_prompt_contains in system_prompt)
            ):
                return rule.route
        for kind in self._config.by:
            route = self._by(kind, system_prompt, text, language, hints)
            if route is not None:
                return route
        return DEFAULT_ROUTE

    def _by(self, kind: str, system_prompt: str, text: str, language: str, hints: RouteHints) -> str | None:
        if kind == "api_key" and hints.api_key:
            return self._known(f"key-{self._hash(hints.api_key)}")
        if kind == "system_prompt" and system_prompt:
            return self._known(f"system-{self._hash(system_prompt)}")
        if kind == "language" and language not in ("", self._config.main_language):
            return f"language-{language}"
        if kind == "topic" and text:
            topic = self._topics.of(text)
            return None if topic is None else f"topic-{topic}"
        return None

    def _language(self, text: str) -> str:
        """Empty where it cannot be told."""
        if self._languages is None or not text:
            return ""
        language, confidence = self._languages.classify(text)
        return str(language) if confidence >= LEAST_CONFIDENCE else ""

    def _hash(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:8]

    def _known(self, name: str) -> str | None:
        """The name, or None while there are too many others."""
        with self._lock:
            if name not in self._names and len(self._names) >= MAX_NAMES:
                return None
            self._names[name] = self._names.get(name, 0) + 1
            self._num_named += 1
            if self._num_named % _NAMES_UNTIL_AGEING == 0:
                self._names = {name: count // 2 for name, count in self._names.items() if count > 1}
        return name

    def save(self) -> None:
        """What was learnt of topics. Raises UserError on a full disk."""
        try:
            self._topics.save()
        except (OSError, SafetensorError) as error:
            raise UserError(f"The topics could not be stored ({error}); free disk space.") from error


class Topics:
    """Clusters of hashed words. Each centre is a running mean of its texts: it follows the traffic and keeps its number.
    Clusters that lie close together are one topic: traffic of one kind must not fall apart because there are places for more.
    """

    def __init__(self, num_topics: int, path: Path | None) -> None:
        self._num_topics, self._path = num_topics, path
        self._words = HashingVectorizer(n_features=NUM_FEATURES, alternate_sign=False, norm=None)
        self._first: list[np.ndarray] = []
        """Until there are centres."""
        self._centres_KF: np.ndarray | None = None
        self._counts_K = np.zeros(num_topics)
        self._topics_K = list(range(num_topics))
        """The topic that each cluster belongs to: the lowest number of those it is close to."""
        self._num_seen = 0
        self._lock = threading.Lock()
        if path is not None:
            self._load(path)

    def of(self, text: str) -> int | None:
        """The text's topic; None before enough was seen."""
        counts = self._words.transform([text])
        features_F = np.zeros(NUM_FEATURES, dtype=np.float32)
        features_F[counts.indices] = 1.0 + np.log(counts.data)
        features_F /= max(1e-6, float(np.linalg.norm(features_F)))
        with self._lock:
            if self._centres_KF is not None:
                self._num_seen += 1
                if self._num_seen % _TEXTS_BETWEEN_JOINING == 0:
                    self._join()
                return self._topics_K[self._follow(features_F)]
            self._first.append(features_F)
            if len(self._first) >= max(TEXTS_BEFORE_TOPICS, 2 * self._num_topics):
                self._start(np.stack(self._first))
        return None

    def _start(self, first_NF: np.ndarray) -> None:
        centres_KF, _ = kmeans_plusplus(first_NF, self._num_topics, random_state=0)
        self._centres_KF, self._first = np.ascontiguousarray(centres_KF, dtype=np.float32), []
        for _ in range(_FIRST_PASSES):
            self._counts_K[:] = 1.0
            for features_F in first_NF:
                self._follow(features_F)
        self._join()

    def _join(self) -> None:
        """Which clusters are one topic (single linkage)."""
        assert self._centres_KF is not None
        unit_KF = self._centres_KF / np.linalg.norm(self._centres_KF, axis=1, keepdims=True)
        is_close_KK = unit_KF @ unit_KF.T > _SAME_TOPIC
        topics = list(range(self._num_topics))
        for one, other in np.argwhere(is_close_KK).tolist():
            low, high = sorted((topics[one], topics[other]))
            topics = [low if topic == high else topic for topic in topics]
        self._topics_K = topics

    def _follow(self, features_F: np.ndarray) -> int:
        """The nearest centre, which moves a little towards the text."""
        centres_KF = self._centres_KF
        assert centres_KF is not None
        # By angle: a mean of unlike texts is short, and by distance it would be near to everything.
        nearest = int(np.argmax(centres_KF @ features_F / np.linalg.norm(centres_KF, axis=1)))
        self._counts_K[nearest] = min(self._counts_K[nearest] + 1.0, _MEMORY)
        centres_KF[nearest] += (features_F - centres_KF[nearest]) / self._counts_K[nearest]
        return nearest

    def save(self) -> None:
        """Whole or not at all."""
        with self._lock:
            if self._path is None or self._centres_KF is None:
                return
            tensors = {"centres_KF": self._centres_KF.copy(), "counts_K": self._counts_K.copy()}
        temporary = self._path.with_suffix(".tmp")
        save_file(tensors, temporary)
        os.replace(temporary, self._path)

    def _load(self, path: Path) -> None:
        """Topics of another number, or of a damaged file, start anew."""
        try:
            tensors = load_file(path)
            centres_KF, counts_K = tensors["centres_KF"], tensors["counts_K"]
        except (OSError, SafetensorError, KeyError):
            return
        if centres_KF.shape == (self._num_topics, NUM_FEATURES) and counts_K.shape == (self._num_topics,):
            self._centres_KF, self._counts_K = centres_KF.copy(), counts_K.copy()
            self._join()
