"""Entry points read from dist-info folders are those that importlib.metadata finds."""

import importlib.metadata
import sys
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.plugins.installed import Point, points
from atlas_core.plugins.registry import GROUPS


def of_the_library(groups):
    found = importlib.metadata.entry_points()
    return sorted(
        (point.group, point.name, point.value, point.dist.metadata["Name"], point.dist.metadata["Version"])
        for group in groups
        for point in found.select(group=group)
    )


def ours(groups):
    return sorted((point.group, point.key, point.value, point.dist, point.version) for point in points(groups))


def test_this_environment():
    groups = [*GROUPS, "console_scripts", "pytest11"]
    assert ours(groups) == of_the_library(groups)
    assert {dist for group, _, _, dist, _ in ours(groups) if group == "atlas.dialects"} == {"atlas-core"}


def put(folder, dist, version, text, suffix="dist-info"):
    info = folder / f"{dist.replace('-', '_')}-{version}.{suffix}"
    info.mkdir(parents=True)
    (info / {"dist-info": "METADATA", "egg-info": "PKG-INFO"}[suffix]).write_text(
        f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\nSummary: Name: other\n\nName: not this\n"
    )
    (info / "entry_points.txt").write_text(text)


WORDS = st.sampled_from(["a", "b.c", "toy", "x_y"])
LINES = st.lists(
    st.one_of(
        st.builds("[{}]".format, st.sampled_from(["atlas.models", "atlas.dialects", "other"])),
        st.builds("{} = {}:{}".format, WORDS, WORDS, WORDS),
        st.builds("{}={} : {} [extra]".format, WORDS, WORDS, WORDS),
        st.builds("  # {}".format, WORDS),
        st.just(""),
    ),
    max_size=9,
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from(["one", "two-words", "Two_Words"]), st.sampled_from(["1.0", "2"]), LINES,
            st.sampled_from(["dist-info", "egg-info"]),
        ),
        max_size=4, unique_by=(lambda each: (each[0], each[1].lower().replace("_", "-")),),
    )
)  # fmt: skip
def test_any_folders(tmp_path_factory, made):
    house = tmp_path_factory.mktemp("path")
    folders = [house / "first", house / "second"]
    for folder in folders:
        folder.mkdir()
    for place, dist, version, lines, suffix in made:
        # What stands before every section the library refuses.
        put(folders[place], dist, version, "\n".join(["[other]", *lines]), suffix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*map(str, folders), str(house / "gone")])
        groups = ["atlas.models", "atlas.dialects"]
        assert ours(groups) == of_the_library(groups)


def test_an_archive_on_the_path_is_left_to_the_library(tmp_path, monkeypatch):
    put(tmp_path / "made", "zipped", "3.1", "[atlas.models]\ntoy = zipped:plugin\n")
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        for path in (tmp_path / "made").rglob("*"):
            archive.write(path, path.relative_to(tmp_path / "made"))
        archive.writestr("zipped.py", "plugin = 41\n")
    monkeypatch.syspath_prepend(tmp_path / "zipped.zip")
    (found,) = [point for point in points(["atlas.models"]) if point.dist == "zipped"]
    assert (found.key, found.version, found.module, found.load()) == ("toy", "3.1", "zipped", 41)
    monkeypatch.delitem(sys.modules, "zipped")


@pytest.mark.parametrize("value", ["", "a b:c", "a:b:c"])
def test_a_value_that_names_no_object(value):
    with pytest.raises(ValueError, match="is not of the form"):
        Point("atlas.models", "toy", value, "toy", "1").load()
