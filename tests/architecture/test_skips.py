"""A test is skipped for what a machine lacks, or it fails."""

import pytest


@pytest.fixture
def guarded(pytester, root):
    pytester.makeconftest((root / "conftest.py").read_text())
    return pytester


def test_a_skip_needs_an_allowed_reason(guarded):
    guarded.makepyfile(
        """
        import pytest

        def test_allowed(): pytest.skip("needs a GPU: there is none")
        @pytest.mark.skipif(True, reason="needs nvcc")
        def test_allowed_mark(): pass
        def test_lazy(): pytest.skip("flaky")
        @pytest.mark.skip(reason="later")
        def test_lazy_mark(): pass
        def test_hidden(): pytest.importorskip("toy_nowhere")
        """
    )
    result = guarded.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(skipped=2, failed=2, errors=1)  # a mark is judged before the test runs
    result.stdout.fnmatch_lines(["*skipped for a reason that is not allowed*flaky*"])


def test_a_module_may_not_skip_itself_either(guarded):
    guarded.makepyfile("import pytest\npytest.skip('one day', allow_module_level=True)")
    result = guarded.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*not allowed*one day*"])
