"""Nothing of one machine or one workplace, and no addresses of registries, in what is published."""

import re
from pathlib import Path

PATTERNS = [
    r"/work/\w",
    r"/root/",
    r"/home/\w+/",
    r"/tmp/\w*\d",  # scratch files of one afternoon; tests use tmp_path
    r"\bissues? #?\d",
    r"pypi\.(org|python)",
    r"pythonhosted",
    r"(index|extra-index|find-links)-url",
    r"\b(docker|ghcr|quay|gcr)\.io\b",
    r"registry\.npmjs",
    r"anaconda\.org",
]
WORDS = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS), re.IGNORECASE)


def test_no_file_speaks_of_where_it_was_made(root, files):
    faults = []
    for path in files:
        if path == Path(__file__):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), 1)
        faults += [
            f"{path.relative_to(root)}:{number}: {found[0]}" for number, line in lines if (found := WORDS.search(line))
        ]
    assert not faults


def test_the_patterns_see_what_they_should():
    told = ["/work/x", "see issue 12", "issue #3", "https://pypi.org/simple", "ghcr.io/x/y", "/tmp/h3"]
    assert [text for text in told if not WORDS.search(text)] == []
    assert WORDS.search("at work/play, an issue, pypi, tmp_path, scope=session") is None
