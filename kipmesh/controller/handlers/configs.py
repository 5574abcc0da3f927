"""IncrementalAlterConfigs (44) and AlterConfigs (33) on the active controller.

AlterConfigs sets the keys of the request and deletes all other keys of the resource. Pending elections are retried
after each change, because the new configuration may allow them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kipmesh.controller.decision_queue import ControllerParts, DecideWith
from kipmesh.core.config.base import AlterOperation, ResourceType
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.decision import Decision
from kipmesh.messages.apis.admin import alter_configs as m
from kipmesh.messages.apis.admin import configs


async def incremental_alter_configs(
    controller: ControllerParts, request: configs.IncrementalAlterConfigsRequest, context: RequestContext
) -> Any:
    """Set or delete single configuration keys of resources, then retry pending elections. Error codes: see
    `core.metadata.configs.alter_configs`. Raises KafkaError as `QuorumController.do` does."""
    return await _alter(controller, "IncrementalAlterConfigs", lambda core: core.incremental_alter_configs(request))


async def alter_configs(controller: ControllerParts, request: m.AlterConfigsRequest, context: RequestContext) -> Any:
    """Set the keys in the request and delete all other keys of each resource, then retry pending elections. A resource
    named twice gets INVALID_REQUEST; the other error codes are those of IncrementalAlterConfigs. Raises KafkaError as
    `QuorumController.do` does."""
    return await _alter(controller, "AlterConfigs", lambda core: _replace(core, request))


async def _alter(controller: ControllerParts, operation: str, decide: DecideWith) -> Any:
    response = await controller.do(operation, decide)
    await controller.do("Elect", lambda core: Decision(core.brokers.elect_pending(), None))
    return response


def _replace(core: MetadataController, request: m.AlterConfigsRequest) -> Decision[m.AlterConfigsResponse]:
    times = Counter(map(_key, request.resources))
    changes = [_changes(core, one) for one in request.resources if times[_key(one)] == 1]
    decision = core.incremental_alter_configs(configs.IncrementalAlterConfigsRequest(changes, request.validate_only))
    results = iter(decision.response.responses)
    code, message = ErrorCode.INVALID_REQUEST, "the request contains this resource more than once"
    responses = [
        next(results) if times[_key(one)] == 1 else configs.AlterConfigsResourceResponse(code, message, *_key(one))
        for one in request.resources
    ]
    return Decision(decision.records, m.AlterConfigsResponse(responses=responses))


def _key(resource: m.ReplacedConfigsResource) -> tuple[int, str]:
    return resource.resource_type, resource.resource_name


def _changes(core: MetadataController, resource: m.ReplacedConfigsResource) -> configs.AlterConfigsResource:
    """Return the single-key changes that turn the current configuration of `resource` into the requested one."""
    kind, name = _key(resource)
    number = name.lstrip("0") or name[:1]  # "01" is broker 1, as in IncrementalAlterConfigs
    before = core.image.broker_config(number) if kind == ResourceType.BROKER else core.image.topic_config(name)
    named = {one.name for one in resource.configs}
    changes = [configs.AlterableConfig(one.name, AlterOperation.SET, one.value) for one in resource.configs]
    changes += [configs.AlterableConfig(key, AlterOperation.DELETE) for key in before if key not in named]
    return configs.AlterConfigsResource(kind, name, changes)
