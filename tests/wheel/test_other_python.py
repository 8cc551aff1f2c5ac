"""Each wheel in Debian 13's Python 3.13 of its processor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
from other_python import LIBC, VERSION, OtherPython, other_python
from wheels import GIVEN, ROUND_TRIP, machine_of

# An emulated processor imports NumPy and pydantic for minutes.
pytestmark = pytest.mark.timeout(1800)

Start = Callable[[Path], OtherPython]


@pytest.fixture(scope="module")
def start(clean_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Installs a wheel for the other Python, once."""
    started: dict[Path, OtherPython] = {}

    def once(wheel: Path) -> OtherPython:
        if wheel not in started:
            site = tmp_path_factory.mktemp(machine_of(wheel))
            started[wheel] = other_python(wheel, clean_env, site)
        return started[wheel]

    return once


def test_the_wheel_is_imported(wheel: Path, start: Start, clean_env: dict[str, str]) -> None:
    program = """
import json, os, platform
import ucm, ucm._core, ucm.cli, ucm.config, ucm.store, ucm.trans, ucm.integration.vllm.plugin
assert json.loads(ucm._core.tier_kinds())
print(ucm._core.__file__, platform.machine(), sys.version_info[:2], sep=", ")
print(os.confstr("CS_GNU_LIBC_VERSION"), platform.python_implementation())
"""
    other = start(wheel)
    place, libc = other.run(clean_env, program).splitlines()
    version = tuple(map(int, VERSION.split(".")))
    assert place == f"{other.site}/ucm/_core.abi3.so, {machine_of(wheel)}, {version}"
    assert libc == f"{LIBC} CPython"


def test_a_block_goes_to_disk_and_comes_back(
    wheel: Path, start: Start, clean_env: dict[str, str], tmp_path: Path
) -> None:
    said = start(wheel).run(clean_env, ROUND_TRIP, str(tmp_path / "root"), "dump", "load")
    assert said == "dumped equal"


def test_a_block_of_one_processor_is_loaded_on_another(
    start: Start, clean_env: dict[str, str], tmp_path: Path
) -> None:
    if len({machine_of(wheel) for wheel in GIVEN}) < 2:
        pytest.skip("wheels of two processors are not given; `make test-wheels` builds them")
    for one, another in permutations(GIVEN, 2):
        root = str(tmp_path / machine_of(one))
        assert start(one).run(clean_env, ROUND_TRIP, root, "dump") == "dumped"
        assert start(another).run(clean_env, ROUND_TRIP, root, "load") == "equal"
