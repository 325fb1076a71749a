"""No module over 500 lines: a module that grows further has a second reason to change."""

HARD = 500
SOURCES = {".py", ".cu", ".cuh", ".cpp", ".h"}


def test_no_source_is_over_500_lines(root, files):
    sizes = {path: len(path.read_text().splitlines()) for path in files if path.suffix in SOURCES}
    assert len(sizes) > 50, "the walk found nothing to measure"
    faults = [f"{path.relative_to(root)}: {size}" for path, size in sizes.items() if size > HARD]
    assert not faults
