"""The public suite of JSON Schema as constraints: what is refused and why, and the tables of docs/structured-output.md.

``python tests/text/schema_suite.py`` writes the tables anew.
"""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

from atlas_core.text.grammar import check, json_grammar, whole_grammar
from atlas_core.text.schema.keywords import ANNOTATIONS, FIRST_CLASS, FORMATS
from atlas_core.vocab.errors import RequestError

DATA = Path(__file__).parents[1] / "data" / "json_schema_suite"
PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
_VERDICT = re.compile(r"f: (?:(?P<keyword>\S+)|the schema)(?: at (?P<place>#\S*))? cannot be enforced")
# What a reason says of one schema only.
_OWN = ((re.compile(r"^regex parse error.*", re.DOTALL), "the regular expression is not understood"),
        (re.compile(r"the format '.*' is"), "the format is"), (re.compile(r"'.*' is no place"), "it is no place"),
        (re.compile(r"the patterns '.*' and '.*' of"), "patterns of"), (re.compile(r"(use anyOf) \(.*\)"), r"\1"))  # fmt: skip


@cache
def groups():
    """(file, description, schema, tests) of every schema of the suite."""
    found = []
    for path in sorted(DATA.glob("*.json")):
        suite = json.loads(path.read_text())
        found += [(path.stem, group["description"], group["schema"], group["tests"]) for group in suite]
    return found


def compiled(schema):
    """The grammar of an answer that satisfies ``schema``. Raises RequestError."""
    grammar = whole_grammar([json_grammar(schema, "f")], None, "closed")
    check(grammar, "f")
    return grammar


@cache
def verdicts():
    """For every schema of the suite its grammar, or the RequestError."""
    found = []
    for _, _, schema, _ in groups():
        try:
            found.append(compiled(schema))
        except RequestError as error:
            found.append(error)
    return found


def parts(error):
    """(keyword, place) that a refusal names."""
    found = _VERDICT.fullmatch(error.what)
    assert found, error.what
    return found["keyword"] or "", found["place"] or ""


def tables():
    """The sections of the page, by name."""
    refusals = [verdict for verdict in verdicts() if isinstance(verdict, RequestError)]
    rows = Counter((parts(error)[0] or "the whole schema", _general(error.why)) for error in refusals)
    accepted = len(verdicts()) - len(refusals)
    table = ["| keyword | refused because | schemas |", "|---|---|---|"]
    for (keyword, why), count in sorted(rows.items(), key=lambda row: (-row[1], row[0])):
        name = keyword if keyword == "the whole schema" else f"`{keyword}`"
        table.append(f"| {name} | {why} | {count} |")
    return {
        "suite": f"Of its {len(verdicts())} schemas {accepted} are accepted and {len(refusals)} refused, for these reasons:",
        "refused": "\n".join(table),
        "enforced": _listed(FIRST_CLASS),
        "annotations": _listed(ANNOTATIONS),
        "formats": _listed(FORMATS),
    }


def section(page, name):
    """A section of the page, as it is there."""
    return _place(name).search(page)[2]


def _place(name):
    return re.compile(rf"(<!-- said: {name} -->\n\n)(.*?)(?=\n\n|\s*\Z)", re.DOTALL)


def _general(why):
    for pattern, text in _OWN:
        why = pattern.sub(text, why)
    return why


def _listed(words):
    return " ".join(f"`{word}`" for word in sorted(words))


if __name__ == "__main__":
    text = PAGE.read_text()
    for title, said in tables().items():
        text = _place(title).sub(lambda match, said=said: match[1] + said, text)
    PAGE.write_text(text)
