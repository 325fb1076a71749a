import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.kernels.closure import closure, content_key, unchanged
from atlas_core.vocab.errors import KernelError


def names(files, source="p:a/x.cu", includes=("p:a", "p:base", "core:include")):
    return sorted(closure(source, includes, {key: text.encode() for key, text in files.items()}.get))


def test_quoted_includes_are_followed_beside_the_includer_first():
    files = {
        "p:a/x.cu": '#include "one.h"\n  #  include "sub/two.h"\n#include <cuda.h>\n',
        "p:a/one.h": '#include "step.h"',
        "p:base/one.h": "// hidden",
        "p:base/sub/two.h": '#include "three.h"\n#include "../four.h"',
        "p:base/sub/three.h": '#include "two.h"',
        "p:base/four.h": "",
        "core:include/step.h": "",
    }
    assert names(files) == sorted(files.keys() - {"p:base/one.h"})


def test_comments_do_not_include_and_strings_do_not_comment():
    text = '/* #include "a.h"\n#include "b.h" */\n// #include "c.h"\n'
    text += 'auto s = "/*"; char q = \'"\';\n#include "real.h" // "*/"\n'
    assert names({"p:a/x.cu": text, "p:a/real.h": ""}) == ["p:a/real.h", "p:a/x.cu"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('#include "gone.h"', "p:a/x.cu:3 includes 'gone.h'"),
        ('#include "../../../etc/passwd"', "which is not in the tree"),
        ("#include MACRO", "cannot be followed"),
        ("#include <seen.h>", "which is p:base/seen.h"),
    ],
)
def test_what_cannot_be_followed_is_an_error_with_its_line(line, says):
    with pytest.raises(KernelError) as caught:
        names({"p:a/x.cu": f"// one\n/* two\n*/ {line}", "p:base/seen.h": ""})
    assert says in str(caught.value)
    assert "p:a/x.cu:3" in caught.value.what


def test_the_key_changes_with_each_part():
    keys = {
        content_key("s", "p", "c"),
        content_key("S", "p", "c"),
        content_key("s", "P", "c"),
        content_key("s", "p", "C"),
    }
    assert len(keys) == 4


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_source_or_a_kernel_error(content):
    try:
        assert list(closure("p:a/x", (), {"p:a/x": content}.get)) == ["p:a/x"]
    except KernelError as error:
        assert error.what.startswith("p:a/x")


PLACES = ("p:a/x.cu", "p:a/one.h", "p:base/one.h", "p:a/two.h", "p:base/sub/two.h", "core:include/three.h")
TEXTS = st.lists(st.sampled_from(["one.h", "two.h", "sub/two.h", "three.h", "../base/one.h"]), max_size=2).map(
    lambda wanted: "".join(f'#include "{name}"\n' for name in wanted)
)


@given(st.dictionaries(st.sampled_from(PLACES), TEXTS), st.dictionaries(st.sampled_from(PLACES), st.none() | TEXTS))
@settings(deadline=None, max_examples=400)
def test_what_is_said_to_be_unchanged_has_the_closure_it_had(before, changes):
    """Whatever was added, removed or rewritten since: a closure is taken as it was only where looking again would give it."""
    includes = ("p:a", "p:base", "core:include")
    old = {"p:a/x.cu": "", **before}
    new = {path: text for path, text in {**old, **changes}.items() if text is not None}

    def found(files):
        return closure("p:a/x.cu", includes, {path: text.encode() for path, text in files.items()}.get)

    try:
        recorded = found(old)
    except KernelError:
        return
    if unchanged(recorded, new, {path: text.encode() for path, text in new.items()}.get):
        assert found(new) == recorded
    elif new == old:
        names = [path.rpartition("/")[2] for path in new]
        assert any(names.count(path.rpartition("/")[2]) > 1 for path in recorded)
