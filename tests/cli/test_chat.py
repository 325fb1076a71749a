"""``atlas chat`` with a model in its own process, and its conversation."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from atlas_core.cli import chat
from atlas_core.vocab.errors import EngineError, RequestError

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
LOCAL = (str(TINY), "--hardware", "cpu", "--temperature", "0", "--max-tokens", "6")


def test_a_piped_prompt_gets_the_answer_alone(atlas):
    said = atlas("chat", *LOCAL, typed="hello there")
    assert said.code == 0, said.err
    assert said.out.strip()
    assert said.err == "(cut off: it reached the most tokens allowed)\n"
    assert atlas("chat", *LOCAL, typed="hello there\n").out == said.out


@pytest.mark.parametrize(
    ("arguments", "typed", "told"),
    [
        (LOCAL, " \n", "there is no prompt"),
        (("--hardware", "cpu"), "hello", "no model is given"),
        ((str(TINY), "--max-seq-len", "0"), "hello", "--max-seq-len must be"),
        ((str(TINY), "--temperature", "-1"), "hello", "Invalid value for '--temperature'"),
    ],
)
def test_mistakes(atlas, arguments, typed, told):
    atlas("chat", *arguments, typed=typed).expect(2, told)


def test_a_terminal_has_a_conversation(clean_environment):
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "atlas_core", "chat", *LOCAL], env={**clean_environment, "TERM": "dumb"}, stdin=follower,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.close(follower)
        os.write(leader, b"hello\n/reset\n/what\nhello\n/quit\n")
        out, err = process.communicate(timeout=100)
    os.close(leader)
    assert process.returncode == 0, err
    answers = [line for line in out.replace("> ", "").splitlines() if line]
    assert len(answers) == 2
    assert answers[0] == answers[1]  # after /reset the first turn is the first again
    assert "(a new conversation)" in err
    assert "there is no command /what" in err


class Typed:
    """Stands for the terminal: lines, then the end of input. ``answer`` gives what ``replies`` has, in order."""

    def __init__(self, monkeypatch, lines, replies):
        self.lines, self.replies, self.asked = list(lines), list(replies), []
        monkeypatch.setattr("builtins.input", self.input)

    def input(self, prompt):
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def answer(self, history):
        self.asked.append([dict(message) for message in history])
        reply = self.replies.pop(0)
        for piece in reply:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


def turn(role, content):
    return {"role": role, "content": content}


def test_turns_build_on_one_another(monkeypatch, capsys):
    typed = Typed(monkeypatch, ["one", "", "//two"], [[("a", None), ("b", "stop")], [("c", None), ("", "length")]])
    chat.converse(typed.answer, [turn("system", "s")])
    assert typed.asked == [
        [turn("system", "s"), turn("user", "one")],
        [turn("system", "s"), turn("user", "one"), turn("assistant", "ab"), turn("user", "/two")],
    ]
    told = capsys.readouterr()
    assert told.out == "ab\nc\n\n"
    assert told.err == "(cut off: it reached the most tokens allowed)\n"


def test_an_error_takes_the_question_back_and_an_interrupt_keeps_the_half(monkeypatch, capsys):
    replies = [[RequestError("too long")], [("ha", None), KeyboardInterrupt()], [("x", "stop")]]
    typed = Typed(monkeypatch, ["long", "half", "last", "/quit"], replies)
    chat.converse(typed.answer, [])
    assert typed.asked[-1] == [turn("user", "half"), turn("assistant", "ha"), turn("user", "last")]
    told = capsys.readouterr()
    assert "error: too long" in told.err
    assert "(stopped)" in told.err


def test_an_engine_that_is_gone_ends_the_conversation(monkeypatch):
    typed = Typed(monkeypatch, ["one", "two"], [[EngineError("gone")]])
    with pytest.raises(EngineError, match="gone"):
        chat.converse(typed.answer, [])
