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
