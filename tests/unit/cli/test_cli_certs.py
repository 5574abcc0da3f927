"""`kipmesh certs`: what it writes is what nodes and clients take."""

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
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def names(folder: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    return [str(one.value) for one in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def test_certificates_of_nodes_and_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "certs")
    assert run(monkeypatch, place, "leader-1", "follower-1", "--node", "--san", "*.mesh.svc", "--san", "10.0.0.7") == 0
    assert run(monkeypatch, place, "client") == 0
    assert capsys.readouterr().out.split() == [f"{place}/{name}" for name in ("leader-1", "follower-1", "client")]
    common = ["localhost", "127.0.0.1"]
    assert names(tmp_path / "certs" / "leader-1") == ["leader-1", *common, "*.mesh.svc", "10.0.0.7", "kipmesh://node"]
    assert names(tmp_path / "certs" / "client") == ["client", *common]
    authorities = set()
    for name in ("leader-1", "follower-1", "client"):
        home = tmp_path / "certs" / name
        files = TlsFiles(TlsPaths(home / "tls.crt", home / "tls.key", home / "ca.crt"))
        files.close()
        authorities.add(files.current.authorities)
    assert len(authorities) == 1
    assert (tmp_path / "certs" / "authority" / "tls.key").stat().st_mode & 0o077 == 0


def test_what_is_good_is_kept_if_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate = tmp_path / "client" / "tls.crt"
    run(monkeypatch, str(tmp_path), "client")
    first = certificate.read_bytes()
    run(monkeypatch, str(tmp_path), "client", "--keep")
    assert certificate.read_bytes() == first
    run(monkeypatch, str(tmp_path), "client", "--days", "20")
    soon = certificate.read_bytes()
    assert soon != first
    run(monkeypatch, str(tmp_path), "client", "--keep")
    assert certificate.read_bytes() != soon


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["authority"], "'authority' cannot name a certificate"),
        (["../x"], "cannot name a certificate"),
        (["a", "--san", "two words"], "'two words' is neither a DNS name, nor an IP address, nor a URI"),
    ],
)
def test_bad_names_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    assert run(monkeypatch, str(tmp_path), *arguments) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def install(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kipmesh", "certs", "install", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_certificates_are_installed_for_who_runs_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, nodes = tmp_path / "certs", tmp_path / "nodes"
    run(monkeypatch, str(source), "leader-1", "client", "prometheus")
    for name in ("leader-1", "prometheus"):
        (nodes / name).mkdir(parents=True)
    files: list[tuple[int, int]] = []
    folders: dict[str, tuple[int, int]] = {}
    # Who runs tests may not give files away.
    monkeypatch.setattr(os, "fchown", lambda _handle, *owner: files.append(owner))
    monkeypatch.setattr(os, "chown", lambda path, *owner: folders.update({Path(path).name: owner}))
    assert install(monkeypatch, str(source), str(nodes), "--owner", "10001:7", "--owner", "prometheus=65534") == 0
    assert {path.name for path in nodes.iterdir()} == {"leader-1", "prometheus"}
    assert files == [(10001, 7)] * 3 + [(65534, 65534)] * 3
    for name, owner in (("leader-1", (10001, 7)), ("prometheus", (65534, 65534))):
        home = nodes / name
        assert home.stat().st_mode & 0o777 == 0o700
        assert (home / "tls.key").stat().st_mode & 0o777 == 0o400
        assert folders[name] == owner
        for file in ("tls.key", "tls.crt", "ca.crt"):
            assert (home / file).read_bytes() == (source / name / file).read_bytes()


def test_what_is_installed_is_replaced_when_it_is_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, home = tmp_path / "certs", tmp_path / "nodes" / "leader-1"
    run(monkeypatch, str(source), "leader-1")
    home.mkdir(parents=True)
    install(monkeypatch, str(source), str(tmp_path / "nodes"))
    before = {path.name: path.stat().st_ino for path in home.iterdir()}
    install(monkeypatch, str(source), str(tmp_path / "nodes"))
    assert {path.name: path.stat().st_ino for path in home.iterdir()} == before
    run(monkeypatch, str(source), "leader-1")
    install(monkeypatch, str(source), str(tmp_path / "nodes"))
    after = {path.name: path.stat().st_ino for path in home.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"tls.key", "tls.crt"}
    assert (home / "tls.key").read_bytes() == (source / "leader-1" / "tls.key").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--owner", "root"), 2, "'root' is not [NAME=]UID[:GID]"),
        (("--owner", "1:"), 2, "'1:' is not [NAME=]UID[:GID]"),
        (("--owner", "4294967296"), 2, "is not [NAME=]UID[:GID]"),
        ((), 1, "tls.key: No such file or directory"),
    ],
)
def test_what_cannot_be_installed_is_told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    told: str,
) -> None:
    (tmp_path / "certs" / "leader-1").mkdir(parents=True)
    (tmp_path / "nodes" / "leader-1").mkdir(parents=True)
    assert install(monkeypatch, str(tmp_path / "certs"), str(tmp_path / "nodes"), *arguments) == code
    assert told in capsys.readouterr().err.replace("tls.crt", "tls.key")
    assert not list((tmp_path / "nodes" / "leader-1").iterdir())


def test_a_target_without_folders_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(monkeypatch, str(tmp_path), str(tmp_path)) == 1
    assert "has no directories" in capsys.readouterr().err
