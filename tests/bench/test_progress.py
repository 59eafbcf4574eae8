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
