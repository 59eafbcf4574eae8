from livedraft.events import Events


def test_a_listener_that_fails_is_dropped_and_harms_nobody():
    events, seen = Events(), []
    events.subscribe(lambda event: 1 / 0)
    events.subscribe(seen.append)
    events.emit("one", value=1)
    events.emit("two")
    assert [event["event"] for event in seen] == ["one", "two"]
    assert seen[0]["value"] == 1
