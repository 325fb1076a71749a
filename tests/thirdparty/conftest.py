"""The example distribution of docs/, installed outside the checkout as a stranger would install it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
EXAMPLE = EXAMPLES / "atlas-plugin-toy"
PAGES = [ROOT / "docs" / "writing-a-hardware-plugin.md", ROOT / "docs" / "kernel-trees.md"]
PACKAGE = "atlas_plugin_toy"
PROMPT = re.compile(r"^\$ (?:(?P<variables>(?:[A-Z_]+=\S+ )+))?(?P<command>.+)$")


def stranger() -> dict[str, str]:
    """The environment without what ``make`` and this session put there: pip takes no constraints where nothing is isolated."""
    own = ("ATLAS_", "PYTHON", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
    return {key: value for key, value in os.environ.items() if not key.startswith(own)}


@dataclass(frozen=True)
class Said:
    """What a command printed, both streams together, and how it ended."""

    code: int
    text: str


@dataclass(frozen=True)
class Site:
    """A folder of installed packages, put before the others."""

    folder: Path

    @property
    def package(self) -> Path:
        return self.folder / PACKAGE

    def moved(self, folder: Path) -> "Site":
        """The same packages, copied to ``folder``."""
        shutil.copytree(self.folder, folder)
        return Site(folder)

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that occurs once in a file of the package."""
        path = self.package / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} × {old!r}"
        path.write_text(text.replace(old, new))

    def run(self, *command: str, **variables: str) -> Said:
        """Run Python with ``command`` in the root of the checkout, where the pages' relative paths lead somewhere."""
        kept = stranger()
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**kept, **variables, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"},
        )  # fmt: skip
        return Said(done.returncode, done.stdout)

    def type(self, line: str) -> Said:
        """Run a line of a page: ``$ [NAME=value] atlas …``."""
        found = PROMPT.match(line)
        assert found is not None, f"{line!r} is not a command"
        program, *arguments = shlex.split(found["command"])
        assert program == "atlas", f"only atlas is run from a page, not {program}"
        variables = dict(pair.split("=", 1) for pair in (found["variables"] or "").split())
        return self.run("-m", "atlas_core", *arguments, **variables)


def install(source: Path, target: Path) -> Site:
    """Build and install a distribution without network, from a copy: links of the checkout become files."""
    copy = target.with_name(f"{target.name}-source")
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("_compiled", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--no-compile", "--target", str(target), str(copy)], check=True,
        env={**stranger(), "ATLAS_SKIP_BUILD": "1"},
    )  # fmt: skip
    return Site(target)


@pytest.fixture(scope="session")
def installed() -> Callable[[Path, Path], Site]:
    """``install``, for distributions that only one module needs."""
    return install


@pytest.fixture(scope="session", name="pattern")
def _pattern() -> Callable[[str], re.Pattern[str]]:
    """``pattern``, for pages that only one module follows."""
    return pattern


@pytest.fixture(scope="session")
def blocks() -> dict[str, str]:
    """The pages' blocks of code that carry a name, by it: ``<!-- said: conflict -->`` above the fence names one."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"^<!-- (\w+: .+?) -->\n```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = [name for name, _ in found]
    assert len(names) == len(set(names)), "two blocks have one name"
    return dict(found)


@pytest.fixture(scope="session")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The example, installed, before its kernels are built. Not to be changed."""
    return install(EXAMPLE, tmp_path_factory.mktemp("thirdparty") / "site")


@pytest.fixture(scope="session")
def toy(unbuilt: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The example with its kernels. Not to be changed."""
    site = unbuilt.moved(tmp_path_factory.mktemp("built") / "site")
    said = site.type("$ atlas kernels build --hw toy --arch native")
    assert said.code == 0, said.text
    return site


@pytest.fixture(scope="session")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The example of a storage format, installed. Not to be changed."""
    return install(EXAMPLES / "atlas-quant-toy", tmp_path_factory.mktemp("formats") / "site")


@pytest.fixture(scope="session")
def dialects(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The example of a dialect, installed. Not to be changed."""
    return install(EXAMPLES / "atlas-dialect-toy", tmp_path_factory.mktemp("dialects") / "site")


@pytest.fixture
def variant(toy: Site, tmp_path: Path) -> Site:
    """A copy of the built example that a test may spoil."""
    return toy.moved(tmp_path / "site")


@pytest.fixture
def another(tmp_path: Path) -> Callable[[Site], None]:
    """Adds a second distribution, atlas-plugin-toys, that offers the machine of the first."""

    def add(site: Site) -> None:
        shutil.copytree(site.package, site.folder / "atlas_plugin_toys")
        info = site.folder / "atlas_plugin_toys-0.2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atlas-plugin-toys\nVersion: 0.2.0\n")
        (info / "entry_points.txt").write_text("[atlas.hardware]\ntoy = atlas_plugin_toys.plugin:toy\n")

    return add


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Site]:
    """``put(dist, group, source)`` installs a distribution of one module, which offers the key ``toy``."""

    def add(dist: str, group: str, source: str, version: str = "1.0") -> Site:
        module = dist.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\ntoy = {module}:toy\n")
        return Site(tmp_path)

    return add


def pattern(expected: str) -> re.Pattern[str]:
    """What a page shows as a pattern: ``…`` stands for a part of a line, alone on its line for any lines.

    Columns may be wider or narrower: other plugins have names too.
    """
    lines = []
    for line in expected.splitlines():
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
        else:
            told = ".*?".join(map(re.escape, line.split("…")))
            lines.append(re.sub(r"(\\ ){2,}", "[ ]{2,}", told) + r"[ ]*\n")
    return re.compile("^" + "".join(lines), re.MULTILINE)


@pytest.fixture
def follow(blocks: dict[str, str]) -> Callable[[Site, str], list[int]]:
    """``follow(site, name)`` runs the commands of a block and compares what they say; the exit codes."""

    def run(site: Site, name: str) -> list[int]:
        parts = re.split(r"^(\$ .+)\n", blocks[f"said: {name}"], flags=re.MULTILINE)[1:]
        assert parts, f"the block {name} has no command"
        codes = []
        for line, expected in zip(parts[::2], parts[1::2], strict=True):
            said = site.type(line)
            assert pattern(expected).search(said.text), f"{line}\nsaid\n{said.text}\nnot\n{expected}"
            codes.append(said.code)
        return codes

    return run
