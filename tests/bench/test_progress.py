from livedraft.bench import progress
from livedraft.bench.progress import Bar


def test_a_bar_is_on_standard_error_and_says_how_far_it_came(capsys):
    bar = Bar()
    bar.stop()  # before anything was done there is nothing to show
    for done in (1, 3):
        bar("requests [live]", done, 3)
    bar.stop()
    bar("others", 1, 2)  # a second task of the same command
    bar.stop()
    output = capsys.readouterr()
    assert output.out == ""
    assert "requests [live]" in output.err  # not taken for markup
    assert "3 of 3" in output.err
    assert "1 of 2" in output.err
    assert output.err.count("3 of 3") == 1
    assert "1 of 3" not in output.err  # no terminal: only the last state


def test_a_log_says_now_and_then_how_far_it_is(monkeypatch, capsys):
    seconds = iter([0.0, 10.0, 31.0, 31.0, 40.0, 62.0, 62.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(progress, "Progress", FakeProgress)  # its own clock is not what is tested
    bar = Bar()
    for number in (1, 2, 3, 4):
        bar("recorded [requests]", number, 40)
    assert capsys.readouterr().err.splitlines() == ["recorded [requests]: 2 of 40", "recorded [requests]: 4 of 40"]


class FakeProgress:
    def __init__(self, *columns, console):
        pass

    def start(self):
        pass

    stop = start

    def add_task(self, text, total):
        return 0

    def update(self, task, **fields):
        pass
