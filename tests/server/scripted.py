"""A backend that says what a test tells it to: the server serves any `Backend`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from livedraft.records import Request, RequestCounts, Update
from livedraft.server.openai_api import Served
from livedraft.tokenizer import Tokenizer
from tests.hf_folder import byte_tokenizer

COUNTS = RequestCounts(
    num_drafts=2,
    num_draft_tokens=6,
    num_accepted_tokens=3,
    acceptance_histogram=(1, 0, 0, 1),
    num_target_passes=4,
    num_emitted_tokens=7,
    num_prediction_tokens=5,
    num_accepted_prediction_tokens=2,
    num_cached_prompt_tokens=1,
    draft_version="v1",
    queued_seconds=0.0,
)


class ScriptedBackend:
    """Every request gets `text`, a few tokens an update, from another thread; `holds` keeps it from ending."""

    max_model_len = 400
    vocabulary_size = 258

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str,
        *,
        holds: bool = False,
        fails: bool = False,
        rounds: Sequence[Update] | None = None,
    ) -> None:
        """`rounds` are given as they are, in place of the text."""
        self.rounds = rounds
        self.tokenizer, self.text, self.holds, self.fails = tokenizer, text, holds, fails
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.threads: list[threading.Thread] = []
        self.is_closed = False

    def check(self, request: Request) -> None:
        if len(request.prompt_token_ids) > 300:
            raise ValueError("prompt is longer than the script.")

    def submit(self, request: Request, deliver) -> None:
        self.requests.append(request)
        self.threads.append(threading.Thread(target=self._speak, args=(deliver,)))
        self.threads[-1].start()

    def _speak(self, deliver) -> None:
        if self.rounds is not None:
            for update in self.rounds:
                deliver(update)
            return
        token_ids: Sequence[int] = self.tokenizer.encode_text(self.text)
        for start in range(0, len(token_ids), 3):
            deliver(Update(token_ids=tuple(token_ids[start : start + 3])))
        if self.fails:
            deliver(Update(token_ids=(), finish_reason="error", error="The server failed on this request."))
        elif not self.holds:
            deliver(Update(token_ids=(257,), finish_reason="stop", counts=COUNTS))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def snapshot(self):
        names = (
            "num_requests_running", "num_requests_waiting", "num_slots", "kv_cache_usage_perc", "prompt_tokens",
            "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
        )  # fmt: skip
        return dict.fromkeys(names, 0) | {"finished": {"stop": 3}, "speculation": [], "draft_version": "v1"}

    def close(self) -> None:
        for thread in self.threads:
            thread.join()
        self.is_closed = True


def scripted(text: str, *, template: str | None = None, max_num_seqs: int = 2, **options) -> Served:
    hf = byte_tokenizer()
    if template is not None:
        hf.chat_template = template
    tokenizer = Tokenizer(hf)
    backend = ScriptedBackend(tokenizer, text, **options)

    def make_request(prompt, sampling=None, *, store=True, tools=None, id=None, client="", hints=None):
        if isinstance(prompt, str):
            token_ids = tokenizer.encode(prompt)
        elif prompt and isinstance(prompt[0], dict):
            token_ids = tokenizer.encode_chat(prompt, tools)
        else:
            token_ids = prompt
        return Request(
            id=id,
            prompt_token_ids=tuple(token_ids),
            store=store,
            client_key=client,
            route=hints.named if hints and hints.named else "default",
        )

    return Served(
        name="script",
        backend=backend,
        tokenizer=tokenizer,
        make_request=make_request,
        max_num_seqs=max_num_seqs,
        close=backend.close,
    )


CHAT = {"model": "script", "messages": [{"role": "user", "content": "hi"}]}
