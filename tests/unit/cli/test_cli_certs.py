"""`kipmesh certs make`: what it writes is what nodes and clients take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cryptography import x509

from kipmesh.cli import main
from kipmesh.tls import TlsFiles, TlsPaths


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
        (["authority"], "'authority' cannot be the name"),
        (["../x"], "cannot be the name"),
        (["a", "--san", "two words"], "'two words' is neither a DNS name, nor an address, nor a URI"),
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
