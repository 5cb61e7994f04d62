"""What a guest is given to believe in: one list as PEM, the same for Java."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.egress.interception import authority, trust
from tests.unit.interception.parts import LINEAGE

pytestmark = [pytest.mark.req("NET-9")]


@pytest.fixture(scope="module")
def two() -> bytes:
    return authority.make(LINEAGE).certificate + authority.make("l" + "1" * 19).certificate


def test_the_lineage_comes_first_and_the_nodes_roots_stay(two: bytes) -> None:
    own = authority.make(LINEAGE).certificate
    made = trust.trust_for(own, two)
    assert made.pem.startswith(own)
    assert two in made.pem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=made.pem.decode())
    assert context.cert_store_stats()["x509_ca"] == 3


def test_the_nodes_bundle_is_found() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=trust.roots().decode())
    assert context.cert_store_stats()["x509_ca"] > 50


def test_the_organisations_file_is_believed_too(tmp_path: Path, two: bytes) -> None:
    extra = tmp_path / "company.pem"
    extra.write_bytes(b"# ours\n" + two)
    found = list(trust.ders(trust.roots(extra)))
    assert all(der in found for der in trust.ders(two))


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_named_file_without_a_certificate_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    extra = tmp_path / "company.pem"
    if content is not None:
        extra.write_bytes(content)
    with pytest.raises(ClocheError) as caught:
        trust.roots(extra)
    assert caught.value.code == "policy_invalid"
    assert str(extra) in caught.value.message


def test_a_private_key_in_the_file_is_not_passed_on(tmp_path: Path) -> None:
    made = authority.make(LINEAGE)
    extra = tmp_path / "company.pem"
    extra.write_bytes(made.key + made.certificate)
    assert b"PRIVATE" not in trust.roots(extra)


@pytest.mark.skipif(shutil.which("keytool") is None, reason="no Java here")
def test_java_reads_the_store(tmp_path: Path, two: bytes) -> None:
    store = tmp_path / "cacerts"
    made = trust.trust_for(two, trust.roots())
    assert made.java is not None
    store.write_bytes(made.java)
    listed = subprocess.run(
        ["keytool", "-list", "-keystore", str(store), "-storepass", trust.JAVA_PASSWORD],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stdout
    assert listed.stdout.count("trustedCertEntry") == len(list(trust.ders(made.pem)))


def test_equal_input_gives_equal_bytes_and_a_changed_byte_another_digest(two: bytes) -> None:
    one = trust.java_store(trust.ders(two))
    assert one == trust.java_store(trust.ders(two))
    assert one[-20:] != trust.java_store(list(trust.ders(two))[:1])[-20:]
