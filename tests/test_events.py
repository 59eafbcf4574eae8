import re
from pathlib import Path

import livedraft
from livedraft.events import _SENTENCES, Events


def test_a_listener_that_fails_is_dropped_and_harms_nobody():
    events, seen = Events(), []
    events.subscribe(lambda event: 1 / 0)
    events.subscribe(seen.append)
    events.emit("one", value=1)
    events.emit("two")
    assert [event["event"] for event in seen] == ["one", "two"]
    assert seen[0]["value"] == 1


def test_every_event_of_the_package_has_a_sentence():
    """Operators, the demo and the dashboard show sentences; a bare name would be a puzzle."""
    package = Path(livedraft.__file__).parent
    names = set()
    for file in package.rglob("*.py"):
        names |= set(
            re.findall(r'(?:emit|_emit|_record)\(\s*(?:state, )?"([a-z_]+)"', file.read_text(encoding="utf-8"))
        )
    assert len(names) > 20
    assert names <= set(_SENTENCES)
