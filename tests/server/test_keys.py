import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.server.keys import KeyRing, make_key, parse_keys
from atlas_core.server.options import ServerOptions
from atlas_core.settings import Settings, read_settings
from atlas_core.vocab.errors import UsageError


def test_lines():
    found = parse_keys("a\n b-name : b\n#c\n\nd:e:f\n", "keys")
    assert [key.name for key in found] == ["key-ca978112", "b-name", "d"]
    assert [key.digest for key in found] == [make_key(secret).digest for secret in ("a", "b", "e:f")]


@pytest.mark.parametrize(
    ("text", "line"),
    [("good\ntwo words", 2), ("schlüssel", 1), (":secretive", 1), ("name:", 1), ("a\nb\na", 3), ("n:a\nn:b", 2)],
)
def test_a_line_that_is_no_key_is_named_without_showing_it(text, line):
    with pytest.raises(UsageError) as caught:
        parse_keys(text, "the file")
    assert f"the file, line {line} " in caught.value.what
    assert all(part not in str(caught.value) for part in ("two words", "schlüssel", "secretive"))


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment"])
def test_a_file_without_keys(text):
    with pytest.raises(UsageError, match="has no API key"):
        parse_keys(text, "the file")


@given(st.text(max_size=40))
def test_any_text_is_keys_or_a_mistake(text):
    try:
        found = parse_keys(text, "f")
    except UsageError:
        return
    assert found
    assert len({key.name for key in found}) == len({key.digest for key in found}) == len(found)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        KeyRing(file=tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        KeyRing(file=tmp_path / "binary")


def test_the_file_is_looked_at_once_a_second(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one")
    now = [0.0]
    ring = KeyRing(("zero",), file, clock=lambda: now[0])
    file.write_text("name:another")
    now[0] = 0.5
    assert ring.find(["another"]) is None
    now[0] = 1.0
    assert ring.find(["another"]).name == "name"
    assert ring.find(["wrong", "zero"]) == make_key("zero")
    assert ring.find(["one"]) is None


def test_others_should_not_read_the_file(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("atlas"), "propagate", True)
    file = tmp_path / "keys"
    file.write_text("one")
    file.chmod(0o640)
    KeyRing(file=file)
    assert "chmod 600" in caplog.text
    caplog.clear()
    file.chmod(0o600)
    KeyRing(file=file)
    assert caplog.text == ""


def test_options_that_contradict_one_another(tmp_path):
    with pytest.raises(UsageError, match="--require-auth"):
        ServerOptions.of(Settings(require_auth=True))
    assert ServerOptions.of(Settings(require_auth=True, api_key=("k",))).api_keys == ("k",)
    with pytest.raises(UsageError, match="TLS"):
        ServerOptions.of(Settings(tls_cert="c"))


def test_origins():
    good = ("*", "https://example.org", "http://localhost:3000", "http://[::1]:80")
    assert read_settings({"cors_origin": good}, {}).cors_origin == good
    for bad in ("example.org", "https://example.org/", "https://a@b", "https://", "null x"):
        with pytest.raises(UsageError, match="origin"):
            read_settings({"cors_origin": (bad,)}, {})
