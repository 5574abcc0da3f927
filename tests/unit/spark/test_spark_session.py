"""The SPARK_HOME directory that a session creates."""

from __future__ import annotations

from pathlib import Path

import pytest

pyspark = pytest.importorskip("pyspark", exc_type=ImportError)


def test_spark_home_has_all_parts_except_zipped_pyspark(tmp_path: Path) -> None:
    from kipmesh.spark.session import home_without_zip

    for _ in range(2):  # the second call reuses the directory
        home = home_without_zip(tmp_path / "home")
        assert (home / "bin" / "spark-submit").exists()
        assert list((home / "jars").glob("spark-core_*.jar"))
        assert not (home / "python").exists()
        assert (home / "jars").resolve() == Path(pyspark.__file__).resolve().parent / "jars"


def test_spark_home_in_use_keeps_all_parts(tmp_path: Path) -> None:
    from kipmesh.spark.session import home_without_zip

    home = home_without_zip(tmp_path / "home")
    before = {part.name: part.lstat().st_mtime_ns for part in home.iterdir()}
    home_without_zip(home)  # a second process starts while the first loads its classes
    assert {part.name: part.lstat().st_mtime_ns for part in home.iterdir()} == before


def test_spark_home_of_another_pyspark_is_replaced(tmp_path: Path) -> None:
    from kipmesh.spark.session import home_without_zip

    home = home_without_zip(tmp_path / "home")
    names = sorted(part.name for part in home.iterdir())
    (home / "jars").unlink()
    (home / "jars").symlink_to(tmp_path / "removed", target_is_directory=True)
    assert (home_without_zip(home) / "jars").resolve() == Path(pyspark.__file__).resolve().parent / "jars"
    assert sorted(part.name for part in home.iterdir()) == names
