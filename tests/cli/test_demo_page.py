"""`demo --open`: the page beside the stream, on a tiny model, over a real socket."""

import json

import httpx
import pytest

from livedraft.cli.demo_page import DemoPage, serve_together
from livedraft.llm import LLM
from livedraft.records import SamplingParams

PROMPTS = ["one", "two", "three", "four", "five"]


def requests(llm):
    return [llm.request(prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for prompt in PROMPTS]


def told(page):
    with httpx.stream("GET", f"{page.url}dashboard/live", timeout=20) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: ") and '"requests"' in line:
                return json.loads(line.removeprefix("data: "))
    raise AssertionError("the page was told nothing")


def test_the_stream_is_the_same_through_the_page_and_the_engine_comes_back(model_folder, tmp_path):
    with LLM(str(model_folder), state=tmp_path, dtype="float32", num_threads=1) as llm:
        ticks = []
        alone = serve_together(llm, requests(llm), lambda: ticks.append(1))
        assert ticks
        page = DemoPage(llm, str(model_folder))
        with page:
            assert "livedraft" in httpx.get(page.url).text
            assert serve_together(llm, requests(llm), lambda: None) == alone
            now = told(page)
            assert now["phase"] == "ready"
            assert now["requests"]["finished"] == len(PROMPTS)
            with pytest.raises(RuntimeError, match="belongs to its loop"):
                llm.generate("x")
        with pytest.raises(httpx.ConnectError):
            httpx.get(page.url)
        page.close()
        llm.close()
        assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids == alone[0]


def test_a_frozen_page_shows_what_it_showed_while_the_engine_is_measured_and_takes_no_chat(model_folder, tmp_path):
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(model_folder), state=tmp_path, dtype="float32", num_threads=1) as llm, DemoPage(llm, "m") as page:
        serve_together(llm, requests(llm), lambda: None)
        page.freeze()
        llm.close()
        llm.generate(PROMPTS, sampling)  # as the comparison does
        assert told(page)["requests"]["finished"] == len(PROMPTS)
        assert llm.engine.stats.num_emitted_tokens == 2 * 12 * len(PROMPTS)
        body = {"model": "m", "prompt": "one", "max_tokens": 4}
        refused = httpx.post(f"{page.url}v1/completions", json=body, timeout=20)
        assert refused.status_code == 400
        assert "takes no chat" in refused.json()["error"]["message"]
