"""The certificate authority of a lineage: what verifiers demand of it, and where its key is."""

from __future__ import annotations

import ssl
import stat
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from cloche.wire.errors import ClocheError
from cloche_server.egress.interception import authority
from cloche_server.egress.interception.authority import Authorities
from cloche_server.secrets.box import Box
from tests.unit.interception.parts import LINEAGE, PlainBox

pytestmark = [pytest.mark.req("NET-9")]


def test_it_is_an_authority_for_leaves_and_nothing_else() -> None:
    made = authority.make(LINEAGE)
    certificate = x509.load_pem_x509_certificate(made.certificate)
    found = {type(each.value): (each.value, each.critical) for each in certificate.extensions}
    assert found[x509.BasicConstraints] == (x509.BasicConstraints(ca=True, path_length=0), True)
    usage, critical = found[x509.KeyUsage]
    assert critical
    assert (usage.key_cert_sign, usage.digital_signature, usage.key_encipherment) == (True, False, False)
    assert x509.SubjectKeyIdentifier in found
    key = load_pem_private_key(made.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP256R1)
    assert key.public_key() == certificate.public_key()
    assert ssl.create_default_context(cadata=made.certificate.decode())


def test_it_lives_as_long_as_the_sandbox_may() -> None:
    now = datetime.now(UTC)
    assert timedelta(days=29) < authority.make(LINEAGE).not_after - now < timedelta(days=31)
    assert authority.make(LINEAGE, max_age_s=90 * 86400).not_after - now > timedelta(days=90)


def test_two_lineages_have_nothing_in_common() -> None:
    one, other = authority.make(LINEAGE), authority.make("l" + "1" * 19)
    assert one.key != other.key
    assert LINEAGE.encode() not in other.certificate


@pytest.mark.req("SEC-1")
def test_the_key_is_nowhere_on_disk_and_comes_back(tmp_path: Path) -> None:
    box = Box(tmp_path / "config" / "secrets.key", tmp_path / "state" / "key.id")
    made = Authorities(tmp_path / "state" / "lineages", box).of(LINEAGE)
    file = tmp_path / "state" / "lineages" / LINEAGE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    body = b"".join(made.key.split(b"\n")[1:-2])
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            forms = (
                body[:40],
                body[:40].hex().encode(),
                made.key[:60].hex().encode(),
                b64decode(body)[-32:],
                b"PRIVATE",
            )
            assert [form for form in forms if form in content] == []
    again = Authorities(
        tmp_path / "state" / "lineages", Box(tmp_path / "config" / "secrets.key", tmp_path / "state" / "key.id")
    )
    assert again.of(LINEAGE) == made


def test_a_copied_state_directory_does_not_open(tmp_path: Path) -> None:
    Authorities(tmp_path / "state" / "lineages", Box(tmp_path / "a.key", tmp_path / "state" / "key.id")).of(LINEAGE)
    elsewhere = Box(tmp_path / "b.key", tmp_path / "state" / "key.id")
    with pytest.raises(ClocheError) as caught:
        Authorities(tmp_path / "state" / "lineages", elsewhere).of(LINEAGE)
    assert caught.value.code == "secret_unavailable"


def test_a_file_in_another_lineages_place_does_not_open(tmp_path: Path) -> None:
    box = Box(tmp_path / "a.key", tmp_path / "key.id")
    Authorities(tmp_path / "lineages", box).of(LINEAGE)
    (tmp_path / "lineages" / LINEAGE).rename(tmp_path / "lineages" / ("l" + "1" * 19))
    with pytest.raises(ClocheError):
        Authorities(tmp_path / "lineages", box).of("l" + "1" * 19)


def test_one_that_ended_is_made_anew(tmp_path: Path) -> None:
    ended = authority.make(LINEAGE, now=datetime.now(UTC) - timedelta(days=31))
    Authorities(tmp_path, PlainBox())._write(ended)
    assert Authorities(tmp_path, PlainBox())._read(LINEAGE) == ended
    assert Authorities(tmp_path, PlainBox()).of(LINEAGE).certificate != ended.certificate


@pytest.mark.parametrize("bad", ["", "../x", "l" + "0" * 18, "l/" + "0" * 18, "L" + "0" * 19])
def test_a_lineage_is_a_name_and_no_path(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="not a lineage"):
        Authorities(tmp_path, PlainBox()).of(bad)
