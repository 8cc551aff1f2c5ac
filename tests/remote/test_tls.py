"""A bucket behind TLS: a store trusts its server only by the authorities in ``object_ca``."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from blocks import PATIENT, Memory, ids
from click.testing import CliRunner
from moto_server import MotoServer
from remote_columns import MOTO, REDIS, Column, started
from test_matrix import loaded, opened

from servers import MissingError
from ucm.cli import main
from ucm.errors import ConfigError, UnhealthyError

COUNT = 8
#: Authorities that do not vouch for the server: another one, and those of the system.
DOUBTING = ("another", None)
#: Two authorities, each in a file and both in one, and the certificate of a server here by the
#: first of them.
CERTIFICATES = """set -e
authority() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=$1 -keyout $1.key -out $1.pem
}
authority ours
authority another
cat another.pem ours.pem > both.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -keyout server.key -out server.csr
printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' > names
openssl x509 -req -in server.csr -CA ours.pem -CAkey ours.key -CAcreateserial -days 2 -extfile names -out server.pem
"""


@dataclass(frozen=True)
class Secure:
    """A server behind TLS, and where the certificates are."""

    at: str
    certificates: Path

    def keys(self, authority: str | None) -> dict[str, Any]:
        """Keys of a store that trusts this authority, or only those of the system."""
        trusted = {"object_ca": str(self.certificates / f"{authority}.pem")} if authority else {}
        return {"object_endpoint": f"https://{self.at}", "deadlines": PATIENT, **trusted}


def secure_server(directory: Path) -> MotoServer:
    """moto's server with a certificate of ours; the certificates lie beside its directory."""
    if shutil.which("openssl") is None:
        raise MissingError("openssl is not installed; `make servers` installs it as root (apt-get)")
    beside = directory.parent
    made = subprocess.run(
        ["sh", "-c", CERTIFICATES], cwd=beside, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return MotoServer(directory, (beside / "server.pem", beside / "server.key"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """The server of these tests, which leave each other's blocks alone."""
    directory = tmp_path_factory.mktemp("tls")
    with started(replace(MOTO, start=secure_server), directory / "server") as server:
        yield Secure(server.at, directory)


@pytest.fixture
def source() -> Memory:
    """What is stored."""
    return Memory(COUNT)


def store_all(store: Any, source: Memory) -> None:
    """Stores the source."""
    store.wait(store.dump_data(ids(COUNT), [0] * COUNT, source.rows(*range(COUNT))))


@pytest.mark.parametrize("authority", ["ours", "both"])
def test_a_server_whose_authority_is_trusted(
    secure: Secure, source: Memory, authority: str
) -> None:
    keys = {**secure.keys(authority), "identity": authority}
    with opened(MOTO, secure.at, **keys) as store:
        store_all(store, source)
        assert loaded(store, source, 0, COUNT)
    with opened(MOTO, secure.at, **keys) as another:
        assert another.lookup(ids(COUNT)) == [True] * COUNT
        assert loaded(another, source, 0, COUNT)


@pytest.mark.parametrize("authority", DOUBTING)
def test_a_server_whose_authority_is_not(
    secure: Secure, source: Memory, authority: str | None
) -> None:
    with opened(MOTO, secure.at, identity="stored", **secure.keys("ours")) as store:
        store_all(store, source)
    with opened(
        MOTO, secure.at, reached=False, identity="stored", **secure.keys(authority)
    ) as store:
        assert not store.healthy()
        # The client's own error, not a missed deadline.
        assert f"Error performing PUT https://{secure.at}/" in store.trouble()
        assert store.lookup(ids(COUNT)) == [False] * COUNT
        assert not loaded(store, source, 0, COUNT)
        with pytest.raises(UnhealthyError):
            store_all(store, source)


@pytest.mark.parametrize("authority", DOUBTING)
def test_it_is_the_certificate_that_is_named(secure: Secure, authority: str | None) -> None:
    with opened(MOTO, secure.at, reached=False, **secure.keys(authority)) as store:
        assert "certificate" in store.trouble()


@pytest.mark.parametrize("name", ["nobody.pem", "ours.key"])
def test_a_file_that_is_missing_or_has_no_certificate(secure: Secure, name: str) -> None:
    keys = secure.keys(None) | {"object_ca": str(secure.certificates / name)}
    with (
        pytest.raises(ConfigError, match="the file with authorities for TLS cannot be used"),
        opened(MOTO, secure.at, reached=False, **keys),
    ):
        pass


# ucm doctor
# -------------------------------------------------------------------------------------------


def examined(directory: Path, keys: Mapping[str, Any], *words: str) -> dict[str, tuple[str, str]]:
    """The findings of ``ucm doctor`` about the store: text and remedy by level."""
    file = directory / "ucm.yaml"
    file.write_text(json.dumps({name: keys[name] for name in keys if name != "deadlines"}))
    done = CliRunner().invoke(main, ["doctor", "--json", "--config", str(file), *words])
    found = [one for one in json.loads(done.stdout)["findings"] if one["area"] == "store"]
    assert len({one["level"] for one in found}) == len(found), found
    return {one["level"]: (one["text"], one["remedy"]) for one in found}


def test_doctor_reaches_a_server_whose_authority_is_trusted(secure: Secure, tmp_path: Path) -> None:
    keys = MOTO.keys(secure.at) | secure.keys("ours")
    found = examined(tmp_path, keys, "--production")
    assert found == {"ok": (f"{keys['storage_backends']} answers", "")}


@pytest.mark.parametrize("authority", DOUBTING)
def test_doctor_names_a_certificate_that_is_not_trusted(
    secure: Secure, tmp_path: Path, authority: str | None
) -> None:
    found = examined(tmp_path, MOTO.keys(secure.at) | secure.keys(authority))
    assert found.keys() == {"error"}
    text, remedy = found["error"]
    assert "certificate" in text
    assert remedy.startswith("check address, network, certificate and login")


@pytest.mark.parametrize("medium", [MOTO, REDIS], ids=lambda medium: medium.name)
def test_doctor_warns_of_a_server_without_encryption_before_production(
    medium: Column, tmp_path: Path
) -> None:
    with started(medium, tmp_path / "server") as server:
        keys = medium.keys(server.at)
        answers = {"ok": (f"{keys['storage_backends']} answers", "")}
        assert examined(tmp_path, keys) == answers
        found = examined(tmp_path, keys, "--production")
    endpoint = keys.get("object_endpoint", keys["storage_backends"])
    text, remedy = found.pop("warning")
    assert found == answers
    assert text == f"{endpoint} is not encrypted"
    assert "rediss:// or https://" in remedy
