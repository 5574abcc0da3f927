"""The part of the service Admin that is about users' SCRAM credentials, on a broker: forwarded.

To set a credential twice is as good as once. A deletion is not: it is answered as done when the request was repeated,
this broker knew the credential when it came, and it is gone (see `repeats`).
"""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from kipmesh.core.messages.credentials import refused
from kipmesh.node.broker.reassignments import Forward
from kipmesh.node.broker.repeats import Image
from kipmesh.rpc.server import RequestContext

TIMEOUT_MS = 10_000


class CredentialHandler:
    """Forwards; without an answer of an active controller it is REQUEST_TIMED_OUT (it may have been done)."""

    def __init__(self, forward: Forward, image: Image) -> None:
        self._forward_credentials = forward
        self._credential_image = image

    async def describe_user_scram_credentials(
        self, request: DescribeUserScramCredentialsRequest, context: RequestContext
    ) -> DescribeUserScramCredentialsResponse:
        """DescribeUserScramCredentials (API key 50)."""
        answer = await self._forward_credentials("DescribeUserScramCredentials", request, TIMEOUT_MS, context)
        if isinstance(answer, str):
            return DescribeUserScramCredentialsResponse(error_code=ErrorCode.REQUEST_TIMED_OUT, error_message=answer)
        response: DescribeUserScramCredentialsResponse = answer.response
        return response

    async def alter_user_scram_credentials(
        self, request: AlterUserScramCredentialsRequest, context: RequestContext
    ) -> AlterUserScramCredentialsResponse:
        """AlterUserScramCredentials (API key 51)."""
        image = self._credential_image()
        known = {each.name for each in request.deletions if each.mechanism in image.credentials_of(each.name)}
        answer = await self._forward_credentials("AlterUserScramCredentials", request, TIMEOUT_MS, context)
        if isinstance(answer, str):
            return refused(request, ErrorCode.REQUEST_TIMED_OUT, answer)
        response: AlterUserScramCredentialsResponse = answer.response
        if not answer.is_repeated:
            return response
        results = [
            AlterUserScramCredentialsResult(each.user)
            if each.user in known and each.error_code == ErrorCode.RESOURCE_NOT_FOUND
            else each
            for each in response.results
        ]
        return response._replace(results=results)
