"""Which stream of traffic a request belongs to: its route, fixed for the request's life.

The first of these that says something decides (`RoutingConfig.by` leaves some out or changes their order):
  1. the client's own word: the header x-livedraft-route, or metadata.route;
  2. the operator's rules;
  3. the API key;
  4. the system prompt: an application's requests share it;
  5. the language, where it is not the usual one: that of the instruction, where another text comes with it;
  6. the topic of the first user message: hashed words in a few clusters that follow the traffic, no labels needed.

A route is only a name here. Whether it has a draft of its own, and whose draft serves it, is learnt from the target's verdicts
(`learning/routing.py`): a wrong classification costs speed, never an answer.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import re
import threading
from pathlib import Path

import numpy as np
from py3langid.langid import MODEL_FILE, LanguageIdentifier
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import HashingVectorizer

from livedraft.config import RoutingConfig, is_route_name
from livedraft.records import DEFAULT_ROUTE, RouteHints, UserError

MAX_NAMES = 64
"""Of clients' own words, API keys and system prompts that are told apart at a time: anybody may make some up."""
_NAMES_UNTIL_AGEING = 1024
NUM_TEXT_CHARACTERS = 400
"""Of a message, half from its beginning and half from its end, where the question often is: enough to tell language and topic,
and well under a millisecond."""
LEAST_CONFIDENCE = 0.5
_NO_LANGUAGE = "zxx"
"""What ISO 639 calls identifiers, numbers and the like."""
LEAST_INSTRUCTION = 12
"""Characters of an instruction whose language can be told."""
NUM_FEATURES = 4096
TEXTS_BEFORE_TOPICS = 32
"""Seen before the first clustering; until then everything is of no topic."""
_STARTS = 4
"""Of k-means, from the first texts; the best result counts."""
_MEMORY = 500.0
"""Texts a centre is the mean of; older ones fade."""
_WORDS_MEMORY = 2000.0
"""Texts that the frequencies of words are counted over."""
_COMMONEST = 0.5
"""A word in more of the texts weighs as if it were in so many: those of one chat template must still be alike."""
_SAME_TOPIC = 0.8
"""Cosine of two centres: parts of one kind of prompt (MBPP, a chat template's questions) reach .9, GSM8K and the prose of
Spec-Bench .6 to .77, most others .1 to .3."""
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
        text = _both_ends(user_text)
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
        if confidence < LEAST_CONFIDENCE or language == _NO_LANGUAGE:
            return ""
        # "Translate this to English: ..." is answered as other English is, whatever language the text is in.
        main = self._config.main_language
        if language != main and any(self._is_rather(part, main, language) for part in _instructions(text)):
            return main
        return str(language)

    def _is_rather(self, text: str, language: str, other: str) -> bool:
        """Of the two alone: a few words are never told with confidence among all languages."""
        assert self._languages is not None
        found = dict(self._languages.rank(text))
        return bool(found.get(language, 0.0) > found.get(other, 0.0))

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


def _both_ends(text: str) -> str:
    half = NUM_TEXT_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} {text[-half:]}"


def _instructions(text: str) -> list[str]:
    """Where an instruction may stand beside the text it is about: before the first colon or line break, and the last line."""
    parts = (re.split(r"[:\n]", text, maxsplit=1)[0], text.rstrip().rsplit("\n", 1)[-1])
    return [part for part in parts if LEAST_INSTRUCTION <= len(part) < len(text.rstrip())]


