import pickle
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.settings import OPTIONS, OTHER_VARIABLES, Level, Settings, Source, read_settings, with_defaults
from atlas_core.settings.kinds import choice, filling, integer, many, read_filling, seconds, size, text
from atlas_core.vocab.errors import UsageError

HARDWARE = Source(Level.HARDWARE, "HARDWARE.toml of toy")
MODEL = Source(Level.MODEL, "MODEL.toml of toy")


def test_nothing_said_is_all_built_in():
    settings = read_settings({}, {"PATH": "/bin"})
    assert settings == Settings()
    assert (settings.port, settings.bind, settings.numerics, settings.max_batch_size) == (8888, "127.0.0.1", "exact", 8)
    assert {str(settings.source(name)) for name in OPTIONS} == {"built-in"}


def test_the_stronger_source_wins_at_every_level():
    file, environ, flags = "port = 3", {"ATLAS_PORT": "4"}, {"port": "5"}
    built_in = Settings()
    hardware = with_defaults(built_in, {"port": 1}, HARDWARE)
    model = with_defaults(hardware, {"port": 2}, MODEL)
    steps = [
        (built_in, 8888, "built-in"),
        (hardware, 1, "HARDWARE.toml of toy: port"),
        (model, 2, "MODEL.toml of toy: port"),
        (read_settings({}, {}, file), 3, "atlas.toml: port"),
        (read_settings({}, environ, file), 4, "ATLAS_PORT"),
        (read_settings(flags, environ, file), 5, "--port"),
    ]
    for settings, port, origin in steps:
        assert (settings.port, str(settings.source("port"))) == (port, origin)


def test_rows_of_some_levels():
    found = with_defaults(read_settings({"port": "5"}, {}), {"max_batch_size": 2, "port": 1}, MODEL)
    assert list(found.rows(Level.HARDWARE, Level.MODEL)) == [
        ("max_batch_size", "2", "MODEL.toml of toy: max_batch_size")
    ]
    assert len(list(found.rows())) == len(OPTIONS)


def test_late_defaults_never_overrule_what_an_operator_said_nor_a_better_default():
    said = read_settings({"port": "5"}, {})
    assert with_defaults(said, {"port": 1}, MODEL) is not said
    assert with_defaults(said, {"port": 1}, MODEL) == said
    model = with_defaults(Settings(), {"max_batch_size": 2}, MODEL)
    assert with_defaults(model, {"max_batch_size": 3}, HARDWARE).max_batch_size == 2


def test_late_defaults_are_checked_even_where_unused():
    said = read_settings({"port": "5"}, {})
    with pytest.raises(UsageError, match="HARDWARE.toml of toy: unknown key 'prot'; did you mean port"):
        with_defaults(said, {"prot": 1}, HARDWARE)
    with pytest.raises(UsageError, match="HARDWARE.toml of toy: port must be a whole number from 0 to 65535"):
        with_defaults(said, {"port": 70000}, HARDWARE)


def test_every_mistake_is_told_at_once():
    with pytest.raises(UsageError) as caught:
        read_settings(
            {"port": "http"}, {"ATLAS_PROT": "1", "ATLAS_NUMERICS": "quick"}, "max_batch = 3\nbind = 7", "my.toml"
        )
    assert caught.value.what == "5 settings are wrong"
    assert caught.value.why.split("; ") == [
        "my.toml: unknown key 'max_batch'",
        "did you mean max_batch_size?",
        "my.toml: bind must be text that is not empty, not 7",
        "unknown environment variable ATLAS_PROT",
        "did you mean ATLAS_PORT?",
        "ATLAS_NUMERICS must be one of exact, fast, not 'quick'",
        "--port must be a whole number from 0 to 65535, not 'http'",
    ]


def test_variables_that_kubernetes_sets_are_recognised():
    environ = {"ATLAS_SERVICE_HOST": "10.0.0.1", "ATLAS_PORT": "tcp://10.0.0.1:80", "ATLAS_PORT_80_TCP_PORT": "80"}
    with pytest.raises(UsageError, match="3 settings") as caught:
        read_settings({}, environ)
    assert "enableServiceLinks" in caught.value.cure


def test_a_value_that_is_overruled_is_still_checked():
    with pytest.raises(UsageError, match="ATLAS_PORT must be"):
        read_settings({"port": "5"}, {"ATLAS_PORT": "x"})


def test_variables_that_are_read_elsewhere_are_no_mistake():
    assert read_settings({}, dict.fromkeys(OTHER_VARIABLES, "x")) == Settings()
    assert not set(OTHER_VARIABLES) & {option.variable for option in OPTIONS.values()}


def test_a_file_that_is_not_toml_is_a_usage_error():
    with pytest.raises(UsageError, match=r"my.toml is not TOML: .*line 1"):
        read_settings({}, {}, "port 8", "my.toml")


def test_api_keys_are_never_shown():
    settings = read_settings({"api_key": ("sesame", "mellon")}, {"ATLAS_API_KEY": "friend"})
    assert settings.api_key == ("sesame", "mellon")
    assert "sesame" not in repr(settings)
    assert ("api_key", "(2 given)", "--api-key") in list(settings.rows())
    with pytest.raises(UsageError) as caught:
        read_settings({}, {"ATLAS_API_KEY": "sesame,sesame"})
    assert "sesame" not in str(caught.value)


