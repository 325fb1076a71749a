import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from atlas_core.loading import hub
from atlas_core.vocab.errors import CheckpointError

COMMIT = "a" * 40


def nothing(done, total, note):
    pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The library's cache with one repository in it, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--some--model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_what_is_cached_is_used_offline(cache):
    assert hub.snapshot("some/model", None, nothing) == cache
    assert hub.snapshot("some/model", "main", nothing, files=["config.json"]) == cache


def test_what_is_not_cached_is_an_error_offline(cache):
    with pytest.raises(CheckpointError, match="not in the local cache") as caught:
        hub.snapshot("some/other", None, nothing)
    assert "offline" in caught.value.why


def answer(monkeypatch, error):
    def repo_info(self, repo, **options):
        assert options["timeout"] <= 10
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)


@pytest.mark.parametrize(
    ("kind", "said", "cure"),
    [
        (errors.GatedRepoError, "given access", "HF_TOKEN"),
        (errors.RepositoryNotFoundError, "not on the Hub", "spelling"),
        (errors.RevisionNotFoundError, "no revision v9", "branch"),
    ],
)
def test_answers_of_the_hub(cache, monkeypatch, kind, said, cure):
    response = httpx.Response(404, request=httpx.Request("GET", "https://example.org"))
    answer(monkeypatch, kind("first line\nsecond line", response=response))
    with pytest.raises(CheckpointError, match=said) as caught:
        hub.snapshot("some/model", "v9", nothing)
    assert caught.value.why == "first line"
    assert cure in caught.value.cure


def test_a_network_that_does_not_answer_is_no_network(cache, monkeypatch):
    answer(monkeypatch, TimeoutError("timed out"))
    assert hub.snapshot("some/model", None, nothing) == cache


def test_bytes_are_reported_and_files_are_not():
    seen = []
    bar = hub._bar("some/model", lambda *step: seen.append(step))
    written = bar(total=0, unit="B", name="huggingface_hub.snapshot_download", desc="x")
    written.total = 10
    received = bar(total=10, unit="B", name="huggingface_hub.snapshot_download.transfer")
    files = bar(total=3)
    for each in (written, received, files):
        each.update(4)
        each.refresh()
        each.close()
    assert seen == [(4, 10, "some/model")]
    assert list(bar(["a", "b"])) == ["a", "b"]
