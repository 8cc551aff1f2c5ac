"""The builds of ``benches/python/beside.py``, without building anything."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def builds() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "bench_builds", ROOT / "benches" / "python" / "builds.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_process_sees_one_build_and_nothing_set_for_another(builds: ModuleType) -> None:
    build = builds.Build("a", Path("/builds/a"))
    seen = build.environment(
        {"PATH": "/bin", "PYTHONPATH": "/tree", "PYTHONHOME": "/x", "UCM_LOG_LEVEL": "DEBUG"}
    )
    assert seen == {"PATH": "/bin", "PYTHONPATH": "/builds/a"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a Git repository")
@pytest.mark.parametrize("revision", ["no-such-revision", "--help", ""])
def test_a_revision_that_is_none_is_named(builds: ModuleType, revision: str) -> None:
    with pytest.raises(builds.BuildError, match="there is no revision"):
        builds.commit_of(revision)


def test_a_failed_build_shows_the_end_of_its_log(builds: ModuleType, tmp_path: Path) -> None:
    program = (
        "import sys; print(*('line %d' % n for n in range(100)), sep=chr(10)); sys.exit('error:"
        " no')"
    )
    with pytest.raises(builds.BuildError) as caught:
        builds._logged(
            [sys.executable, "-c", program],
            tmp_path / "build.log",
            "it does not build",
            tmp_path,
            {},
        )
    text = str(caught.value)
    assert text.startswith("it does not build (status 1)")
    assert "line 99" in text and "error: no" in text and "line 10\n" not in text
    assert "line 10\n" in (tmp_path / "build.log").read_text()
