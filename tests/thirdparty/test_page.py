"""The page shows the example as it is, every block that claims something is held to it, and no link leads nowhere."""

import ast
import re
from pathlib import Path

import pytest

from atlas_core.contracts.backend import GpuBackend
from atlas_core.contracts.ops import OpImplementation
from atlas_core.ops.primitives import FORWARD_OPS, SAMPLE_OPS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md"), *ROOT.glob("docs/examples/*/*.md")])
FOLLOWED = ("writing-a-hardware-plugin.md", "kernel-trees.md")
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]*)(#[^)\s]*)?\)")


def page() -> str:
    return (ROOT / "docs" / "writing-a-hardware-plugin.md").read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The names under which a Markdown viewer finds headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {"#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_excerpts_are_what_the_files_say(blocks):
    shown = {name.removeprefix("file: "): text for name, text in blocks.items() if name.startswith("file: ")}
    assert len(shown) >= 8
    for name, text in shown.items():
        content = (ROOT / name.partition("#")[0]).read_text(encoding="utf-8")
        assert f"\n{text}" in f"\n{content}", f"{name} does not read\n{text}"


def test_every_transcript_is_followed_by_a_test(blocks):
    said = {name.removeprefix("said: ") for name in blocks if name.startswith("said: ")}
    followed: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "follow":
                followed |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "EDITS"
                and isinstance(node.value, ast.Dict)
            ):
                followed |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    assert said == followed
    texts = [*blocks.values(), *(ROOT.joinpath("docs", name).read_text(encoding="utf-8") for name in FOLLOWED)]
    commands = [len(re.findall(r"^ *\$ ", text, re.MULTILINE)) for text in texts]
    assert sum(commands[: len(blocks)]) == sum(commands[len(blocks) :]), "a command stands in a block without a name"


def test_the_page_names_every_op_and_every_method():
    for segment, ops in (("forward", FORWARD_OPS), ("sample", SAMPLE_OPS)):
        row = f"| {segment} | {' '.join(f'`{op.name}`' for op in ops)} |"
        assert row in page()
    methods = [name for name in vars(GpuBackend) if not name.startswith("_")]
    assert len(methods) > 20
    text = page().replace("`copy_d2h`, `…_async`", "`copy_d2h` `copy_h2d_async` `copy_d2h_async`")
    assert [name for name in methods if f"`{name}`" not in text] == []
    named = [name for name in vars(OpImplementation) if not name.startswith("_")]
    assert [name for name in named if f"{name}`" not in text] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    broken = []
    for target, anchor in LINK.findall(text):
        if "://" in target:
            continue
        found = (path.parent / target).resolve() if target else path
        if not found.exists() or (anchor and anchor not in anchors(found.read_text(encoding="utf-8"))):
            broken.append(target + anchor)
    assert not broken


def test_the_index_has_every_page():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / target).resolve() for target, _ in LINK.findall(text) if target}
    wanted = [
        path for path in PAGES if "docs" in path.relative_to(ROOT).parts and path.name not in ("index.md", "README.md")
    ]
    assert [path.name for path in wanted if path not in linked] == []
