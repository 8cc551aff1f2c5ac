"""Tags of tenants: made from the salt, keyed where there is a key, and sent with what a salted
request stores."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from parts import BLOCK, Rig

from ucm.errors import ConfigError
from ucm.integration.vllm.connector.identity.keys import TENANT_TAG, TenantTags

KEY = "0123456789abcdef"


def salted(salt: str | None) -> SimpleNamespace:
    return SimpleNamespace(cache_salt=salt)


def test_a_tag_is_a_digest_of_the_salt_and_keyed_where_there_is_a_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(f"{KEY}\n")
    plain, keyed = TenantTags.configured(None, {}), TenantTags.configured(str(file), {})
    message = b"UCMTENANT" + "käse".encode()
    assert plain.of(salted("käse")) == hashlib.sha256(message).digest()
    assert keyed.of(salted("käse")) == hmac.new(KEY.encode(), message, hashlib.sha256).digest()
    assert keyed.of_salt("käse") == keyed.of(salted("käse")) != keyed.of(salted("kase"))
    assert TenantTags.configured(None, {"UCM_TENANT_KEY": KEY}).of(salted("käse")) == keyed.of(
        salted("käse")
    )
    for tags in (plain, keyed):
        assert tags.of(salted(None)) == tags.of(salted("")) == tags.of(object()) == b""


def test_a_wrong_key_is_refused_and_not_printed(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.touch(0o600)
    short.write_text("secret")
    with pytest.raises(ConfigError, match="at least 16") as refused:
        TenantTags.configured(str(short), {})
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        TenantTags.configured(str(tmp_path / "none"), {})
    short.write_text(KEY)
    short.chmod(0o640)
    with pytest.raises(ConfigError, match=f"tenant_key_file is a secret.*chmod 600 {short}"):
        TenantTags.configured(str(short), {})


def test_dumps_of_a_salted_request_carry_the_tag_of_its_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCM_TENANT_KEY", KEY)
    rig = Rig()
    plain, of_one = rig.request("a", 2 * BLOCK), rig.request("b", 2 * BLOCK, seed=1, salt="one")
    for request in (plain, of_one):
        rig.admit(request)
    tags = {dump.request: dump.tenant for dump in rig.step(plain, of_one).dumps}
    assert tags == {"a": b"", "b": TenantTags(KEY.encode()).of_salt("one")}
    assert len(tags["b"]) == TENANT_TAG
