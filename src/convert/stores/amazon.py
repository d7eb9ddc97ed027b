"""S3: where requests go, and with which credentials."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.stores.errors import StoreError, missing_extra, reason

_ENDPOINT = re.compile(r"https?://([^\s/@]+@)?(\[[0-9a-fA-F:]+\]|[^\s/:@\[\]]+)(:\d{1,5})?(/\S*)?")


@dataclass(frozen=True)
class S3:
    """Where requests to S3 go, and with which credentials.

    Attributes:
        endpoint: of the environment; None is AWS.
        region: of the environment or the profile.
        session: boto3's, which finds profiles, SSO and roles; None where the environment has the keys.
        known: whether there are credentials; without, requests are not signed, as public buckets need none.
    """

    endpoint: str | None
    region: str
    session: Any
    known: bool

    def obstore(self) -> dict[str, Any]:
        """Return the settings of obstore's store."""
        config: dict[str, Any] = {"region": self.region}
        if self.endpoint:
            config["endpoint"] = self.endpoint
        if not self.known:
            config["skip_signature"] = True
        elif self.session is not None:
            from obstore.auth.boto3 import Boto3CredentialProvider

            config["credential_provider"] = Boto3CredentialProvider(self.session)
        return config

    def tensorstore(self) -> dict[str, Any]:
        """Return the settings of TensorStore's driver, which looks for the credentials itself."""
        spec: dict[str, Any] = {"endpoint": self.endpoint, "aws_region": self.region} if self.endpoint else {}
        return {**spec, "aws_credentials": self._tensorstore_credentials()}

    def _tensorstore_credentials(self) -> dict[str, str]:
        if not self.known:
            return {"type": "anonymous"}
        if self.session is None:
            return {"type": "environment"}
        if self.session.get_credentials().method not in ("shared-credentials-file", "config-file"):
            return {"type": "default"}
        files = {
            "credentials_file": os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
            "config_file": os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
        }
        places = {name: str(Path(file).expanduser()) for name, file in files.items()}  # one of them may be missing
        return {"type": "profile", "profile": self.session.profile_name, **places}


def s3() -> S3:
    """Find the endpoint, the region and the credentials of S3.

    Raises:
        StoreError: one of them cannot be used.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        raise StoreError("AWS_ENDPOINT_URL is not a URL", "s3://", "give it with http:// or https://")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    session, known = None, True
    if not (os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY")):
        try:
            from boto3 import Session
            from botocore.exceptions import BotoCoreError
        except ImportError:
            raise missing_extra("s3", "boto3", "remote", "s3://") from None
        try:
            session = Session()
            credentials = session.get_credentials()
            if known := credentials is not None:
                credentials.get_frozen_credentials()  # SSO and credential processes are asked here
        except BotoCoreError as error:
            problem = f"boto3 finds no credentials: {reason(str(error))}"
            raise StoreError(problem, "s3://", "correct the files of AWS or AWS_PROFILE, or log in again") from None
        region = region or session.region_name
    return S3(endpoint, region or "us-east-1", session, known)
