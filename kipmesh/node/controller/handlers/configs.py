"""IncrementalAlterConfigs (44): a changed configuration may allow elections that were waiting for it."""

from __future__ import annotations

from typing import Any

from kipmesh import messages as m
from kipmesh.core.context import RequestContext
from kipmesh.core.metadata.decision import Decision
from kipmesh.node.controller.parts import ControllerParts


async def incremental_alter_configs(
    controller: ControllerParts, request: m.IncrementalAlterConfigsRequest, context: RequestContext
) -> Any:
    """Set or delete single keys."""
    response = await controller.do("IncrementalAlterConfigs", lambda core: core.incremental_alter_configs(request))
    await controller.do("Elect", lambda core: Decision(core.elect_pending(), None))
    return response
