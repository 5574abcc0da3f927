"""What the source `kipmesh` refuses while Spark plans or runs a query, as the one clear line of a job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kipmesh.spark.jobs.frame import JobError

_REFUSED: Final = re.compile(r"(?:InvalidOptionError|DataLossError|KafkaError): (.+)")


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Raise `JobError` with the source's own words for an error of Spark that holds them; others go through."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        found = _REFUSED.findall(str(error))
        if not found:
            raise
        raise JobError(found[-1].strip()) from None
