from dataclasses import replace

from livedraft.cli.status_line import StatusLine
from livedraft.drafts.database import set_control, write_status
from livedraft.speculation.stats import SpeculationStats
from tests.server.scripted import scripted


class Counters:
    """A backend of which only the counters matter."""

    def __init__(self, served):
        self.speculation = {}
        self.fields = served.backend.snapshot() | {"num_emitted_tokens": 0}

    def record(self, version, **counts):
        self.speculation.setdefault(("default", version), SpeculationStats()).record(**counts)
        self.fields["num_emitted_tokens"] += counts["num_emitted"]

    def snapshot(self):
        return self.fields | {"speculation": list(self.speculation.items())}


def line_of(**changes):
    served = scripted("text")
    counters = Counters(served)
    served = replace(served, **changes)
    served.backend = counters
    return StatusLine(served), counters


def test_an_idle_server_is_silent():
    line, counters = line_of()
    assert line.next() is None
    counters.fields["num_requests_waiting"] = 1
    assert "waiting 1" in line.next()


def test_the_line_says_what_happened_since_the_last_one():
    line, counters = line_of()
    counters.record("v1", num_drafted=2, num_accepted=2, num_emitted=3)
    counters.record("v1", num_drafted=2, num_accepted=0, num_emitted=1)
    counters.record("prediction", num_drafted=9, num_accepted=9, num_emitted=10)
    counters.fields["finished"] = {"stop": 5}
    text = line.next()
    assert "finished 2" in text
    assert "acceptance rate 0.50 (by position 0.50 0.50), mean acceptance length 2.00, k 2.0" in text
    assert "draft v1" in text
    assert "learning off" in text
    counters.record("v2", num_drafted=3, num_accepted=1, num_emitted=2)
    assert "acceptance rate 0.33 (by position 1.00 0.00 0.00), mean acceptance length 2.00, k 3.0" in line.next()
    counters.record("v2", num_drafted=0, num_accepted=0, num_emitted=1)
    assert "nothing drafted" in line.next()
    assert line.next() is None


def test_the_line_says_what_the_trainer_does(tmp_path):
    write_status(tmp_path, "trainer", {"status": "waiting for traces"})
    line, counters = line_of(state=tmp_path, learning=lambda: {"enabled": 1.0})
    counters.fields["num_requests_running"] = 1
    assert line.next().endswith("trainer: waiting for traces")
    set_control(tmp_path, "paused", 1)
    assert line.next().endswith("trainer: paused")
