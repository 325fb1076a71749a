"""HTTPS with a certificate of our own, and the hangup that has keys and certificates read again."""

import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time

import httpx
import pytest

from atlas_core.server.listen import is_loopback, url_of
from atlas_core.server.run import check_tls
from atlas_core.vocab.errors import UsageError

PROGRAM = """
import asyncio, sys
from pathlib import Path
from atlas_core.server.app import Application
from atlas_core.server.options import ServerOptions
from atlas_core.server.listen import bind_socket, url_of
from atlas_core.server.run import run

class Lines:
    def progress(self, progress): pass
    def ready(self, url, info): pass
    def notice(self, text): pass

async def bring_up(on_progress):
    await asyncio.Event().wait()

folder = Path(sys.argv[1])
options = ServerOptions(api_keys_file=folder / "keys", tls=(folder / "cert.pem", folder / "key.pem"))
listener = bind_socket("127.0.0.1", 0)
print(url_of(listener, "https"), flush=True)
sys.exit(run(Application(bring_up, options, Lines()), listener))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two self-signed certificates and their keys, one of them once more with a password."""
    folder = tmp_path_factory.mktemp("certificates")
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")

    def openssl(*words):
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    for name in ("first", "second"):
        openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}.test",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}-key.pem", "-out", f"{name}-cert.pem",
        )  # fmt: skip
    openssl("pkey", "-in", "first-key.pem", "-aes256", "-passout", "pass:word", "-out", "locked-key.pem")
    return folder


def status(url, certificate, key):
    trusted = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(verify=trusted, trust_env=False, timeout=10) as client:
        return client.get(f"{url}/version", headers={"x-api-key": key}).status_code


def test_https_and_a_hangup(made, tmp_path):
    first, second = made / "first-cert.pem", made / "second-cert.pem"

    def install(name):
        for kind in ("cert", "key"):
            shutil.copy(made / f"{name}-{kind}.pem", tmp_path / f"{kind}.pem")

    install("first")
    (tmp_path / "keys").write_text("one\n")
    (tmp_path / "keys").chmod(0o600)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        url = process.stdout.readline().decode().strip()
        assert url.startswith("https://"), process.stderr.read()
        assert status(url, first, "one") == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            status(url, second, "one")
        install("second")
        (tmp_path / "keys").write_text("two\n")
        process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 10
        while True:
            try:
                assert status(url, second, "two") == 200
                break
            except (httpx.ConnectError, AssertionError):
                assert time.monotonic() < end
                time.sleep(0.05)
        # What cannot be used leaves the old in place.
        (tmp_path / "cert.pem").write_text("nothing")
        (tmp_path / "keys").write_text("")
        process.send_signal(signal.SIGHUP)
        said = b""
        while b"the old one stays" not in said:
            said += process.stderr.readline()
        assert status(url, second, "two") == 200
    finally:
        process.terminate()
        process.communicate(timeout=10)
    assert process.returncode == 0
    assert b"the old ones stay" in said


def test_certificates_that_cannot_be_used(made, tmp_path):
    check_tls(made / "first-cert.pem", made / "first-key.pem")
    with pytest.raises(UsageError, match="another certificate"):
        check_tls(made / "first-cert.pem", made / "second-key.pem")
    with pytest.raises(UsageError, match="cannot be read"):
        check_tls(tmp_path / "none.pem", made / "first-key.pem")
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(UsageError, match="not PEM"):
        check_tls(tmp_path / "text.pem", made / "first-key.pem")
    with pytest.raises(UsageError, match="has a password"):
        check_tls(made / "first-cert.pem", made / "locked-key.pem")


def test_what_is_open_to_others():
    with socket.socket() as closed, socket.socket() as opened:
        closed.bind(("127.0.0.1", 0))
        opened.bind(("0.0.0.0", 0))
        assert is_loopback(closed)
        assert not is_loopback(opened)
        assert url_of(closed, "https") == f"https://127.0.0.1:{closed.getsockname()[1]}"
