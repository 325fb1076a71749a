import io

from atlas_core.llm.progress import Line
from atlas_core.vocab.messages import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def told(shown, stream):
    times = iter([0.0, 0.05, 0.2, 0.21])
    line = Line(shown, stream, lambda: next(times))
    line.loading(Progress("weights", 50, 200, "layer 3"))
    line.loading(Progress("weights", 60, 200, "layer 4"))  # too soon after the last
    line.generating(1, 4, 20, 2.0)
    line.generating(4, 4, 80, 4.0)  # the last one is always shown
    line.clear()
    return stream.getvalue()


def test_one_line_is_rewritten_and_taken_away():
    assert told(None, Terminal()).split("\r\x1b[K") == [
        "",
        "weights [######..................]  25% layer 3",
        "generating [######..................]  25% 1/4, 10.0 tokens/s",
        "generating [########################] 100% 4/4, 20.0 tokens/s",
        "",
    ]


def test_nothing_where_there_is_no_terminal_unless_it_was_asked_for():
    assert told(None, io.StringIO()) == ""
    assert told(False, Terminal()) == ""
    assert "25%" in told(True, io.StringIO())


def test_a_phase_of_unknown_length():
    stream = Terminal()
    Line(None, stream, lambda: 0.0).loading(Progress("graphs", 0, 0))
    assert stream.getvalue() == "\r\x1b[Kgraphs …"
