"""`kipmesh certs`: nodes and clients accept the certificates that it writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cryptography import x509

from kipmesh.cli import main
from kipmesh.transport.tls import TlsFiles, TlsPaths


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kipmesh", "certs", "make", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    return int(exit_info.value.code or 0)


def names(directory: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes())
    return [
        str(name.value) for name in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    ]


def test_make_creates_certificates_of_one_authority(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tmp_path / "certs")
    assert (
        run(monkeypatch, directory, "leader-1", "follower-1", "--node", "--san", "*.mesh.svc", "--san", "10.0.0.7") == 0
    )
    assert run(monkeypatch, directory, "client") == 0
    assert capsys.readouterr().out.split() == [f"{directory}/{name}" for name in ("leader-1", "follower-1", "client")]
    common = ["localhost", "127.0.0.1"]
    assert names(tmp_path / "certs" / "leader-1") == ["leader-1", *common, "*.mesh.svc", "10.0.0.7", "kipmesh://node"]
    assert names(tmp_path / "certs" / "client") == ["client", *common]
    authorities = set()
    for name in ("leader-1", "follower-1", "client"):
        node_directory = tmp_path / "certs" / name
        tls = TlsFiles(TlsPaths(node_directory / "tls.crt", node_directory / "tls.key", node_directory / "ca.crt"))
        tls.close()
        authorities.add(tls.current.authorities)
    assert len(authorities) == 1
    assert (tmp_path / "certs" / "authority" / "tls.key").stat().st_mode & 0o077 == 0


def test_keep_replaces_only_expiring_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate = tmp_path / "client" / "tls.crt"
    run(monkeypatch, str(tmp_path), "client")
    first = certificate.read_bytes()
    run(monkeypatch, str(tmp_path), "client", "--keep")
    assert certificate.read_bytes() == first
    run(monkeypatch, str(tmp_path), "client", "--days", "20")
    short_lived = certificate.read_bytes()
    assert short_lived != first
    run(monkeypatch, str(tmp_path), "client", "--keep")
    assert certificate.read_bytes() != short_lived


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["authority"], "'authority' cannot name a certificate"),
        (["../x"], "cannot name a certificate"),
        (["a", "--san", "two words"], "'two words' is neither a DNS name, nor an IP address, nor a URI"),
    ],
)
def test_invalid_names_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    error: str,
) -> None:
    assert run(monkeypatch, str(tmp_path), *arguments) == 1
    output = capsys.readouterr().err
    assert error in output
    assert output.count("\n") == 1


def install(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kipmesh", "certs", "install", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    return int(exit_info.value.code or 0)


def test_install_copies_certificates_for_owners_of_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, nodes = tmp_path / "certs", tmp_path / "nodes"
    run(monkeypatch, str(source), "leader-1", "client", "prometheus")
    for name in ("leader-1", "prometheus"):
        (nodes / name).mkdir(parents=True)
    owners_of_files: list[tuple[int, int]] = []
    owners_of_directories: dict[str, tuple[int, int]] = {}
    # Only root may change owners.
    monkeypatch.setattr(os, "fchown", lambda _handle, *owner: owners_of_files.append(owner))
    monkeypatch.setattr(os, "chown", lambda path, *owner: owners_of_directories.update({Path(path).name: owner}))
    assert install(monkeypatch, str(source), str(nodes), "--owner", "10001:7", "--owner", "prometheus=65534") == 0
    assert {path.name for path in nodes.iterdir()} == {"leader-1", "prometheus"}
    assert owners_of_files == [(10001, 7)] * 3 + [(65534, 65534)] * 3
    for name, owner in (("leader-1", (10001, 7)), ("prometheus", (65534, 65534))):
        node_directory = nodes / name
        assert node_directory.stat().st_mode & 0o777 == 0o700
        assert (node_directory / "tls.key").stat().st_mode & 0o777 == 0o400
        assert owners_of_directories[name] == owner
        for file in ("tls.key", "tls.crt", "ca.crt"):
            assert (node_directory / file).read_bytes() == (source / name / file).read_bytes()


def test_install_replaces_changed_certificates_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, node_directory = tmp_path / "certs", tmp_path / "nodes" / "leader-1"
    run(monkeypatch, str(source), "leader-1")
    node_directory.mkdir(parents=True)
    install(monkeypatch, str(source), str(tmp_path / "nodes"))
    before = {path.name: path.stat().st_ino for path in node_directory.iterdir()}
    install(monkeypatch, str(source), str(tmp_path / "nodes"))
    assert {path.name: path.stat().st_ino for path in node_directory.iterdir()} == before
    run(monkeypatch, str(source), "leader-1")
    install(monkeypatch, str(source), str(tmp_path / "nodes"))
    after = {path.name: path.stat().st_ino for path in node_directory.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"tls.key", "tls.crt"}
    assert (node_directory / "tls.key").read_bytes() == (source / "leader-1" / "tls.key").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("--owner", "root"), 2, "'root' is not [NAME=]UID[:GID]"),
        (("--owner", "1:"), 2, "'1:' is not [NAME=]UID[:GID]"),
        (("--owner", "4294967296"), 2, "is not [NAME=]UID[:GID]"),
        ((), 1, "tls.key: No such file or directory"),
    ],
)
def test_failed_install_reports_error_and_copies_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    error: str,
) -> None:
    (tmp_path / "certs" / "leader-1").mkdir(parents=True)
    (tmp_path / "nodes" / "leader-1").mkdir(parents=True)
    assert install(monkeypatch, str(tmp_path / "certs"), str(tmp_path / "nodes"), *arguments) == code
    assert error in capsys.readouterr().err.replace("tls.crt", "tls.key")
    assert not list((tmp_path / "nodes" / "leader-1").iterdir())


def test_install_requires_directories_in_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(monkeypatch, str(tmp_path), str(tmp_path)) == 1
    assert "has no directories" in capsys.readouterr().err
