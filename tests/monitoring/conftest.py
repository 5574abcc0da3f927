"""Tests of what watches a mesh: rules, alerts and dashboards, with a real Prometheus where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
