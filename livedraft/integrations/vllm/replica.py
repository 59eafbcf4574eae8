"""One vLLM server as the parent sees it: calls into its workers, the swap of its draft, its counters.

Everything here may take seconds: the fleet's thread calls it, never the event loop.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from livedraft.engine.watch import LiveCounts
from livedraft.integrations.vllm.drafts import ExportedVersion
from livedraft.integrations.vllm.launch import require_supported
from livedraft.integrations.vllm.wire import PROTOCOL
from livedraft.records import UserError

_CALL_SECONDS, _STAGE_SECONDS, _POLL_SECONDS = 30.0, 120.0, 0.05


class ReplicaError(Exception):
    """It did not answer, or not as agreed; it may be dead."""


class RefusedError(Exception):
    """The workers would not have these weights; nothing was touched and serving goes on."""


class DeadEngineError(Exception):
    """A swap went wrong after it had begun: the engine has to be started again."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the probe found, the same on every rank."""

    version: str
    method: str
    num_speculative_tokens: int
    has_draft: bool
    sampling: str
    """fine, repaired or broken."""
    device: str


class Replica:
    """Blocking calls to one server. Raises ReplicaError throughout."""

    def __init__(self, url: str, *, http: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = http or httpx.Client(timeout=_CALL_SECONDS)

    def close(self) -> None:
        self._http.close()

    def is_healthy(self) -> bool:
        try:
            return self._http.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def call(self, method: str, *arguments: str) -> list[Any]:
        """On every rank; one answer each."""
        results: list[Any] = self._post("/collective_rpc", json={"method": method, "args": list(arguments)})["results"]
        return results

    def _post(self, path: str, **options: Any) -> Any:
        try:
            response = self._http.post(self.url + path, **options)
            if response.status_code == 404:
                raise ReplicaError(
                    f"{self.url} has no {path}; start vLLM with VLLM_SERVER_DEV_MODE=1, reachable by this machine alone."
                )
            if response.status_code != 200:
                raise ReplicaError(f"{self.url}{path} answered {response.status_code}: {response.text[:300]}")
            return response.json() if response.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise ReplicaError(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    # --- start ------------------------------------------------------------------------------------------------------

    def probe(self) -> Capabilities:
        """Raises UserError with the reason when this server cannot be tapped and swapped: it is never half used."""
        try:
            found = self.call("livedraft_probe")
        except ReplicaError as error:
            if "livedraft_probe" in str(error) or "500" in str(error):
                raise UserError(
                    f"The vLLM server at {self.url} runs without livedraft's extension; start it with "
                    "--worker-extension-cls livedraft.integrations.vllm.worker_extension.WorkerExtension."
                ) from error
            raise
        first = found[0]
        if first["protocol"] != PROTOCOL:
            raise UserError(
                f"The livedraft inside the vLLM server at {self.url} speaks protocol {first['protocol']} and this one "
                f"{PROTOCOL}; install the same version there."
            )
        require_supported(first["vllm"])
        problems = [problem for one in found for problem in one["problems"]]
        if problems:
            raise UserError(f"vLLM {first['vllm']} at {self.url} is not as livedraft knows it: {' '.join(problems)}")
        return Capabilities(
            version=first["vllm"], method=first["method"], num_speculative_tokens=first["num_speculative_tokens"],
            has_draft=first["has_draft"], sampling=first["sampling"], device=first["device"],
        )  # fmt: skip

    def start_tap(self, *, version: str, target: str, url: str, token: str, is_on: bool, share: float) -> str:
        """Returns why its draft cannot be swapped; empty when it can."""
        settings = {"version": version, "target": target, "url": url, "token": token, "tap": is_on, "share": share}
        return next((one["reason"] for one in self.call("livedraft_start", json.dumps(settings)) if one["reason"]), "")

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.call("livedraft_report")[0]
        return report

    def set_tap(self, is_on: bool) -> None:
        self.call("livedraft_tap", "on" if is_on else "off")

    # --- a new draft ------------------------------------------------------------------------------------------------

    def swap(self, version: ExportedVersion, *, source: str, token: str) -> dict[str, Any]:
        """Fetched and checked while requests run; then a pause of a fraction of a second. `source`: a path, or a URL of ours.

        Raises RefusedError, DeadEngineError or ReplicaError (before anything was touched).
        """
        started = time.monotonic()
        order = {"version": version.version, "source": source, "sha256": version.sha256, "token": token}
        for answer in self.call("livedraft_stage", json.dumps(order)):
            if answer["problem"]:
                raise RefusedError(answer["problem"])
        self._wait_staged(version.version)
        staged_seconds = time.monotonic() - started
        paused = time.monotonic()
        self._post("/pause", params={"mode": "keep"})
        try:
            answers = self.call("livedraft_swap", version.version)
            refused = [answer["refused"] for answer in answers if "refused" in answer]
            failed = [answer["failed"] for answer in answers if "failed" in answer]
            if failed or (refused and len(refused) < len(answers)):
                raise DeadEngineError((failed or refused)[0])
            if not refused:
                if {answer["sha256"] for answer in answers} != {version.sha256}:
                    raise DeadEngineError("Its ranks hold different drafts.")
                # Cached prefixes hold keys and values that the old draft wrote.
                self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            self._post("/resume")
        except ReplicaError as error:
            raise DeadEngineError(str(error)) from error
        if refused:
            raise RefusedError(refused[0])
        seconds = {"staged_seconds": round(staged_seconds, 3), "paused_seconds": round(time.monotonic() - paused, 3)}
        return {**answers[0], **seconds}

    def _wait_staged(self, version: str) -> None:
        deadline = time.monotonic() + _STAGE_SECONDS
        while time.monotonic() < deadline:
            answers = self.call("livedraft_staged", version)
            problem = next((answer["problem"] for answer in answers if answer["problem"]), "")
            if problem:
                raise RefusedError(problem)
            if all(answer["version"] == version for answer in answers):
                return
            time.sleep(_POLL_SECONDS)
        raise RefusedError(f"Version {version} was not fetched within {_STAGE_SECONDS:.0f} s.")

    def forget_prefixes(self) -> None:
        """Keys and values of finished requests."""
        self._post("/reset_prefix_cache")

    # --- counters ---------------------------------------------------------------------------------------------------

    def metrics_text(self) -> str:
        try:
            response = self._http.get(f"{self.url}/metrics")
            response.raise_for_status()
            return response.text
        except httpx.HTTPError as error:
            raise ReplicaError(f"{self.url}/metrics: {error}") from error

    def counts(self) -> LiveCounts:
        """Since vLLM's start, from its public metrics."""
        return counts_of(self.metrics_text())


_COUNTED = {
    "vllm:request_success_total": "num_requests",
    "vllm:spec_decode_num_drafts_total": "num_rounds",
    "vllm:spec_decode_num_draft_tokens_total": "num_drafted_tokens",
}


def counts_of(metrics: str) -> LiveCounts:
    """From Prometheus text; what vLLM does not say is 0."""
    totals = dict.fromkeys((*_COUNTED.values(), "num_accepted"), 0)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in _COUNTED:
                totals[_COUNTED[sample.name]] += int(sample.value)
            is_per_position = sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            if is_per_position and sample.labels.get("position") == "0":
                totals["num_accepted"] += int(sample.value)
    return LiveCounts(**totals)
