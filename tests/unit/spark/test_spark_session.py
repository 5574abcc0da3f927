"""The folder that Spark is started from."""

from __future__ import annotations

from pathlib import Path

import pytest

pyspark = pytest.importorskip("pyspark", exc_type=ImportError)


def test_sparks_home_has_all_but_the_zipped_pyspark(tmp_path: Path) -> None:
    from kipmesh.spark.session import home_without_zip

    for _ in range(2):  # a folder that was used before is used again
        home = home_without_zip(tmp_path / "home")
        assert (home / "bin" / "spark-submit").exists()
        assert list((home / "jars").glob("spark-core_*.jar"))
        assert not (home / "python").exists()
        assert (home / "jars").resolve() == Path(pyspark.__file__).resolve().parent / "jars"


def test_a_home_in_use_loses_no_part_at_any_time(tmp_path: Path) -> None:
    from kipmesh.spark.session import home_without_zip

    home = home_without_zip(tmp_path / "home")
    before = {part.name: part.lstat().st_mtime_ns for part in home.iterdir()}
    home_without_zip(home)  # for a second process, while the first one loads its classes
    assert {part.name: part.lstat().st_mtime_ns for part in home.iterdir()} == before


def test_a_home_of_another_pyspark_is_mended(tmp_path: Path) -> None:
    from kipmesh.spark.session import home_without_zip

    home = home_without_zip(tmp_path / "home")
    names = sorted(part.name for part in home.iterdir())
    (home / "jars").unlink()
    (home / "jars").symlink_to(tmp_path / "removed", target_is_directory=True)
    assert (home_without_zip(home) / "jars").resolve() == Path(pyspark.__file__).resolve().parent / "jars"
    assert sorted(part.name for part in home.iterdir()) == names
