"""The documents' pictures are taken of a page that has learnt, or not at all."""

import pytest

from tests.e2e import screenshots

LEARNT = {"#acceptance-legend": "default\n▲ promoted", "#learning-note": "1,070 requests learnt from"}


class Page:
    def __init__(self, shown):
        self.shown = shown

    def text(self, selector):
        return self.shown.get(selector, "")


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (LEARNT, None),
        (LEARNT | {"#acceptance-legend": "default\n× rejected"}, "no mark of a promotion"),
        (LEARNT | {"#learning-note": "0 requests learnt from"}, "'0 requests learnt from'"),
        (LEARNT | {"#learning-note": "– requests learnt from"}, "Nothing is learnt"),
        (LEARNT | {"#learning-note": "nothing is stored"}, "Nothing is learnt"),
        ({}, "no mark"),
    ],
)
def test_what_a_picture_has_to_show(monkeypatch, shown, missing):
    if missing is None:
        screenshots.wait_for_learning(Page(shown), 0.0)
        return
    monkeypatch.setattr(screenshots.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        screenshots.wait_for_learning(Page(shown), 0.0)
    assert missing in str(ended.value)
