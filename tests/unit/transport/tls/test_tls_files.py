"""Certificate files: what counts as usable, and when changed ones come into use."""

import os
import time
from pathlib import Path

import pytest

from kipmesh.core.config.security import SslConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.testing import until
from kipmesh.transport.tls.files import TlsFiles, TlsPaths
from kipmesh.transport.tls.making import Authority

NEVER_S = 3600.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make("kipmesh")


def paths(folder: Path) -> TlsPaths:
    return TlsPaths.of(SslConfig.parse({"ssl.certificate.dir": str(folder)}))


@pytest.fixture
def folder(tmp_path: Path, authority: Authority) -> Path:
    authority.issue("leader-1", ["leader-1", "127.0.0.1"]).write(tmp_path / "certs")
    return tmp_path / "certs"


def test_a_folder_is_read(folder: Path) -> None:
    files = TlsFiles(paths(folder), check_interval_s=NEVER_S)
    assert files.current.certificate_chain == (folder / "tls.crt").read_bytes()
    assert files.current.private_key == (folder / "tls.key").read_bytes()
    assert files.current.authorities == (folder / "ca.crt").read_bytes()
    now = time.time()
    assert now + 364 * 86400 < (files.current.not_after_s or 0) < now + 366 * 86400
    assert now + 3649 * 86400 < (files.current.authorities_not_after_s or 0)
    assert (folder / "tls.key").stat().st_mode & 0o777 == 0o600


def test_kafkas_stores_with_key_and_certificates_in_one_file(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "keystore.pem"
    store.write_bytes((folder / "tls.key").read_bytes() + (folder / "tls.crt").read_bytes())
    config = SslConfig.parse(
        {
            "ssl.keystore.location": str(store),
            "ssl.truststore.location": str(folder / "ca.crt"),
            "ssl.keystore.type": "PEM",
        }
    )
    files = TlsFiles(TlsPaths.of(config), check_interval_s=NEVER_S)
    assert files.current.private_key == files.current.certificate_chain == store.read_bytes()


def test_a_truststore_alone_is_enough_for_a_client(folder: Path) -> None:
    config = SslConfig.parse({"ssl.truststore.location": str(folder / "ca.crt")})
    current = TlsFiles(TlsPaths.of(config), check_interval_s=NEVER_S).current
    assert current.certificate_chain is None
    assert current.private_key is None
    assert current.not_after_s is None


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tls.crt", None, "tls.crt: No such file"),
        ("tls.crt", b"", "tls.crt: must contain complete PEM certificates"),
        ("tls.crt", b"nonsense", "tls.crt: must contain complete PEM certificates"),
        (
            "tls.key",
            b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
            "tls.key: must contain a complete PEM private key",
        ),
        ("ca.crt", None, "ca.crt: No such file"),
        ("ca.crt", b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", "ca.crt: must contain complete PEM certificates"),
        ("tls.crt", b"x" * (1 << 20) + b"y", "tls.crt: must have at most"),
    ],
)
def test_bad_files_are_refused_in_one_line(folder: Path, file: str, content: bytes | None, says: str) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(InvalidConfigError) as caught:
        TlsFiles(paths(folder), check_interval_s=NEVER_S)
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_a_key_of_another_certificate_is_refused(folder: Path, authority: Authority) -> None:
    (folder / "tls.key").write_bytes(authority.issue("other", ["other"]).key)
    with pytest.raises(InvalidConfigError, match=r"tls.key does not match the certificate in .*tls.crt"):
        TlsFiles(paths(folder), check_interval_s=NEVER_S)


def test_a_key_with_a_password_is_refused(folder: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key((folder / "tls.key").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (folder / "tls.key").write_bytes(locked)
    with pytest.raises(InvalidConfigError, match="the private key must not have a password"):
        TlsFiles(paths(folder), check_interval_s=NEVER_S)


async def test_changed_files_come_into_use_by_themselves(folder: Path, authority: Authority) -> None:
    files = TlsFiles(paths(folder), check_interval_s=0.01)
    first = files.current
    issued = authority.issue("leader-1", ["leader-1"])
    issued.write(folder)
    await until(lambda: files.current.certificate_chain == issued.certificate)
    assert files.current.generation > first.generation
    assert files.current.private_key == issued.key
    assert not files.is_bad
    files.close()


def test_a_half_written_pair_keeps_the_one_before(
    folder: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = TlsFiles(paths(folder), check_interval_s=NEVER_S)
    first = files.current
    issued = authority.issue("leader-1", ["leader-1"])
    (folder / "tls.crt").write_bytes(issued.certificate)
    for _ in range(3):
        assert not files.check()
    assert files.current is first
    assert files.is_bad
    assert files.failures == 1
    assert len([line for line in caplog.messages if "certificates are invalid" in line]) == 1
    (folder / "tls.key").write_bytes(issued.key)
    assert files.check()
    assert files.current.certificate_chain == issued.certificate
    assert not files.is_bad
    assert (files.reloads, files.failures) == (1, 1)


def test_a_bundle_that_was_cut_off_is_refused(folder: Path) -> None:
    files = TlsFiles(paths(folder), check_interval_s=NEVER_S)
    both = (folder / "ca.crt").read_bytes() + Authority.make("next").pem
    (folder / "ca.crt").write_bytes(both[:-100])
    assert not files.check()
    assert files.is_bad
    (folder / "ca.crt").write_bytes(both)
    assert files.check()
    assert files.current.authorities == both


def test_files_that_come_back_as_they_were_are_good(folder: Path) -> None:
    files = TlsFiles(paths(folder), check_interval_s=NEVER_S)
    content = (folder / "tls.crt").read_bytes()
    (folder / "tls.crt").unlink()
    assert not files.check()
    assert files.is_bad
    (folder / "tls.crt").write_bytes(content)
    assert not files.check()
    assert not files.is_bad
    assert files.reloads == 0


def test_a_volume_of_kubernetes_is_replaced_behind_its_link(tmp_path: Path, authority: Authority) -> None:
    mount = tmp_path / "mount"
    authority.issue("a", ["a"]).write(mount / "..1")
    (mount / "..data").symlink_to("..1")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mount / name).symlink_to(f"..data/{name}")
    files = TlsFiles(paths(mount), check_interval_s=NEVER_S)
    issued = authority.issue("a", ["a"])
    issued.write(mount / "..2")
    (mount / "..new").symlink_to("..2")
    os.replace(mount / "..new", mount / "..data")
    assert files.check()
    assert files.current.private_key == issued.key
