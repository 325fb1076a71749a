"""References between URIs: the examples of RFC 3986, section 5.4, and those that schemas bring."""

import pytest

from atlas_core.text.schema.uri import resolved, without_fragment

BASE = "http://a/b/c/d;p?q"


@pytest.mark.parametrize(
    ("reference", "whole"),
    [
        ("g:h", "g:h"), ("g", "http://a/b/c/g"), ("./g", "http://a/b/c/g"), ("g/", "http://a/b/c/g/"), ("/g", "http://a/g"),
        ("//g", "http://g"), ("?y", "http://a/b/c/d;p?y"), ("g?y", "http://a/b/c/g?y"), ("#s", "http://a/b/c/d;p?q#s"),
        ("g#s", "http://a/b/c/g#s"), ("g?y#s", "http://a/b/c/g?y#s"), (";x", "http://a/b/c/;x"), ("", "http://a/b/c/d;p?q"),
        (".", "http://a/b/c/"), ("./", "http://a/b/c/"), ("..", "http://a/b/"), ("../", "http://a/b/"), ("../g", "http://a/b/g"),
        ("../..", "http://a/"), ("../../g", "http://a/g"), ("../../../g", "http://a/g"), ("/../g", "http://a/g"), ("g.", "http://a/b/c/g."),
        ("..g", "http://a/b/c/..g"), ("./g/.", "http://a/b/c/g/"), ("g/../h", "http://a/b/c/h"), ("g;x=1/../y", "http://a/b/c/y"),
    ],
)  # fmt: skip
def test_the_examples_of_the_standard(reference, whole):
    assert resolved(BASE, reference) == whole


@pytest.mark.parametrize(
    ("base", "reference", "whole"),
    [
        ("urn:uuid:deadbeef", "#/$defs/a", "urn:uuid:deadbeef#/$defs/a"), ("", "#/x", "#/x"), ("", "item.json", "item.json"),
        ("folder/root.json", "item.json", "folder/item.json"), ("http://a", "b", "http://a/b"),
    ],
)  # fmt: skip
def test_bases_of_other_kinds(base, reference, whole):
    assert resolved(base, reference) == whole


def test_a_fragment_is_decoded():
    assert without_fragment("http://a/b#/x%25y%C3%A9") == ("http://a/b", "/x%yé")
    assert without_fragment("http://a/b") == ("http://a/b", "")
