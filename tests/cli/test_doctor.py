"""``atlas doctor`` on this machine, whose CPU can serve."""

import json
import socket
from pathlib import Path

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"


def doctor(atlas, *arguments, **variables):
    said = atlas("doctor", "--hardware", "cpu", "--json", *arguments, **variables)
    assert "Traceback" not in said.err
    report = json.loads(said.out)
    assert said.code == (0 if report["ok"] else 1)
    return report["ok"], {finding["check"]: finding for finding in report["findings"]}


def test_a_model_that_can_be_served(atlas):
    ok, found = doctor(atlas, TINY, "--port", "0")
    assert ok, found
    assert found["model"]["what"].startswith(f"{TINY} can be served as cpu/llama/plain")
    assert found["kernels"]["what"].startswith("cpu: ")
    assert {finding["level"] for finding in found.values()} <= {"ok", "warn"}


def test_a_model_that_nobody_could_fetch_is_a_failure(atlas):
    ok, found = doctor(atlas, "/nowhere/model.gguf", "--port", "0")
    assert not ok
    assert (found["model"]["level"], found["model"]["what"]) == ("fail", "there is no model '/nowhere/model.gguf'")
    assert "catalogue names: smollm2" in found["model"]["cure"]
    ok, found = doctor(atlas, "somebody/something", "--port", "0", HF_HUB_OFFLINE="0")
    assert (found["model"]["level"], found["model"]["why"]) == ("warn", "atlas serve will fetch it first")


def test_the_text_ends_with_the_verdict(atlas):
    said = atlas("doctor", "--hardware", "cpu", "--port", "0")
    assert said.code == 0, said.err
    assert said.out.splitlines()[-1] == "everything that serving needs is here" or "0 broken" in said.out


def test_a_port_in_use_is_a_failure_with_its_cure(atlas):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ok, found = doctor(atlas, "--port", port)
        said = atlas("doctor", "--hardware", "cpu", "--port", port)
    assert not ok
    assert (found["port"]["level"], found["port"]["cure"]) == ("fail", "stop it, or choose another with --port")
    assert f"fail  port      port {port} on 127.0.0.1 is in use" in said.out
    assert said.out.splitlines()[-1].startswith("1 broken")


def test_a_token_is_told_of_and_never_shown(atlas):
    _, without = doctor(atlas, "--port", "0")
    assert without["hub"]["what"] in ("no Hub token is set", "HF_HUB_OFFLINE is set")
    said = atlas("doctor", "--port", "0", "--json", HF_TOKEN="hf_verysecret", HF_HUB_OFFLINE="0")
    assert "a Hub token is set" in said.out
    assert "verysecret" not in said.out + said.err


def test_a_cache_that_cannot_be_written(atlas):
    ok, found = doctor(atlas, "--port", "0", XDG_CACHE_HOME="/proc/atlas")
    assert not ok
    assert found["cache"]["level"] == "fail"
    assert "XDG_CACHE_HOME" in found["cache"]["cure"]


def test_nothing_is_left_behind(atlas, tmp_path):
    doctor(atlas, "--port", "0")
    assert not (tmp_path / "cache").exists()


def test_wrong_settings_are_a_finding_and_the_rest_is_looked_at(atlas):
    ok, found = doctor(atlas, ATLAS_PROT="7")
    assert not ok
    assert "did you mean ATLAS_PORT?" in found["settings"]["what"]
    assert found["kernels"]["level"] == "ok"


def test_a_hardware_that_is_not_installed(atlas):
    said = atlas("doctor", "--hardware", "gb100", "--port", "0")
    assert said.code == 1
    assert "no installed plugin offers the hardware 'gb100'" in said.out


def test_a_model_that_is_not_here(atlas):
    ok, found = doctor(atlas, "smollm2", "--port", "0")
    assert not ok
    assert found["model"]["cure"] == "unset HF_HUB_OFFLINE, or put it there"
    _, online = doctor(atlas, "smollm2", "--port", "0", HF_HUB_OFFLINE="0")
    assert online["model"]["level"] == "warn"
