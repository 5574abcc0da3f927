"""Certificate files: validation and reloads."""

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


def paths(directory: Path) -> TlsPaths:
    return TlsPaths.of(SslConfig.parse({"ssl.certificate.dir": str(directory)}))


@pytest.fixture
def directory(tmp_path: Path, authority: Authority) -> Path:
    authority.issue("leader-1", ["leader-1", "127.0.0.1"]).write(tmp_path / "certs")
    return tmp_path / "certs"


def test_certificate_directory_is_loaded(directory: Path) -> None:
    files = TlsFiles(paths(directory), check_interval_s=NEVER_S)
    assert files.current.certificate_chain == (directory / "tls.crt").read_bytes()
    assert files.current.private_key == (directory / "tls.key").read_bytes()
    assert files.current.authorities == (directory / "ca.crt").read_bytes()
    now = time.time()
    assert now + 364 * 86400 < (files.current.not_after_s or 0) < now + 366 * 86400
    assert now + 3649 * 86400 < (files.current.authorities_not_after_s or 0)
    assert (directory / "tls.key").stat().st_mode & 0o777 == 0o600


def test_pem_keystore_with_key_and_certificates_is_loaded(directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "keystore.pem"
    store.write_bytes((directory / "tls.key").read_bytes() + (directory / "tls.crt").read_bytes())
    config = SslConfig.parse(
        {
            "ssl.keystore.location": str(store),
            "ssl.truststore.location": str(directory / "ca.crt"),
            "ssl.keystore.type": "PEM",
        }
    )
    files = TlsFiles(TlsPaths.of(config), check_interval_s=NEVER_S)
    assert files.current.private_key == files.current.certificate_chain == store.read_bytes()


def test_truststore_without_keystore_is_loaded(directory: Path) -> None:
    config = SslConfig.parse({"ssl.truststore.location": str(directory / "ca.crt")})
    current = TlsFiles(TlsPaths.of(config), check_interval_s=NEVER_S).current
    assert current.certificate_chain is None
    assert current.private_key is None
    assert current.not_after_s is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
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
        (
            "ca.crt",
            b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
            "ca.crt: must contain complete PEM certificates",
        ),
        ("tls.crt", b"x" * (1 << 20) + b"y", "tls.crt: must have at most"),
    ],
)
def test_invalid_tls_files_are_refused_with_one_line_error(
    directory: Path, file: str, content: bytes | None, message: str
) -> None:
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content)
    with pytest.raises(InvalidConfigError) as caught:
        TlsFiles(paths(directory), check_interval_s=NEVER_S)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_key_that_does_not_match_certificate_is_refused(directory: Path, authority: Authority) -> None:
    (directory / "tls.key").write_bytes(authority.issue("other", ["other"]).key)
    with pytest.raises(InvalidConfigError, match=r"tls.key does not match the certificate in .*tls.crt"):
        TlsFiles(paths(directory), check_interval_s=NEVER_S)


def test_key_with_password_is_refused(directory: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key((directory / "tls.key").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (directory / "tls.key").write_bytes(locked)
    with pytest.raises(InvalidConfigError, match="the private key must not have a password"):
        TlsFiles(paths(directory), check_interval_s=NEVER_S)


async def test_changed_files_are_reloaded_automatically(directory: Path, authority: Authority) -> None:
    files = TlsFiles(paths(directory), check_interval_s=0.01)
    first = files.current
    issued = authority.issue("leader-1", ["leader-1"])
    issued.write(directory)
    await until(lambda: files.current.certificate_chain == issued.certificate)
    assert files.current.generation > first.generation
    assert files.current.private_key == issued.key
    assert not files.is_bad
    files.close()


def test_mismatched_key_pair_keeps_previous_certificates(
    directory: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = TlsFiles(paths(directory), check_interval_s=NEVER_S)
    first = files.current
    issued = authority.issue("leader-1", ["leader-1"])
    (directory / "tls.crt").write_bytes(issued.certificate)
    for _ in range(3):
        assert not files.check()
    assert files.current is first
    assert files.is_bad
    assert files.failures == 1
    assert len([line for line in caplog.messages if "certificates are invalid" in line]) == 1
    (directory / "tls.key").write_bytes(issued.key)
    assert files.check()
    assert files.current.certificate_chain == issued.certificate
    assert not files.is_bad
    assert (files.reloads, files.failures) == (1, 1)


def test_truncated_bundle_is_refused(directory: Path) -> None:
    files = TlsFiles(paths(directory), check_interval_s=NEVER_S)
    both = (directory / "ca.crt").read_bytes() + Authority.make("next").pem
    (directory / "ca.crt").write_bytes(both[:-100])
    assert not files.check()
    assert files.is_bad
    (directory / "ca.crt").write_bytes(both)
    assert files.check()
    assert files.current.authorities == both


def test_restored_unchanged_files_are_valid_without_reload(directory: Path) -> None:
    files = TlsFiles(paths(directory), check_interval_s=NEVER_S)
    content = (directory / "tls.crt").read_bytes()
    (directory / "tls.crt").unlink()
    assert not files.check()
    assert files.is_bad
    (directory / "tls.crt").write_bytes(content)
    assert not files.check()
    assert not files.is_bad
    assert files.reloads == 0


def test_replaced_kubernetes_volume_is_reloaded(tmp_path: Path, authority: Authority) -> None:
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
