"""The part of the service Admin that is about users' SCRAM credentials; each request is one operation."""

from __future__ import annotations

from kipmesh.core.errors import KafkaError
from kipmesh.core.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from kipmesh.core.messages.credentials import refused
from kipmesh.node.controller.owner import Do
from kipmesh.rpc.server import RequestContext


class CredentialService:
    """Users and how they authenticate."""

    def __init__(self, do: Do) -> None:
        self._do_credentials = do

    async def describe_user_scram_credentials(
        self, request: DescribeUserScramCredentialsRequest, context: RequestContext
    ) -> DescribeUserScramCredentialsResponse:
        """DescribeUserScramCredentials (API key 50)."""
        try:
            response: DescribeUserScramCredentialsResponse = await self._do_credentials(
                "DescribeUserScramCredentials", lambda controller: controller.describe_credentials(request)
            )
        except KafkaError as error:
            return DescribeUserScramCredentialsResponse(error_code=error.code, error_message=error.message)
        return response

    async def alter_user_scram_credentials(
        self, request: AlterUserScramCredentialsRequest, context: RequestContext
    ) -> AlterUserScramCredentialsResponse:
        """AlterUserScramCredentials (API key 51)."""
        try:
            response: AlterUserScramCredentialsResponse = await self._do_credentials(
                "AlterUserScramCredentials", lambda controller: controller.alter_credentials(request)
            )
        except KafkaError as error:
            return refused(request, error.code, error.message)
        return response
