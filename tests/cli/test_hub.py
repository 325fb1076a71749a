"""What is said to the Hub: the token, the revision, and nothing at all when offline."""

import errno
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from atlas_core.loading import hub
from atlas_core.vocab.errors import CheckpointError


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        status, code = self.server.script
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the name is the method of the protocol


@pytest.fixture
def fake_hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen, server.script = [], (404, "RepoNotFound")
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "GatedRepo", "may be read only by those who were given access"), (404, "RepoNotFound", "is not on the Hub, or is private"),
        (404, "RevisionNotFound", "has no revision v2"),
    ],
)  # fmt: skip
def test_the_token_and_the_revision_are_sent_and_never_shown(atlas, fake_hub, status, code, told):
    fake_hub.script = status, code
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": fake_hub.url, "HF_TOKEN": "hf_verysecret"}
    said = atlas("serve", "some/model", "--revision", "v2", "--port", "0", **variables)
    said.expect(5, f"some/model {told}")
    assert ("/api/models/some/model/revision/v2", "Bearer hf_verysecret") in fake_hub.seen
    assert "verysecret" not in said.out + said.err


def test_nothing_is_sent_offline(atlas, fake_hub):
    atlas("serve", "some/model", "--port", "0", HF_ENDPOINT=fake_hub.url).expect(
        5, "HF_HUB_OFFLINE forbids to fetch it"
    )
    assert fake_hub.seen == []


def test_a_disk_that_is_full(monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "blobs/x")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(CheckpointError, match="there is no room for some/model") as caught:
        hub.snapshot("some/model", None, lambda done, total, note: None)
    assert caught.value.why == "No space left on device: blobs/x"
    assert "HF_HOME" in caught.value.cure