class Topics:
    """Clusters of hashed words. Each centre is a running mean of its texts: it follows the traffic and keeps its number.
    Clusters that lie close together are one topic: traffic of one kind must not fall apart because there are places for more.

    Words that tell streams apart are in a good part of the texts but not in most: one in p of them weighs p · log²(p), the
    most at p = .14. (Inverse frequency alone is ruled by words that come once, as the names in a database's schema.)
    """

    def __init__(self, num_topics: int, path: Path | None) -> None:
        self._num_topics, self._path = num_topics, path
        self._words = HashingVectorizer(n_features=NUM_FEATURES, alternate_sign=False, norm=None)
        self._first: list[np.ndarray] = []
        """Until there are centres."""
        self._centres_KF: np.ndarray | None = None
        self._counts_K = np.zeros(num_topics)
        self._topics_K = list(range(num_topics))
        """The topic that each cluster belongs to."""
        self._frequencies_F = np.zeros(NUM_FEATURES)
        """Texts each feature was in, of the last `_num_texts`."""
        self._num_texts = 0.0
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
            self._count_words(features_F)
            if self._centres_KF is not None:
                self._num_seen += 1
                if self._num_seen % _TEXTS_BETWEEN_JOINING == 0:
                    self._join()
                return self._topics_K[self._follow(features_F)]
            self._first.append(features_F)
            if len(self._first) >= max(TEXTS_BEFORE_TOPICS, 2 * self._num_topics):
                self._start(np.stack(self._first))
        return None

    def _count_words(self, features_F: np.ndarray) -> None:
        fade = 1.0 - 1.0 / _WORDS_MEMORY
        self._num_texts = fade * self._num_texts + 1.0
        self._frequencies_F *= fade
        self._frequencies_F += features_F > 0

    def _weights(self) -> np.ndarray:
        share_F = np.minimum((self._frequencies_F + 0.5) / (self._num_texts + 1.0), _COMMONEST)
        weights_F: np.ndarray = (share_F * np.log(share_F) ** 2).astype(np.float32)
        return weights_F

    def _start(self, first_NF: np.ndarray) -> None:
        found = KMeans(self._num_topics, n_init=_STARTS, random_state=0).fit(_unit(first_NF * self._weights()))
        clusters_N = found.labels_
        empty_F = np.zeros(NUM_FEATURES, dtype=np.float32)  # equal texts make fewer clusters
        self._centres_KF = np.stack(
            [
                first_NF[clusters_N == cluster].mean(axis=0) if (clusters_N == cluster).any() else empty_F
                for cluster in range(self._num_topics)
            ]
        )
        self._counts_K = np.bincount(clusters_N, minlength=self._num_topics).astype(float)
        self._first = []
        self._join()

    def _join(self) -> None:
        """Which clusters are one topic (single linkage). It keeps the number that most of its texts had, a route hangs on
        it."""
        assert self._centres_KF is not None
        unit_KF = _unit(self._centres_KF * self._weights())
        is_close_KK = unit_KF @ unit_KF.T > _SAME_TOPIC
        groups = np.arange(self._num_topics)
        for one, other in np.argwhere(is_close_KK).tolist():
            groups[groups == groups[other]] = groups[one]
        members = [np.flatnonzero(groups == group).tolist() for group in np.unique(groups)]
        free = list(range(self._num_topics))
        topics = list(self._topics_K)
        for clusters in sorted(members, key=lambda clusters: -self._counts_K[clusters].sum()):
            had = sorted(clusters, key=lambda cluster: -self._counts_K[cluster])
            number = next((self._topics_K[cluster] for cluster in had if self._topics_K[cluster] in free), free[0])
            free.remove(number)
            for cluster in clusters:
                topics[cluster] = number
        self._topics_K = topics

    def _follow(self, features_F: np.ndarray) -> int:
        """The nearest centre, which moves a little towards the text."""
        centres_KF, weights_F = self._centres_KF, self._weights()
        assert centres_KF is not None
        # By angle: a mean of unlike texts is short, and by distance it would be near to everything.
        nearest = int(np.argmax(_unit(centres_KF * weights_F) @ (features_F * weights_F)))
        self._counts_K[nearest] = min(self._counts_K[nearest] + 1.0, _MEMORY)
        centres_KF[nearest] += (features_F - centres_KF[nearest]) / self._counts_K[nearest]
        return nearest

    def save(self) -> None:
        """Whole or not at all."""
        with self._lock:
            if self._path is None or self._centres_KF is None:
                return
            tensors = {
                "centres_KF": self._centres_KF.copy(),
                "counts_K": self._counts_K.copy(),
                "topics_K": np.array(self._topics_K),
                "frequencies_F": self._frequencies_F.copy(),
                "num_texts": np.array([self._num_texts]),
            }
        temporary = self._path.with_suffix(".tmp")
        save_file(tensors, temporary)
        os.replace(temporary, self._path)

    def _load(self, path: Path) -> None:
        """Topics of another number, or of a damaged file, start anew."""
        try:
            tensors = load_file(path)
            centres_KF, counts_K, topics_K = tensors["centres_KF"], tensors["counts_K"], tensors["topics_K"].tolist()
            frequencies_F, num_texts = tensors["frequencies_F"], float(tensors["num_texts"][0])
        except (OSError, SafetensorError, KeyError):
            return
        if centres_KF.shape == (self._num_topics, NUM_FEATURES) and counts_K.shape == (self._num_topics,):
            self._centres_KF, self._counts_K, self._topics_K = centres_KF.copy(), counts_K.copy(), topics_K
            self._frequencies_F, self._num_texts = frequencies_F.copy(), num_texts


def _unit(vectors_NF: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = vectors_NF / np.maximum(1e-9, np.linalg.norm(vectors_NF, axis=1, keepdims=True))
    return scaled
