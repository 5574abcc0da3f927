"""The page of the flights job: one HTML file with its data, styles and charts in it, which opens without a network.

`facts` is what is known about the run, `page` turns tables and facts into the file. Charts are drawn in the browser
as SVG by `charts.js` and `sections.js`, in the reader's light or dark colours and at any width; the page's own content
security policy forbids it to load anything.
"""

from __future__ import annotations

from kipmesh.spark.jobs.flights.report.facts import NodeFacts, PartitionFacts, RunFacts
from kipmesh.spark.jobs.flights.report.page import render
from kipmesh.spark.jobs.report import Check, Stage

__all__ = ["Check", "NodeFacts", "PartitionFacts", "RunFacts", "Stage", "render"]
