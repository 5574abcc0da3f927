"""Search for Java: version texts of several runtimes, and runtimes that do not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kipmesh.spark.java import find_java, java_version


def fake_java(home: Path, script: str) -> Path:
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "21-ea" 2023-09-19', 21),
        ("no version here", 0),
    ],
)
def test_java_version_parses_output_of_each_runtime(tmp_path: Path, text: str, version: int) -> None:
    assert java_version(fake_java(tmp_path / "jdk", f"echo '{text}' >&2")) == version


def test_java_that_fails_to_start_has_no_version(tmp_path: Path) -> None:
    stub = fake_java(tmp_path / "stub", "echo 'openjdk version \"17\"' >&2; exit 1")
    assert java_version(stub) == 0
    assert java_version(tmp_path / "nothing") == 0


def test_find_java_prefers_java_home_unless_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = fake_java(tmp_path / "new", "echo 'openjdk version \"21.0.1\"' >&2")
    old = fake_java(tmp_path / "old", "echo 'openjdk version \"11.0.1\"' >&2")
    monkeypatch.setenv("JAVA_HOME", str(new))
    assert find_java() == new
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert find_java() != old
