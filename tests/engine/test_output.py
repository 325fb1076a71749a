import pytest
from scripted_engine import EOS, SPELLINGS, ScriptedText

from atlas_core.engine.output import Alternatives, Output
from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.messages import Generate, Position, TokenLogprob
from atlas_core.vocab.sampling import SamplingParams


def ids(*spellings):
    return [SPELLINGS.index(s if isinstance(s, bytes) else s.encode()) for s in spellings]


def run(spellings, *, length=100, alternatives=None, **sampling):
    output = Output(Generate("r", (1, 2), SamplingParams(**sampling)), (EOS,), ScriptedText())
    deltas = []
    for index, token in enumerate(ids(*spellings), 1):
        deltas.append(output.push(token, alternatives, last=index == length))
        if deltas[-1].finish:
            break
    return deltas


def texts(deltas):
    return [delta.text for delta in deltas]


def test_a_stop_string_over_several_tokens_is_never_shown():
    deltas = run(["a", "st", "o", "p", "b"], stop=("stop",))
    assert texts(deltas) == ["a", "", "", ""]
    assert (deltas[-1].finish, deltas[-1].stop, deltas[-1].completion_tokens) == ("stop", "stop", 4)


def test_a_false_start_is_shown_when_it_is_known_to_be_one():
    deltas = run(["a", "st", "a", "st"], length=4, stop=("stop",))
    assert texts(deltas) == ["a", "", "sta", "st"]
    assert (deltas[-1].finish, deltas[-1].stop) == ("length", None)


def test_a_stop_string_may_be_shown_on_demand():
    deltas = run(["a", "stop"], stop=("top",), include_stop_in_output=True)
    assert texts(deltas) == ["a", "stop"]


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({}, ""),
        ({"include_stop_in_output": True}, ""),
        ({"include_stop_in_output": True, "skip_special_tokens": False}, "</s>"),
        ({"skip_special_tokens": False}, ""),
    ],
)
def test_the_end_token_counts_and_is_shown_only_on_demand(sampling, text):
    deltas = run(["a", "</s>"], **sampling)
    assert texts(deltas) == ["a", text]
    last = deltas[-1]
    assert (last.finish, last.stop, last.tokens, last.completion_tokens) == ("stop", str(EOS), (EOS,), 2)


def test_an_end_token_releases_what_was_held_back():
    assert texts(run(["st", "</s>"], stop=("stop",))) == ["", "st"]


def test_ignored_end_tokens_are_ordinary():
    deltas = run(["a", "</s>", "b"], length=3, ignore_eos=True)
    assert [d.finish for d in deltas] == [None, None, "length"]


def test_stop_token_ids_end_beside_the_models_own():
    (stop,) = ids("b")
    deltas = run(["a", "b"], stop_token_ids=(stop,))
    assert (texts(deltas), deltas[-1].stop) == (["a", ""], str(stop))


def test_a_character_cut_by_the_limit_gives_one_replacement():
    assert texts(run([b"\xf0\x9f"], length=1)) == ["\ufffd"]
    assert texts(run([b"\xf0\x9f", b"\x98\x80"], length=2)) == ["", "😀"]


def test_stop_strings_count_after_min_tokens_only():
    deltas = run(["stop", "st", "op", "stop"], stop=("stop",), min_tokens=2)
    assert texts(deltas) == ["stop", "st", "op", ""]
    assert deltas[-1].finish == "stop"


def test_logprobs_name_tokens_by_their_own_bytes():
    half, accent = ids(b"\xf0\x9f", "é")
    (delta,) = run(
        [b"\xf0\x9f"], length=1, alternatives=Alternatives([half, accent, half], [-1.5, -0.25, -1.5]), logprobs=2
    )
    chosen = TokenLogprob(half, "\ufffd", -1.5, b"\xf0\x9f")
    assert delta.logprobs == (Position(chosen, (TokenLogprob(accent, "é", -0.25, "é".encode()), chosen)),)


def test_a_hidden_end_token_has_no_logprob():
    alternatives = Alternatives([EOS], [-0.5])
    assert [len(d.logprobs) for d in run(["</s>"], alternatives=alternatives, logprobs=0)] == [0]
    shown = run(["</s>"], alternatives=alternatives, logprobs=0, include_stop_in_output=True)
    assert [len(d.logprobs) for d in shown] == [1]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="empty"):
        run([], stop=("",))
