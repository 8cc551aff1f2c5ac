"""Files with a secret: our own are refused if others may read them, another owner's are read with a
warning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucm.config.fields import read_secret
from ucm.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_bytes(b"secret")
    return file


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_for_its_owner_alone_is_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert read_secret(str(file), "tenant_key_file", 4) == b"secr"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_of_our_own_that_others_may_read_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError) as refused:
        read_secret(str(file), "tenant_key_file", 64)
    text = refused.value.message
    assert f"chmod 600 {file}" in text and "tenant_key_file" in text and f"mode {mode:04o}" in text
    link = file.with_name("link")
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(str(link), "tenant_key_file", 64)


def test_a_file_of_another_owner_is_read_with_a_warning(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert read_secret(str(file), "encryption_key_file", 64) == b"secret"
    assert f"chmod 600 {file}" in caplog.text and "another user" in caplog.text
    caplog.clear()
    file.chmod(0o400)
    read_secret(str(file), "encryption_key_file", 64)
    assert not caplog.text