def test_an_empty_api_key_is_refused():
    for environ, file in (({"ATLAS_API_KEY": ""}, ""), ({"ATLAS_API_KEY": "a,"}, ""), ({}, 'api_key = [""]')):
        with pytest.raises(UsageError, match="not empty"):
            read_settings({}, environ, file)


def test_repeated_values_from_each_source():
    assert read_settings({}, {"ATLAS_SERVED_MODEL_NAME": "a, b"}).served_model_name == ("a", "b")
    assert read_settings({}, {}, 'served_model_name = ["a", "b"]').served_model_name == ("a", "b")
    with pytest.raises(UsageError, match="an array"):
        read_settings({}, {}, 'served_model_name = "a"')


def test_rows_say_what_happens_when_nothing_is_said():
    rows = {name: (value, source) for name, value, source in read_settings({"memory": "2GiB"}, {}).rows()}
    assert list(rows) == list(OPTIONS)
    assert rows["max_seq_len"] == ("(the model's own, at most 32768)", "built-in")
    assert rows["memory"] == (str(2**31), "--memory")


def test_settings_travel_to_another_process():
    settings = read_settings({"port": "5"}, {})
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_complete(option):
    assert option.help.endswith(".")
    if option.default in (None, ()):
        assert option.unset, "help must say what None means"
    else:
        assert option.kind.accept(option.default) == option.default


@pytest.mark.parametrize(
    ("told", "value"),
    [
        ("1", 1),
        ("512 MiB", 2**29),
        ("4GiB", 2**32),
        ("1.5kB", 1500),
        ("0.5MiB", 2**19),
        ("3 b", 3),
        ("2Tb", 2 * 10**12),
    ],
)
def test_sizes(told, value):
    assert size().parse(told) == value
    assert size().accept(told) == value


@pytest.mark.parametrize("told", ["", "0", "4G", "1.5", "-1", "1e9", "4 GiBs", "GiB", "٣", "1_000", "0.0001kB"])
def test_sizes_that_are_none(told):
    with pytest.raises(ValueError, match="a size"):
        size().parse(told)


@pytest.mark.parametrize(("told", "value"), [("384", (384, 384)), ("256:320", (256, 320))])
def test_sizes_of_steps(told, value):
    assert filling().parse(told) == filling().accept(told) == told
    assert read_filling(told) == value


@pytest.mark.parametrize("told", ["", "0", "-1", "1:", ":1", "1:0", "1:2:3", "1 : 2", "٣", "1.5", 384, None])
def test_sizes_of_steps_that_are_none(told):
    with pytest.raises(ValueError, match="TOKENS:COST"):
        filling().accept(told)


@pytest.mark.parametrize("told", ["", "1.0", "٣", "1_0", " 1", "0x1", "9" * 30, "nan"])
def test_integers_that_are_none(told):
    with pytest.raises(ValueError, match="whole number"):
        integer(0).parse(told)


def test_a_boolean_is_not_a_number():
    for kind in (integer(0), seconds(), size()):
        with pytest.raises(ValueError, match=r"number|size"):
            kind.accept(True)


@pytest.mark.parametrize("told", ["inf", "nan", "-1", "1e3", ""])
def test_seconds_that_are_none(told):
    with pytest.raises(ValueError, match="seconds"):
        seconds().parse(told)


def test_seconds_from_toml_are_finite():
    assert seconds().accept(2) == 2.0
    for told in ("x = inf", "x = nan", "x = -1"):
        with pytest.raises(ValueError, match="seconds"):
            seconds().accept(tomllib.loads(told)["x"])


KINDS = [integer(-5, 5), seconds(), size(), text(), choice("a", "b"), many(text()), many(integer(0)), many(filling())]


@given(st.sampled_from(KINDS), st.text())
def test_any_text_is_read_or_refused(kind, told):
    try:
        value = kind.parse(told)
    except ValueError:
        return
    assert kind.accept(value) == value


@given(
    st.sampled_from(KINDS), st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists)
)
def test_any_toml_value_is_read_or_refused(kind, told):
    try:
        value = kind.accept(told)
    except ValueError:
        return
    assert kind.accept(value) == value


@given(st.integers(0, 65535))
def test_a_port_survives_every_source(port):
    said = [
        read_settings({"port": str(port)}, {}),
        read_settings({}, {"ATLAS_PORT": str(port)}),
        read_settings({}, {}, f"port = {port}"),
    ]
    assert [settings.port for settings in said] == [port] * 3


@given(st.text(), st.dictionaries(st.sampled_from([option.variable for option in OPTIONS.values()]), st.text()))
def test_any_file_and_environment_are_read_or_refused(file, environ):
    try:
        settings = read_settings({}, environ, file)
    except UsageError as error:
        assert error.what
        assert error.cure
        return
    assert {name for name in OPTIONS if settings.source(name).level == Level.ENVIRONMENT} == {
        option.name for option in OPTIONS.values() if option.variable in environ
    }
